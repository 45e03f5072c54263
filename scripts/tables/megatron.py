"""Megatron-LM as the simulator sees it: what a layer holds and what it takes, by tensor parallelism
and strategy.

Half precision throughout. A parameter has 2 bytes and 2 of gradient in a buffer of its own, a
master copy and two moments of 4; in the optimizer's step 4 more, its gradient as fp32.

    s sequence · b micro-batch · h width · a heads · t tensor parallel
    S = s b h values     A = a s^2 b / t scores

What a layer leaves for its backward is Korthikanti et al. 2022, table 2. Working memory, from the
order of operations of the source: an attention core's backward needs two fp16 gradients of the
scores, when the perceptron's part of the layer is already given back; the loss needs three fp32
copies of the logits.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from dpipe.schedule.generate import generate
from dpipe.timeline.memory import LayerMemory, RankMemory, peak_memory

Strategy = Literal[
    "baseline",
    "sequence-parallel",
    "selective-recompute",
    "sequence-parallel+selective-recompute",
    "full-recompute",
]

_SCORES_KEPT, _SCORES_WORKING = (
    5,
    4,
)  # bytes a score: softmax, its dropout and the mask; two gradients in fp16
_LOGITS_WORKING = 12  # bytes a logit: as they are, less their maximum, their exponentials


@dataclass(frozen=True)
class Shape:
    """A transformer and its micro-batch. `vocab_size` is padded to a multiple of 128 t, as the
    source pads it.
    """

    num_layers: int
    width: int
    num_heads: int
    sequence: int
    vocab_size: int
    micro_batch: int
    bert: bool = False  # token types, a dense layer before the logits, a pooler

    @property
    def values(self) -> int:
        return self.sequence * self.micro_batch * self.width

    def scores(self, tensor_parallel: int) -> int:
        return self.num_heads * self.sequence**2 * self.micro_batch // tensor_parallel

    def vocabulary(self, tensor_parallel: int) -> int:
        """Entries of one rank."""
        return -(-self.vocab_size // (128 * tensor_parallel)) * 128


def layer_parameters(shape: Shape, t: int) -> int:
    """QKV and the perceptron's entry are cut by columns with their biases, the other two by
    rows.
    """
    h = shape.width
    return 12 * h**2 // t + 7 * h // t + 6 * h


def rank_memory(
    shape: Shape, t: int, p: int, strategy: Strategy, microbatches: int | None = None
) -> RankMemory:
    """Of the rank that holds most, under 1F1B over p stages; default: of as many micro-batches as
    it ever holds.
    """
    layer = _layer(shape, t, strategy)
    stage = (layer,) * (shape.num_layers // p)
    stages = [stage] * p
    stages[0] = (_embedding(shape, t, strategy), *stages[0])
    stages[-1] = (*stages[-1], _head(shape, t, strategy, own_table=p > 1))
    updating = [(*stage, LayerMemory(update_bytes=_updating(stage))) for stage in stages]
    plan = generate("1f1b", p, microbatches or 2 * p)
    return max(peak_memory(plan, updating, keeps_gradients=True), key=lambda rank: rank.total)


def kept_bytes(shape: Shape, t: int, strategy: Strategy) -> int:
    """What one layer leaves of one micro-batch."""
    values, scores = shape.values, _SCORES_KEPT * shape.scores(t)
    match strategy:
        case "baseline":
            return 10 * values + 24 * values // t + scores
        case "sequence-parallel":
            return 34 * values // t + scores
        case "selective-recompute":
            return 10 * values + 24 * values // t
        case "sequence-parallel+selective-recompute":
            return 34 * values // t
        case "full-recompute":
            return 2 * values
    assert_never(strategy)


def _layer(shape: Shape, t: int, strategy: Strategy) -> LayerMemory:
    values, scores = shape.values, shape.scores(t)
    sequence = t if strategy.startswith("sequence") else 1
    given_back = (
        5 * values // sequence + 16 * values // t
    )  # of the perceptron, before the core's turn
    again = _SCORES_KEPT * scores if "selective" in strategy else 0
    perceptron = 2 * values // sequence + 16 * values // t
    working = max(perceptron, again + _SCORES_WORKING * scores - given_back)
    if strategy == "full-recompute":
        working += kept_bytes(shape, t, "baseline")
    return _of(layer_parameters(shape, t), kept_bytes(shape, t, strategy), backward_bytes=working)


def _embedding(shape: Shape, t: int, strategy: Strategy) -> LayerMemory:
    table = (shape.vocabulary(t) + shape.sequence + 2 * shape.bert) * shape.width
    return _of(table, shape.values // (t if strategy.startswith("sequence") else 1))


def _head(shape: Shape, t: int, strategy: Strategy, *, own_table: bool) -> LayerMemory:
    """The last stage has a copy of the table; the norm's input and output are kept."""
    h, logits = shape.width, shape.sequence * shape.micro_batch * shape.vocabulary(t)
    parameters = shape.vocabulary(t) * h * own_table + 2 * h + 2 * (h**2 + h) * shape.bert
    kept = (
        4 * shape.values // (t if strategy.startswith("sequence") else 1)
        + 4 * shape.values * shape.bert
    )
    return _of(
        parameters,
        kept + 4 * logits,
        forward_bytes=(_LOGITS_WORKING - 4) * logits,
        backward_bytes=2 * logits,
    )


