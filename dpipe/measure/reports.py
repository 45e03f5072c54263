"""What ranks tell each other of what they have measured. A rank may be the machine of a stranger:
each value has bounds, so that what one rank claims can be wrong but never absurd.
"""

from typing import Annotated, Literal

from pydantic import Field

from dpipe.network.link import MAX_DELAY_MS
from dpipe.wire.schema import Count, Schema, Shape, Text

_MAX_GBPS = 1e5
_MAX_LAYERS = 4096
# One way. A longer one answers no ping in time, and all machines wait for round trips.
_MAX_PING_MS = 4000.0

NAME = r"^[\w.:-]{1,90}$"  # of a machine
Milliseconds = Annotated[float, Field(ge=0, le=MAX_DELAY_MS, allow_inf_nan=False)]
Gbps = Annotated[float, Field(ge=0, le=_MAX_GBPS, allow_inf_nan=False)]


class LayerReport(Shape):
    """One layer, at one micro-batch size."""

    kind: Literal["embedding", "block", "head"] | Annotated[int, Field(ge=0, le=_MAX_LAYERS)]
    micro_batch_size: Annotated[int, Field(ge=1, le=2**30)]
    forward_ms: Milliseconds
    backward_ms: Milliseconds
    backward_input_ms: Milliseconds
    backward_weight_ms: Milliseconds


class MachineReport(Shape):
    """A machine, as the rank on it sees it."""

    name: Annotated[str, Field(pattern=NAME)]
    device: Annotated[str, Field(pattern=r"^[\x21-\x7e]([\x20-\x7e]{0,98}[\x21-\x7e])?$")]
    cores: Annotated[int, Field(ge=1, le=2**16)]
    devices: Annotated[int, Field(ge=1, le=2**12)]
    memory_gb: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]  # free, a device
    price_per_hour: Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)] | None
    layers: Annotated[list[LayerReport], Field(max_length=_MAX_LAYERS)]


class DelayReport(Shape):
    """Of the pair with a higher rank."""

    peer: Count
    delay_ms: Annotated[float, Field(ge=0, le=_MAX_PING_MS, allow_inf_nan=False)]  # one way
    jitter_ms: Milliseconds


class Problem(Shape):
    """Why nothing could be measured with a peer."""

    peer: Count
    reason: Text


class PeersReport(Shape):
    delays: list[DelayReport]
    problems: list[Problem]


class StreamReport(Shape):
    """What went to this round's peer; the rank that sat out, or could not, reports zeros."""

    gbps: Gbps
    loss_percent: Annotated[float, Field(ge=0, lt=100, allow_inf_nan=False)]
    rising: bool  # its time was over before its rate was found
    problem: Text


class TogetherReport(Shape):
    """What this rank sent and received while all did."""

    egress_gbps: Gbps
    ingress_gbps: Gbps


_DATE = r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z$"
DATE = Schema[str](Annotated[str, Field(pattern=_DATE)])
MACHINE_REPORT = Schema[MachineReport](MachineReport)
PROBLEMS = Schema[list[Problem]](list[Problem])
PEERS_REPORT = Schema[PeersReport](PeersReport)
STREAM_REPORT = Schema[StreamReport](StreamReport)
TOGETHER_REPORT = Schema[TogetherReport](TogetherReport)
