"""What is shown of a run, as plain values that become JSON.

None stands for what is not known; nothing is shown in its place. Texts may come from other
machines: whoever shows them escapes them.
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple


class MetricPoint(NamedTuple):
    """One row of metrics, as the charts need it."""

    step: int
    elapsed_s: float  # of training, up to and with this step
    loss: float | None
    held_out_loss: float | None
    tokens_per_s: float | None
    sent_mb: float  # by all ranks, up to and with this step
    step_s: float | None


class Bar(NamedTuple):
    """One action of a lane, in milliseconds since the step began."""

    kind: str  # "forward", "backward", "weight", "update", or "send"
    label: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True)
class LanesOfRank:
    """What one rank did in a step, and what was predicted of it."""

    rank: int
    measured: tuple[Bar, ...]
    predicted: tuple[Bar, ...]


@dataclass(frozen=True)
class StepLanes:
    """One step of all ranks that are shown."""

    step: int | None  # None: predicted alone
    measured_ms: float | None
    predicted_ms: float | None
    ranks: tuple[LanesOfRank, ...]
    left_out: int = 0  # ranks that are not shown


@dataclass(frozen=True)
class SeatView:
    """A rank on the map."""

    rank: int
    # A tensor-parallel group has one place.
    stage: int  # its place in the pipeline
    replica: int
    machine: str | None  # its name in the file of machines
    layers: str | None  # such as "layers 0–3"
    memory_mb: float | None  # the peak: of the GPU, else of the process
    limit_mb: float | None  # what a rank may hold there
    busy: float | None  # share of a step in which it computes
    note: str = ""  # such as "leaving"
    binds: bool = False


@dataclass(frozen=True)
class LinkView:
    """One direction between two ranks, or to a parameter server by its name."""

    source: str
    target: str
    mb_per_s: float
    rate_gbps: float | None  # by the network profile, as the next one
    delay_ms: float | None
    full: float | None  # share of the rate
    relayed: bool = False  # by the coordinator's machine
    binds: bool = False


@dataclass(frozen=True)
class EventView:
    """What a person should know, and when it was."""

    at: str
    text: str


@dataclass(frozen=True)
class Picture:
    """All that is shown of a run but its points."""

    name: str
    state: str  # "waiting", "training", "silent", "finished", or "unreachable"
    detail: str = ""  # one sentence about the state
    step: int | None = None  # steps that are done
    steps: int | None = None
    # The newest of each, which may be of different steps.
    loss: float | None = None
    held_out_loss: float | None = None
    tokens_per_s: float | None = None
    step_s: float | None = None  # the median of the last steps
    predicted_step_s: float | None = None
    bubble: float | None = None  # of the last step, a mean over ranks
    goodput: float | None = None  # share of the steps made that were not made again
    elapsed_s: float | None = None
    eta_s: float | None = None
    price: float | None = None  # so far
    price_per_hour: float | None = None
    network: str = ""
    binding: str = ""  # one sentence: what the step waits for
    seats: tuple[SeatView, ...] = ()
    links: tuple[LinkView, ...] = ()
    lanes: StepLanes | None = None
    events: tuple[EventView, ...] = ()
    notes: tuple[str, ...] = ()  # what could not be shown, and why


def as_json(value: Any) -> str:
    """JSON that a browser reads: it knows no NaN and no infinity."""
    return json.dumps(_plain(value), separators=(",", ":"), allow_nan=False)


def as_table(picture: Picture) -> dict[str, Any]:
    return asdict(picture)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return value
