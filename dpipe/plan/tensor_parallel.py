"""What tensor parallelism costs: T ranks share a stage's arithmetic, and exchange activations. No
torch.

A micro-batch's activation [B, S, D] between matrices is u bytes. For each layer a rank sends, in
units of (T - 1) / T u, of which an all-reduce is two (Korthikanti et al. 2022, section 4.2):

                       embedding         block             head
                       forward backward  forward backward  forward backward
    tensor parallel    2       0         4       4         0       2
    sequence parallel  1       1         4       6         1       2

Sequence parallelism gathers the input of a matrix once more in backward. All this is time of the
compute lane: nothing else can run meanwhile. Each exchange also waits out the machine's delay.
"""

from dataclasses import dataclass, replace

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.network.link import Link, Network
from dpipe.timeline.cost import Cost
from dpipe.tokenizer.tokenizer import vocabulary

Times = tuple[float, ...]  # by layer, or by stage

_HALF_BYTES = 2
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class LayerExchanges:
    """Of one layer and micro-batch: (units of (T - 1) / T u, number of exchanges)."""

    forward: tuple[int, int]
    backward: tuple[int, int]


# Embedding, block, head.
_TENSOR = (
    LayerExchanges((2, 1), (0, 0)),
    LayerExchanges((4, 2), (4, 2)),
    LayerExchanges((0, 2), (2, 1)),
)
_SEQUENCE = (
    LayerExchanges((1, 1), (1, 1)),
    LayerExchanges((4, 4), (6, 6)),
    LayerExchanges((1, 3), (2, 2)),
)


def check_vocabulary(config: Config) -> None:
    """Raises `ConfigError` if the tokenizer's vocabulary does not divide into equal parts."""
    size = config.tensor_parallel.size
    if size == 1 or config.model.vocab_size is not None:
        return
    entries = vocabulary(config.data.tokenizer)
    if entries % size:
        raise ConfigError(
            f"the tokenizer {config.data.tokenizer} has {entries} entries, which "
            f"tensor_parallel.size {size} does not divide; "
            f"set model.vocab_size = {entries + size - entries % size}"
        )


def exchange_s(config: Config, num_layers: int) -> tuple[Times, Times]:
    """Seconds of each layer's exchanges, forward and backward: embedding, blocks, head."""
    embedding, block, head = _SEQUENCE if config.tensor_parallel.sequence_parallel else _TENSOR
    layers = (embedding, *[block] * (num_layers - 2), head)
    return (
        tuple(_seconds(config, *layer.forward) for layer in layers),
        tuple(_seconds(config, *layer.backward) for layer in layers),
    )


def at_boundaries(config: Config, cost: Cost) -> Cost:
    """`cost` of whole activations as the machines of T ranks send them: each rank its part, put
    together behind the link; without scatter and gather, each rank the whole.
    """
    group = config.tensor_parallel
    if group.size == 1 or group.sequence_parallel:
        return cost
    if not group.scatter_gather:
        return replace(
            cost,
            activation_bytes=tuple(group.size * size for size in cost.activation_bytes),
            gradient_bytes=tuple(group.size * size for size in cost.gradient_bytes),
        )
    gather_us = _seconds(config, 1, 1) * 1e6
    # The first stage receives no activation, the last no gradient.
    return replace(
        cost,
        forward_us=(cost.forward_us[0], *_later(cost.forward_us[1:], gather_us)),
        backward_us=(*_later(cost.backward_us[:-1], gather_us), cost.backward_us[-1]),
        input_us=(*_later(cost.input_us[:-1], gather_us), cost.input_us[-1]),
    )


def ring_us(config: Config, network: Network) -> float:
    """An all-reduce among the ranks of a replay stage, in a ring (`engine/replay_ring.py`).

    Raises as `only_link` does.
    """
    size = config.tensor_parallel.size
    link = only_link(network)
    part_bits = config.replay.exchange_bytes / size * 8
    part_us = part_bits / (link.rate_gbps(network.connections) * 1e3)
    # A reduce-scatter and an all-gather, each of T - 1 turns, in which a T-th moves on.
    return 2 * (size - 1) * (link.delay_us + part_us)


def only_link(network: Network) -> Link:
    """The link between any two hosts of replay stages: a simulated rank stands for all ranks of its
    tensor-parallel group.

    Raises `ConfigError` for a network whose links differ.
    """
    if network.links or network.default is None:
        raise ConfigError(
            "replay stages of several ranks are predicted on a network whose links are alike, and "
            f"{network.name} lists some apart; take a profile of one delay and one bandwidth"
        )
    return network.default


def _later(times_us: Times, more_us: float) -> Times:
    return tuple(time_us + more_us for time_us in times_us)


def _seconds(config: Config, units: int, count: int) -> float:
    """Of `count` exchanges between the ranks of a machine, which send `units` in all."""
    size = config.tensor_parallel.size
    predict = config.predict
    value_bytes = _HALF_BYTES
    if config.train.precision == "fp32":
        value_bytes = _FLOAT_BYTES
    model = config.model
    tokens = config.microbatch_size * model.context
    u = tokens * model.width * value_bytes
    bits = units * u * (size - 1) / size * 8
    sending_s = bits / (predict.machine_gbps * 1e9)
    delays_s = count * predict.machine_delay_ms / 1e3
    return sending_s + delays_s
