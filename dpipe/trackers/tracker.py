"""What a tracker is, and what it is given."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dpipe.timeline.span import Span


@dataclass(frozen=True)
class TrackedRun:
    """A run, or one start of it that goes on from a checkpoint."""

    folder: Path
    config: Mapping[str, Any]  # by section, without `node`, which has tokens
    environment: Mapping[str, str]  # of the process


@dataclass(frozen=True)
class TracedStep:
    """The spans of one step, of all ranks, in microseconds since 1970."""

    step: int
    spans: Sequence[Span]


class Tracker(Protocol):
    """Called on one thread. May take as long as it likes, and raise what it likes."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """The numbers of a row of metrics.jsonl, those of a dict in it as `name/key`."""

    def trace(self, steps: Sequence[TracedStep]) -> None:
        """The last steps of a run that has ended, as `dpipe trace` shows them."""

    def close(self) -> None: ...
