"""What keeping replicas in agreement holds on a rank, beside parameters, gradients and AdamW's
moments. No torch.

A row is a stage's parameters in fp32: P bytes. R replicas, s the staleness. `HeldRows` of a kind
says how many rows its code holds (`dataparallel/`):

    all-reduce        a row to add up in
      on a GPU        nothing, but P if replicas can be left out: the mean lies beside the gradient
      with a delay    another, what was agreed on, and a gradient: 3 P more
    sharded           a row, for gradients and parameters in turns
      with a delay    another, a gradient, and two shards: 2 P + 2 P / R more
    local SGD         anchor, momentum, base and difference: 4 P
    parameter server  what arrived, and 1 + s gradients; no moments
      on its rank     6 rows, or 8 if parameters are rounded on the wire, and 1 + s sums

A wire format with error feedback also keeps what it has rounded off: P. Exchanges between replicas
have buffers for the pieces that arrive, of `chunk_bytes / R` each. Rows are in host memory, except
those of torch's own group: where parameters are on a GPU they are not counted.
"""

from collections.abc import Sequence

from dpipe.config.load import Config
from dpipe.schedule.exchange import AHEAD
from dpipe.wire.format import FORMATS, wire_bytes

_FLOAT = 4
# Of a server: values and moments, before and after a step.
_ROWS = 6
# With what the workers have of the values, before and after a step.
_ROUNDED_ROWS = 8
_EXPECTED = 2 * AHEAD  # messages of a link that have a buffer before they arrive


def exchange_bytes(
    config: Config, parameters: Sequence[int], servers: Sequence[int]
) -> tuple[int, ...]:
    """By stage, given the bytes of each one's `parameters`. `servers[s]` is the rank of stage s's
    server, if there are servers.

    A server that is a process of its own is on no rank. One for all stages holds what all ranks of
    their tensor-parallel groups have.
    """
    held = [_of_stage(config, size) for size in parameters]
    if config.data_parallel.address:
        return tuple(held)
    parts = config.tensor_parallel.size if config.data_parallel.servers == "one" else 1
    # `servers` is empty where the kind has none.
    for size, rank in zip(parameters, servers, strict=False):
        held[rank] += parts * _of_server(config, size)  # stage r is on rank r
    return tuple(held)


def has_moments(config: Config) -> bool:
    """Whether a rank has an optimizer of its own."""
    return not config.data_parallel.active_kind.has_server


def _of_stage(config: Config, size: int) -> int:
    settings = config.data_parallel
    if settings.replicas == 1:
        return 0
    held = settings.active_kind.held
    num_rows = held.working + settings.staleness
    in_rows = num_rows * size + _rounded_off(config, size)
    if held.pieces:
        in_rows += _pieces(config, size)
    if settings.delay:
        in_rows += size
    if not _rows_are_counted(config):
        in_rows = held.own_gradient * size if settings.reject is not None else 0
    if not settings.delay:
        return in_rows
    shard = size // settings.replicas
    return in_rows + held.delayed * size + held.delayed_shards * shard


def _of_server(config: Config, size: int) -> int:
    if not _rows_are_counted(config):
        return 0
    staleness = config.data_parallel.staleness
    # With staleness whole values are sent (`StepRule.lossy_parameters`).
    rounds = FORMATS[config.data_parallel.wire].lossy and not staleness
    rows = _ROUNDED_ROWS if rounds else _ROWS
    return (rows + 1 + staleness) * size


def _rounded_off(config: Config, size: int) -> int:
    return size if FORMATS[config.data_parallel.wire].error_feedback else 0


def _pieces(config: Config, size: int) -> int:
    settings = config.data_parallel
    if settings.group == "torch":
        return 0
    num_parts = max(1, -(-size // settings.chunk_bytes))  # as `DirectExchange` cuts it
    num_pieces = num_parts * settings.replicas
    num_values = size // _FLOAT
    piece = wire_bytes(settings.wire, num_values // num_pieces)
    # What comes back rounded needs a buffer of its own until it is decoded.
    buffers = 2 * num_parts if FORMATS[settings.wire].lossy else num_parts
    others = settings.replicas - 1
    return others * min(_EXPECTED, buffers) * piece


def _rows_are_counted(config: Config) -> bool:
    return config.node.device == "cpu" or config.data_parallel.group == "torch"
