"""A model of Megatron-LM: memory and time of a layer, by tensor parallel size and strategy.

In half precision a parameter has 2 bytes, its gradient 2 in a separate buffer, and its fp32 master
weight 4; the optimizer's step needs 4 more for the gradient in fp32. In fp32 it is 4 and 4. Adam
has two moments of 4 bytes, SGD none.

    s sequence · b micro-batch · h width · a heads · t tensor parallel
    S = s b h values     A = a s^2 b / t scores

What a layer keeps for its backward pass is from Korthikanti et al. 2022, table 2. Working memory
follows from the order of operations in Megatron's source: the backward pass of an attention core
needs two fp16 gradients of the scores, after the MLP's activations have been freed; the loss needs
three fp32 copies of the logits.
"""

from dataclasses import dataclass
from typing import Literal, assert_never

from dpipe.memory.walk import LayerMemory, RankMemory, peak_memory
from dpipe.schedule.generate import generate
from tables.waves import Passes, Tiles, products

Strategy = Literal[
    "baseline",
    "sequence-parallel",
    "selective-recompute",
    "sequence-parallel+selective-recompute",
    "full-recompute",
]

_LOGITS_WORKING = 12  # bytes a logit: as they are, less their maximum, their exponentials


@dataclass(frozen=True)
class Shape:
    """A transformer and its micro-batch. `vocab_size` is padded to a multiple of 128 t, as in
    Megatron.
    """

    num_layers: int
    width: int
    num_heads: int
    sequence: int
    vocab_size: int
    micro_batch: int
    bert: bool = False  # token types, a dense layer before the logits, a pooler
    classifies: bool = False  # sequences, into two: no logits over the words
    value_bytes: int = 2  # of activations, parameters and gradients
    adam: bool = True  # else SGD without momentum

    @property
    def values(self) -> int:
        """Of an activation between layers."""
        return self.sequence * self.micro_batch * self.width

    @property
    def activation_bytes(self) -> int:
        return self.values * self.value_bytes

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
    updating = [(*stage, LayerMemory(update_bytes=_updating(shape, stage))) for stage in stages]
    plan = generate("1f1b", p, microbatches or 2 * p)
    return max(peak_memory(plan, updating, keeps_gradients=True), key=lambda rank: rank.total)


def kept_bytes(shape: Shape, t: int, strategy: Strategy) -> int:
    """What one layer leaves of one micro-batch. Dropout leaves masks of a byte a value."""
    v, values = shape.value_bytes, shape.values
    whole = (4 * v + 2) * values  # what every rank of the group has
    inside = 12 * v * values // t
    scores = _kept_scores(shape, t)
    match strategy:
        case "baseline":
            return whole + inside + scores
        case "sequence-parallel":
            return whole // t + inside + scores
        case "selective-recompute":
            return whole + inside
        case "sequence-parallel+selective-recompute":
            return whole // t + inside
        case "full-recompute":
            return v * values
    assert_never(strategy)


def _kept_scores(shape: Shape, t: int) -> int:
    """Softmax, its dropout and the mask."""
    return (2 * shape.value_bytes + 1) * shape.scores(t)


def _layer(shape: Shape, t: int, strategy: Strategy) -> LayerMemory:
    v, values = shape.value_bytes, shape.values
    sequence = t if strategy.startswith("sequence") else 1
    # Of the perceptron, before the core's turn.
    given_back = (2 * v + 1) * values // sequence + 8 * v * values // t
    again = _kept_scores(shape, t) if "selective" in strategy else 0
    perceptron = v * values // sequence + 8 * v * values // t
    gradients = 2 * v * shape.scores(t)
    if v == 4:
        # Masked and softened one after the other: Megatron's fused kernel takes half precision.
        gradients += 2 * v * shape.scores(t)
    working = max(perceptron, again + gradients - given_back)
    if strategy == "full-recompute":
        working += kept_bytes(shape, t, "baseline")
    held = kept_bytes(shape, t, strategy)
    return _of(shape, layer_parameters(shape, t), held, backward_bytes=working)


