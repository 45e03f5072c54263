"""What keeping replicas in agreement holds on a rank, by kind, beside parameters, gradients and
AdamW's moments.

A row is a stage's parameters as fp32 numbers; P its bytes, R replicas, s the staleness
(`dataparallel/` has the code).

                      on every rank                                 with a step's delay besides
    all-reduce        a row to add up in                            another, what is agreed, a gradient: 3 P
    sharded           a row, for gradients and parameters in turns  another, a gradient, 2 of a shard: 2 P + 2 P / R
    local SGD         anchor, momentum, base, difference: 4 P
    parameter server  what came and 1 + s gradients; no moments
      and where it is 6 rows, 8 with a rounding wire, and 1 + s sums

int8 keeps what it has rounded off: P. Direct exchanges have places for pieces that come,
`chunk_bytes / R` each. Rows are in the host's memory, but for torch's group: where parameters are
on a GPU they are not counted.
"""

from collections.abc import Sequence

from dpipe.config.load import Config
from dpipe.schedule.exchange import AHEAD
from dpipe.wire.format import FORMATS, wire_bytes

# of a server: values and moments, before and after a step; and what workers have of each
_ROWS = 6
_ROUNDED_ROWS = 8
_EXPECTED = 2 * AHEAD  # messages of a link that have a place before they come


def exchange_bytes(
    config: Config, parameters: Sequence[int], servers: Sequence[int]
) -> tuple[int, ...]:
    """By stage, given each one's bytes of `parameters`. `servers[s]` is the rank of stage s's
    server, if there are any.

    A server that is a process of its own is on no rank; one for all has what all ranks of a stage
    hold of it.
    """
    own = [_of_stage(config, size) for size in parameters]
    parts = config.tensor_parallel.size if config.data_parallel.servers == "one" else 1
    for size, rank in zip(parameters, servers, strict=False):
        if not config.data_parallel.address:
            own[rank] += parts * _served(config, size)  # stage r is on rank r
    return tuple(own)


def has_moments(config: Config) -> bool:
    """Whether a rank has an optimizer of its own."""
    return not config.data_parallel.active_kind.has_server


def _of_stage(config: Config, size: int) -> int:
    chosen = config.data_parallel
    if chosen.replicas == 1:
        return 0
    held = chosen.active_kind.held
    in_rows = (held.working + chosen.staleness) * size + _rounded_off(config, size)
    if held.pieces:
        in_rows += _pieces(config, size)
    if not chosen.delay:
        return in_rows * _rows_are_counted(config)
    shard = size // chosen.replicas
    delayed = held.delayed * size + held.delayed_shards * shard
    return (in_rows + size) * _rows_are_counted(config) + delayed


def _served(config: Config, size: int) -> int:
    stale = config.data_parallel.staleness
    rounds = FORMATS[config.data_parallel.wire].lossy and not stale
    return ((_ROUNDED_ROWS if rounds else _ROWS) + 1 + stale) * size * _rows_are_counted(config)


def _rounded_off(config: Config, size: int) -> int:
    return size if FORMATS[config.data_parallel.wire].error_feedback else 0


def _pieces(config: Config, size: int) -> int:
    chosen = config.data_parallel
    if chosen.group == "torch":
        return 0
    # What comes back rounded needs memory of its own until it is decoded.
    rounds = FORMATS[chosen.wire].lossy
    parts = max(1, -(-size // chosen.chunk_bytes))
    piece = wire_bytes(chosen.wire, size // 4 // (parts * chosen.replicas))
    return (chosen.replicas - 1) * min(_EXPECTED, parts * (1 + rounds)) * piece


def _rows_are_counted(config: Config) -> bool:
    return config.node.device == "cpu" or config.data_parallel.group == "torch"
