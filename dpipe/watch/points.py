"""Rows of metrics as points of the charts."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dpipe.watch.picture import MetricPoint
from dpipe.watch.tail import FileTail

_MOST_POINTS = 200_000
_MOST_STEPS = 1 << 53  # that a browser counts exactly
_RECENT = 20  # rows that say how fast a run is now


class RunPoints:
    """The points of a run, in order; `generation` changes where they begin anew."""

    def __init__(self) -> None:
        self.generation = 0
        self._forget()

    def clear(self) -> None:
        self.generation += 1
        self._forget()

    def _forget(self) -> None:
        self.points: list[MetricPoint] = []
        self.last_row: Mapping[str, Any] = {}  # of a training step
        self.rates: dict[str, float] = {}  # MB/s by link, of the last steps
        self.relayed: frozenset[str] = frozenset()  # links, as the newest row says
        self.damaged = 0  # lines that were no row

    def add_line(self, line: bytes) -> None:
        """One line of `metrics.jsonl`; one that is damaged is counted."""
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        # An empty line is no damage; a half one at the end is not here yet.
        if not isinstance(row, dict) or not _is_step(row.get("step")):
            self.damaged += bool(line.strip())
            return
        self.add(row)

    def add(self, row: Mapping[str, Any]) -> None:
        """One row. What is no number in it counts as not there."""
        held_out = number(row.get("held_out_loss"))
        step = row["step"]
        before = self.points[-1] if self.points else None
        elapsed_s = before.elapsed_s if before else 0.0
        sent_mb = before.sent_mb if before else 0.0
        step_s = number(row.get("step_s"))
        if step_s is not None:
            # With run.log_every above 1 a row stands for the steps since the last one.
            steps = max(1, step - self._last_step())
            rates = by_name(row.get("mb_per_s"))
            elapsed_s += steps * step_s
            sent_mb += steps * step_s * sum(rates.values())
            self._follow(rates)
            self.relayed = _texts(row.get("relayed"))
            self.last_row = row
        point = MetricPoint(
            step,
            elapsed_s,
            number(row.get("loss")),
            held_out,
            number(row.get("tokens_per_s")),
            sent_mb,
            step_s,
        )
        self.points.append(point)
        if len(self.points) > _MOST_POINTS:
            # They are held in memory, and looked through for each new page.
            # Every second one: a chart has fewer pixels.
            self.points = self.points[::2]
            self.generation += 1

    def _last_step(self) -> int:
        step = self.last_row.get("step")
        return step if isinstance(step, int) else -1

    def _follow(self, rates: Mapping[str, float]) -> None:
        """A moving mean: a single step says little."""
        kept = 1 - 2 / (_RECENT + 1)
        followed = {}
        for link, rate in rates.items():
            before = self.rates.get(link, rate)
            followed[link] = kept * before + (1 - kept) * rate
        self.rates = followed

    @property
    def steps_done(self) -> int | None:
        return self._last_step() + 1 if self.last_row else None

    @property
    def usual_step_s(self) -> float | None:
        """The median of the last steps; None before the first."""
        recent = []
        for point in self.points[-2 * _RECENT :]:
            if point.step_s is not None:
                recent.append(point.step_s)
        return median(recent[-_RECENT:]) if recent else None

    def last(self, name: str) -> float | None:
        """The newest value of a field of `MetricPoint`."""
        for point in reversed(self.points):
            value: float | None = getattr(point, name)
            if value is not None:
                return value
        return None


class MetricsFile:
    """A `metrics.jsonl` that grows, or is written anew where a run is resumed."""

    def __init__(self, path: Path) -> None:
        self.points = RunPoints()
        self._tail = FileTail(path)

    def poll(self) -> float | None:
        """Read what is new; returns when the file was written, or None if there is none."""
        while True:
            is_new, lines = self._tail.read()
            if is_new:
                self.points.clear()
            for line in lines:
                self.points.add_line(line)
            if not lines:
                return self._tail.changed_at


def _is_step(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST_STEPS


def number(value: object) -> float | None:
    """A finite number, or None for anything else; true is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def by_name(value: object) -> dict[str, float]:
    """The numbers of a table, by their keys."""
    if not isinstance(value, dict):
        return {}
    numbers = {}
    for name, inner in value.items():
        found = number(inner)
        if found is not None:
            numbers[str(name)] = found
    return numbers


def _texts(value: object) -> frozenset[str]:
    """Of a list; none of anything else."""
    if not isinstance(value, list):
        return frozenset()
    return frozenset(each for each in value if isinstance(each, str))


def thinned(points: Sequence[MetricPoint], most: int) -> list[MetricPoint]:
    """At most about `most` of them, evenly; all held-out losses and the last point are kept."""
    stride = max(1, math.ceil(len(points) / most))
    kept = []
    last = len(points) - 1
    for index, point in enumerate(points):
        if index % stride == 0 or index == last or point.held_out_loss is not None:
            kept.append(point)
    return kept