def _embedding(shape: Shape, t: int, strategy: Strategy) -> LayerMemory:
    table = (shape.vocabulary(t) + shape.sequence + 2 * shape.bert) * shape.width
    return _of(shape, table, shape.values // (t if strategy.startswith("sequence") else 1))


def _head(shape: Shape, t: int, strategy: Strategy, *, own_table: bool) -> LayerMemory:
    """The norm's input and output are kept. For logits the last stage has a copy of the table."""
    h = shape.width
    kept = 2 * shape.activation_bytes // (t if strategy.startswith("sequence") else 1)
    parameters = 2 * h
    if shape.classifies:
        return _of(shape, parameters, kept)
    parameters += shape.vocabulary(t) * h * own_table + 2 * (h**2 + h) * shape.bert
    kept += 2 * shape.activation_bytes * shape.bert
    logits = shape.sequence * shape.micro_batch * shape.vocabulary(t)
    return _of(
        shape,
        parameters,
        kept + 4 * logits,
        forward_bytes=(_LOGITS_WORKING - 4) * logits,
        backward_bytes=2 * logits,
    )


def _of(shape: Shape, parameters: int, held: int, **working: int) -> LayerMemory:
    v = shape.value_bytes
    optimizer = 8 * shape.adam + (4 if v < 4 else 0)
    return LayerMemory(
        parameter_bytes=v * parameters,
        gradient_bytes=v * parameters,
        optimizer_bytes=optimizer * parameters,
        held_bytes=held,
        **working,
    )


def _updating(shape: Shape, stage: tuple[LayerMemory, ...]) -> int:
    """Gradients as fp32, where they are not."""
    if shape.value_bytes == 4:
        return 0
    return sum(2 * layer.parameter_bytes for layer in stage)


@dataclass(frozen=True)
class Device:
    """Nominal figures of a GPU, the shares of them that kernels reach, and what the host takes to
    issue its work.
    """

    teraflops: float
    gigabytes_per_s: float
    link_gigabytes_per_s: float  # of an all-reduce inside the machine
    efficiency: float  # share of `teraflops` in a product
    memory_efficiency: float  # share of `gigabytes_per_s`
    host_us: float = 0.0  # to issue one operation
    host_collective_us: float = 0.0
    # To save and restore the random numbers' state around what is recomputed.
    host_checkpoint_us: float = 0.0
    collective_latency_us: float = 0.0  # of an all-reduce, or of two halves of one
    tiles: Tiles | None = None  # of a product; None: as if every wave were full

    def kernel_us(self, operations: float = 0.0, moved_bytes: float = 0.0) -> float:
        compute = operations / (self.teraflops * self.efficiency * 1e6)
        moving = moved_bytes / (self.gigabytes_per_s * self.memory_efficiency * 1e3)
        return max(compute, moving)

    def collective_us(self, moved_bytes: float) -> float:
        return moved_bytes / (self.link_gigabytes_per_s * 1e3)


# Of a layer's forward; backward issues half as many again.
_CORE_OPERATIONS = 4
_OTHER_OPERATIONS = 12


def layer_us(shape: Shape, t: int, strategy: Strategy, device: Device) -> tuple[float, float]:
    """Forward and backward of one layer and micro-batch: what the device takes, or the host where
    that is more.
    """
    core = _core_us(shape, t, device)
    traffic = _traffic_us(shape, t, strategy, device)
    computed = _products_us(shape, t, device)
    ahead = core + computed.forward + traffic
    back = 2 * core + computed.backward + 2 * traffic
    parallel, tensor = strategy.startswith("sequence"), t > 1
    collectives = (
        4 if parallel else 2
    ) * tensor  # forward; twice reduce-scatter and all-gather, or all-reduce
    gathered = 2 * parallel * tensor  # again in backward, for the weight gradients
    half = device.collective_us(shape.activation_bytes * (t - 1) / t)
    moved = tensor * (4 * half + 2 * device.collective_latency_us)
    forward = max(
        ahead + moved, _host_us(_CORE_OPERATIONS + _OTHER_OPERATIONS, collectives, device)
    )
    operations = 1.5 * (_CORE_OPERATIONS + _OTHER_OPERATIONS)
    host = _host_us(operations, collectives + gathered, device)
    backward = back + moved + gathered * half
    if "selective" in strategy:
        host += _host_us(_CORE_OPERATIONS, 0, device) + device.host_checkpoint_us
        backward += core
    if strategy == "full-recompute":
        host += (
            _host_us(_CORE_OPERATIONS + _OTHER_OPERATIONS, collectives, device)
            + device.host_checkpoint_us
        )
        backward += ahead + moved
    return forward, max(backward, host)


def _host_us(operations: float, collectives: int, device: Device) -> float:
    return operations * device.host_us + collectives * device.host_collective_us


def _core_us(shape: Shape, t: int, device: Device) -> float:
    """Scores, masked softmax, dropout with a mask of a byte, mixing."""
    v, scores, product = shape.value_bytes, shape.scores(t), 2 * shape.sequence * shape.values / t
    traffic = (
        (product, v * scores),
        (0, 2 * v * scores),
        (0, (2 * v + 1) * scores),
        (product, v * scores),
    )
    return sum(device.kernel_us(operations, moved) for operations, moved in traffic)


def _products_us(shape: Shape, t: int, device: Device) -> Passes:
    one_us = device.kernel_us(2 * shape.values * shape.width / t)
    tokens = shape.sequence * shape.micro_batch
    forward, backward = products(tokens, shape.width, t, device.tiles)
    return Passes(one_us * forward, one_us * backward)


def _traffic_us(shape: Shape, t: int, strategy: Strategy, device: Device) -> float:
    """Two norms, GELU, two sums with dropout, three transpositions."""
    v, values = shape.value_bytes, shape.values
    along = values / (t if strategy.startswith("sequence") else 1)
    return device.kernel_us(0, 11 * v * along) + device.kernel_us(0, 14 * v * values / t)
