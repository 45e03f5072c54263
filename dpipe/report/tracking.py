"""`Tracking`: rows and spans of a run, given to the trackers of `run.trackers`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.report.metrics import scalars
from dpipe.report.trace import rank_steps
from dpipe.trackers.background import Background
from dpipe.trackers.tracker import TracedStep, TrackedRun


class Tracking:
    """Open from the first row to the last. Nothing that a tracker does raises or blocks here."""

    def __init__(self, config: Config, folder: Path, environment: Mapping[str, str]) -> None:
        table = config.model_dump(mode="json", exclude={"node"})
        run = TrackedRun(folder, table, environment)
        self._trackers = [Background(name, run) for name in config.run.trackers]

    def __enter__(self) -> Self:
        return self

    def take(self, row: Mapping[str, Any]) -> None:
        """A row of metrics.jsonl."""
        values = dict(scalars(row))
        for tracker in self._trackers:
            tracker.log(row["step"], values)

    def trace(self, folder: Path, world_size: int, *, first_step: int, clock_us: float) -> None:
        """FOLDER/trace, when all ranks have uploaded their part. `clock_us` takes its times to
        those since 1970; steps before `first_step` are an earlier start's.
        """
        if not self._trackers:
            return
        steps = [each for each in _traced(folder, world_size, clock_us) if each.step >= first_step]
        for tracker in self._trackers:
            tracker.trace(steps)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for tracker in self._trackers:
            tracker.close()


def _traced(folder: Path, world_size: int, clock_us: float) -> Iterator[TracedStep]:
    by_step: dict[int, list[Any]] = {}
    for rank in range(world_size):
        try:
            steps = rank_steps(folder, rank)
        except ConfigError:  # without run.trace_steps there is none
            continue
        for each in steps:
            moved = [span.later(clock_us) for span in each.spans]
            by_step.setdefault(each.step, []).extend(moved)
    for step, spans in sorted(by_step.items()):
        yield TracedStep(step, spans)
