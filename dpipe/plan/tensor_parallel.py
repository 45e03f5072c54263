"""What it takes the T ranks of a stage to be one: their arithmetic shared out, and what they
exchange. No torch.

A micro-batch's activation [B, S, D] between matrices is u bytes. Of it a rank sends, for each
layer, in units of (T - 1) / T u, an all-reduce being two of them (Korthikanti et al. 2022, section
4.2):

                       embedding         block             head
                       forward backward  forward backward  forward backward
    tensor parallel    2       0         4       4         0       2
    sequence parallel  1       1         4       6         1       2        what enters a matrix is gathered again

That is time of the compute lane: nothing else can run meanwhile. Each exchange also waits out the
machine's delay.
"""

from dataclasses import dataclass, replace

from dpipe.config.load import Config
from dpipe.data.tokenizer import vocabulary
from dpipe.errors import ConfigError
from dpipe.network.link import Link, Network
from dpipe.timeline.cost import Cost

_HALF_BYTES = 2
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Exchanges:
    """Of one layer and micro-batch: (units of (T - 1) / T u, exchanges), forward and backward."""

    forward: tuple[int, int]
    backward: tuple[int, int]


_TENSOR = (Exchanges((2, 1), (0, 0)), Exchanges((4, 2), (4, 2)), Exchanges((0, 2), (2, 1)))
_SEQUENCE = (Exchanges((1, 1), (1, 1)), Exchanges((4, 4), (6, 6)), Exchanges((1, 3), (2, 2)))


def check_vocabulary(config: Config) -> None:
    """Raises `ConfigError` where the tokenizer's words do not divide into equal parts."""
    size = config.tensor_parallel.size
    if size == 1 or config.model.vocab_size is not None:
        return
    words = vocabulary(config.data.tokenizer)
    if words % size:
        raise ConfigError(
            f"the tokenizer {config.data.tokenizer} has {words} entries, which "
            f"tensor_parallel.size {size} does not "
            f"divide; set model.vocab_size = {words + size - words % size}"
        )


def exchange_s(config: Config, num_layers: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Seconds of each layer's exchanges, forward and backward: embedding, blocks, head."""
    kinds = _SEQUENCE if config.tensor_parallel.sequence_parallel else _TENSOR
    layers = (kinds[0], *(kinds[1] for _ in range(num_layers - 2)), kinds[2])
    return (
        tuple(_seconds(config, *layer.forward) for layer in layers),
        tuple(_seconds(config, *layer.backward) for layer in layers),
    )


def at_boundaries(config: Config, cost: Cost) -> Cost:
    """`cost` of whole activations, as the machines of T ranks send them: once, and put together
    behind the link, or once by every rank.
    """
    chosen = config.tensor_parallel
    if chosen.size == 1 or chosen.sequence_parallel:
        return cost
    if not chosen.scatter_gather:
        times = chosen.size
        return replace(
            cost,
            activation_bytes=tuple(times * size for size in cost.activation_bytes),
            gradient_bytes=tuple(times * size for size in cost.gradient_bytes),
        )
    gather_us = _seconds(config, 1, 1) * 1e6
    last = cost.num_stages - 1
    there = [gather_us * (stage > 0) for stage in range(cost.num_stages)]
    back = [gather_us * (stage < last) for stage in range(cost.num_stages)]
    return replace(
        cost,
        forward_us=_add(cost.forward_us, there),
        backward_us=_add(cost.backward_us, back),
        input_us=_add(cost.input_us, back),
    )


def ring_us(config: Config, network: Network) -> float:
    """An all-reduce among the ranks of a replayed stage, in a ring (`replayed.py`). Raises as
    `only_link` does.
    """
    size = config.tensor_parallel.size
    link = only_link(network)
    part_us = config.replay.exchange_bytes / size * 8 / (link.rate_gbps(network.connections) * 1e3)
    return 2 * (size - 1) * (link.delay_us + part_us)


def only_link(network: Network) -> Link:
    """What every link between the hosts of replayed stages is: a simulated rank stands for all that
    share its stage.

    Raises `ConfigError` for a network of unlike links.
    """
    if network.links or network.default is None:
        raise ConfigError(
            "replayed stages of several ranks are predicted on a network whose links are alike, "
            "and "
            f"{network.name} lists some apart; take a profile of one delay and one bandwidth"
        )
    return network.default


def _add(times_us: tuple[float, ...], more_us: list[float]) -> tuple[float, ...]:
    return tuple(a + b for a, b in zip(times_us, more_us, strict=True))


def _seconds(config: Config, units: int, count: int) -> float:
    size = config.tensor_parallel.size
    value_bytes = _FLOAT_BYTES if config.train.precision == "fp32" else _HALF_BYTES
    u = config.microbatch_size * config.model.context * config.model.width * value_bytes
    bits = units * u * (size - 1) / size * 8
    return (
        bits / (config.predict.machine_gbps * 1e9) + count * config.predict.machine_delay_ms / 1e3
    )