def _of(parameters: int, held: int, **working: int) -> LayerMemory:
    return LayerMemory(2 * parameters, 2 * parameters, 12 * parameters, held, **working)


def _updating(stage: tuple[LayerMemory, ...]) -> int:
    return sum(2 * layer.parameter_bytes for layer in stage)


@dataclass(frozen=True)
class Device:
    """Nominal figures of a GPU, the share of them that kernels reach, and what the host takes to
    issue its work.

    The three host figures are fitted, on the four rows that `FITTED` of the table names.
    """

    teraflops: float
    gigabytes_per_s: float
    link_gigabytes_per_s: float  # of an all-reduce inside the machine
    efficiency: float
    host_us: float  # to issue one operation
    host_collective_us: float
    host_checkpoint_us: (
        float  # to save and restore the random numbers' state around what is recomputed
    )

    def kernel_us(self, operations: float = 0.0, moved_bytes: float = 0.0) -> float:
        compute = operations / (self.teraflops * self.efficiency * 1e6)
        return max(compute, moved_bytes / (self.gigabytes_per_s * self.efficiency * 1e3))

    def collective_us(self, moved_bytes: float) -> float:
        return moved_bytes / (self.link_gigabytes_per_s * 1e3)


V100 = Device(
    teraflops=125,
    gigabytes_per_s=900,
    link_gigabytes_per_s=60,
    efficiency=0.6,
    host_us=104,
    host_collective_us=155,
    host_checkpoint_us=350,
)

_CORE_OPERATIONS, _OTHER_OPERATIONS = (
    4,
    12,
)  # of a layer's forward; backward issues half as many again


def layer_us(shape: Shape, t: int, strategy: Strategy, device: Device) -> tuple[float, float]:
    """Forward and backward of one layer and micro-batch: what the device takes, or the host where
    that is more.
    """
    core, rest = _core_us(shape, t, device), _rest_us(shape, t, strategy, device)
    parallel, tensor = strategy.startswith("sequence"), t > 1
    collectives = (
        4 if parallel else 2
    ) * tensor  # forward; twice reduce-scatter and all-gather, or all-reduce
    gathered = 2 * parallel * tensor  # again in backward, for the weight gradients
    half = device.collective_us(2 * shape.values * (t - 1) / t)
    moved = 4 * tensor * half
    forward = max(
        core + rest + moved, _host_us(_CORE_OPERATIONS + _OTHER_OPERATIONS, collectives, device)
    )
    operations = 1.5 * (_CORE_OPERATIONS + _OTHER_OPERATIONS)
    host = _host_us(operations, collectives + gathered, device)
    backward = 2 * (core + rest) + moved + gathered * half
    if "selective" in strategy:
        host += _host_us(_CORE_OPERATIONS, 0, device) + device.host_checkpoint_us
        backward += core
    if strategy == "full-recompute":
        host += (
            _host_us(_CORE_OPERATIONS + _OTHER_OPERATIONS, collectives, device)
            + device.host_checkpoint_us
        )
        backward += core + rest + moved
    return forward, max(backward, host)


def _host_us(operations: float, collectives: int, device: Device) -> float:
    return operations * device.host_us + collectives * device.host_collective_us


def _core_us(shape: Shape, t: int, device: Device) -> float:
    """Scores, masked softmax, dropout, mixing."""
    scores, product = shape.scores(t), 2 * shape.sequence * shape.values / t
    traffic = ((product, 2 * scores), (0, 4 * scores), (0, 5 * scores), (product, 2 * scores))
    return sum(device.kernel_us(operations, moved) for operations, moved in traffic)


def _rest_us(shape: Shape, t: int, strategy: Strategy, device: Device) -> float:
    """Four products, two norms, GELU, two sums with dropout, three transpositions."""
    values = shape.values
    along = values / (t if strategy.startswith("sequence") else 1)
    products = sum(device.kernel_us(2 * n * values * shape.width / t) for n in (3, 1, 4, 4))
    return products + device.kernel_us(0, 22 * along) + device.kernel_us(0, 28 * values / t)
