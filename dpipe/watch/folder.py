"""`RunFolder`: the picture of a run's folder, which the run itself does not notice: files are read,
and none is locked.
"""

import json
import re
import sqlite3
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Generic, TypeVar

from dpipe.config.load import Config
from dpipe.elastic import journal
from dpipe.errors import ConfigError, DpipeError
from dpipe.plan.assumed_network import configured_network
from dpipe.plan.forecast import Forecast, forecast, without_search
from dpipe.report.trace import Trace, load_trace
from dpipe.store.run_folder import load_configuration
from dpipe.watch.lanes import busy_shares, predicted_lanes, traced_lanes
from dpipe.watch.network_map import (
    KnownMachines,
    RunLayout,
    known_machines,
    link_views,
    seat_views,
    with_binding,
)
from dpipe.watch.picture import EventView, Picture, StepLanes
from dpipe.watch.points import MetricsFile, RunPoints
from dpipe.watch.tail import FileTail
from dpipe.wire.text import visible

T = TypeVar("T")

_EVENTS = 50
_LOG_BYTES = 1 << 20  # of a log's end, on the first look
_SILENT_S = 30.0  # without a row, or five steps' time if that is longer
_ROUTINE = re.compile(r"(step \d+ (held-out )?loss |time \(ms\))")
_CLOCK = "%Y-%m-%d %H:%M:%S"
_LINE = re.compile(r"(?P<at>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)[,.]\d+ rank \d+ (?P<text>.*)")
_TEXT_CHARACTERS = 500


class _Later(Generic[T]):
    """A value that takes a while, made beside the page; the last one is shown meanwhile."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._key: Hashable = None
        self._future: Future[T] | None = None
        self._value: T | None = None

    @property
    def is_busy(self) -> bool:
        return self._future is not None

    def get(self, key: Hashable, make: Callable[[], T]) -> T | None:
        """Made again where `key` is another than at the last call."""
        if self._future is not None and self._future.done():
            self._value = self._future.result()
            self._future = None
        # One at a time: a file that changes each second must not queue up work.
        if key != self._key and self._future is None:
            self._key = key
            self._future = self._threads.submit(make)
        return self._value


@dataclass(frozen=True)
class _Planned:
    """What follows from the configuration alone."""

    layout: RunLayout
    forecast: Forecast | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Traced:
    """What the trace says, or why it says nothing."""

    lanes: StepLanes | None = None
    busy: dict[int, float] | None = None
    step_s: float | None = None  # predicted
    note: str = ""


class RunFolder:
    """Call `poll` as often as a picture is wanted, from one thread at a time; `close` at the end.

    Raises `ConfigError` if `folder` is not there.
    """

    def __init__(self, folder: Path, *, trust_code: bool = False) -> None:
        if not folder.is_dir():
            raise ConfigError(
                f"{folder} is not the folder of a run; give a run.folder, or HOST:PORT of a "
                "coordinator"
            )
        self.folder = folder
        self._trust_code = trust_code
        self._metrics = MetricsFile(folder / "metrics.jsonl")
        self._log = EventLog(folder / "logs" / "rank-0.log")
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="watch")
        self._planned: _Later[_Planned] = _Later(self._threads)
        self._traced: _Later[_Traced] = _Later(self._threads)
        # Read again where the file is another: a resumed run may change it.
        self._config_stamp: Hashable = "not looked at"
        self._config: Config | None = None
        self._config_note = ""

    @property
    def points(self) -> RunPoints:
        return self._metrics.points

    @property
    def is_preparing(self) -> bool:
        return self._planned.is_busy or self._traced.is_busy

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)

    def poll(self) -> Picture:
        written_at = self._metrics.poll()
        config = self._configuration()
        planned = None
        if config is not None:
            planned = self._planned.get(config.digest(), lambda: plan_of(config))
        traced = self._traced.get(_stamp(self.folder / "trace"), self._trace)
        picture = measured_picture(str(self.folder), self.points, config, written_at)
        picture = _with_plan(picture, planned, traced, self.points)
        notes = [self._config_note, *picture.notes]
        if self.points.damaged:
            notes.append(f"{self.points.damaged} lines of metrics.jsonl are damaged, and left out.")
        return replace(
            picture,
            events=(*journal_events(self.folder), *self._log.poll())[-_EVENTS:],
            notes=tuple(note for note in notes if note),
        )

    def _configuration(self) -> Config | None:
        stamp = _stamp(self.folder, "config.json")
        if stamp != self._config_stamp:
            self._config_stamp = stamp
            self._config, self._config_note = _load(self.folder, trust_code=self._trust_code)
        return self._config

    def _trace(self) -> _Traced:
        if not (self.folder / "trace" / "plan.json").exists():
            return _Traced()
        try:
            return _from_trace(load_trace(self.folder))
        except DpipeError as error:
            return _Traced(note=f"No measured step: {error}")


def _load(folder: Path, *, trust_code: bool) -> tuple[Config | None, str]:
    if not (folder / "config.json").exists():
        return None, f"{folder} has no config.json: no run has begun in this folder."
    try:
        return load_configuration(folder, trust_code=trust_code), ""
    except DpipeError as error:
        return None, str(error)


def _stamp(folder: Path, pattern: str = "*.json") -> Hashable:
    """Another value whenever one of the files has been written."""
    stamps = []
    for path in sorted(folder.glob(pattern)):
        try:
            status = path.stat()
        except OSError:  # it has just been replaced
            continue
        stamps.append((path.name, status.st_mtime_ns, status.st_size))
    return tuple(stamps)


def _from_trace(trace: Trace) -> _Traced:
    lanes = traced_lanes(trace)
    _, _, timeline = trace.steps[-1]
    return _Traced(lanes, busy_shares(timeline), trace.predicted.step_us / 1e6)


def plan_of(config: Config) -> _Planned:
    """Takes as long as `dpipe simulate`. What cannot be read here, such as the network profile of a
    run that was copied from another machine, is left out and said.
    """
    notes = []
    machines = KnownMachines()
    network = None
    predicted = None
    try:
        machines = known_machines(config)
        if config.network_profile is not None:
            network = configured_network(config, config.network_profile)
    except (DpipeError, OSError) as error:
        notes.append(f"Links are shown without their rates: {error}")
    # Only what takes no code of the user's, and no text.
    # A user's own layers would have to be imported, and run.
    if config.model.is_transformer or not config.model.family.computes:
        try:
            predicted = forecast(config, choose=without_search)
        except (DpipeError, OSError) as error:
            notes.append(f"No prediction: {error}")
    layout = RunLayout(config, machines, network)
    if predicted is not None:
        layout = replace(
            layout,
            split=predicted.split,
            rank_of_stage=predicted.schedule.rank_of_stage,
            busy=busy_shares(predicted.timeline),
        )
    return _Planned(layout, predicted, tuple(notes))


def measured_picture(
    name: str, points: RunPoints, config: Config | None, written_at: float | None
) -> Picture:
    """What the rows of metrics say; `written_at` is when the last came, in seconds since 1970."""
    step = points.steps_done
    steps = None if config is None else config.train.steps
    step_s = points.usual_step_s
    state, detail = state_of(step, steps, step_s, written_at)
    eta_s = None
    if step is not None and steps is not None and step_s is not None and state == "training":
        eta_s = max(0, steps - step) * step_s
    bubble = points.last_row.get("bubble")
    return Picture(
        name=name,
        state=state,
        detail=detail,
        step=step,
        steps=steps,
        loss=points.last("loss"),
        held_out_loss=points.last("held_out_loss"),
        tokens_per_s=points.last("tokens_per_s"),
        step_s=step_s,
        bubble=bubble if isinstance(bubble, float) else None,
        elapsed_s=points.last("elapsed_s"),
        eta_s=eta_s,
        links=link_views(None, points),
    )


def state_of(
    step: int | None, steps: int | None, step_s: float | None, written_at: float | None
) -> tuple[str, str]:
    """What a run seems to do, and a sentence about it: only its files are known."""
    if step is None or written_at is None:
        return "waiting", "No step yet."
    if steps is not None and step >= steps:
        return "finished", "All steps are done."
    silent_s = max(0.0, time.time() - written_at)
    if silent_s < max(_SILENT_S, 5 * (step_s or 0.0)):
        return "training", ""
    return "silent", f"No new step for {_spoken(silent_s)}: it has stopped, or waits."


def _spoken(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _with_plan(
    picture: Picture, planned: _Planned | None, traced: _Traced | None, points: RunPoints
) -> Picture:
    """With what the plan and the trace say; both come later than the first rows."""
    # Without a configuration there are only rows.
    if planned is None:
        return picture
    layout = planned.layout
    lanes = None
    predicted_step_s = None
    if planned.forecast is not None:
        lanes = predicted_lanes(planned.forecast.timeline)
        predicted_step_s = planned.forecast.step_us / 1e6
    notes = planned.notes
    if traced is not None:
        # What was measured is worth more than what was planned.
        lanes = traced.lanes or lanes
        predicted_step_s = traced.step_s or predicted_step_s
        notes += (traced.note,)
        if traced.busy is not None:
            layout = replace(layout, busy=traced.busy)
    seats = seat_views(layout, points.last_row)
    links = link_views(layout, points)
    seats, links, binding = with_binding(seats, links)
    per_hour = layout.machines.price_per_hour
    price = None
    if per_hour is not None and picture.elapsed_s is not None:
        price = per_hour * picture.elapsed_s / 3600
    return replace(
        picture,
        predicted_step_s=predicted_step_s,
        lanes=lanes,
        seats=seats,
        links=links,
        binding=binding,
        network=layout.network.name if layout.network is not None else "",
        price=price,
        price_per_hour=per_hour,
        notes=notes,
    )


class EventLog:
    """The lines of rank 0's log that are not about a usual step."""

    def __init__(self, path: Path) -> None:
        self._tail = FileTail(path, _LOG_BYTES)
        self._events: list[EventView] = []

    def poll(self) -> list[EventView]:
        while True:
            is_new, lines = self._tail.read()
            if is_new:
                self._events.clear()
            for line in lines:
                self._take(line.decode("utf-8", "replace"))
            if not lines:
                return self._events

    def _take(self, line: str) -> None:
        event = log_line(line)
        if event is None or _ROUTINE.match(event.text):
            return
        self._events.append(event)
        del self._events[:-_EVENTS]


def log_line(line: str) -> EventView | None:
    """A line of a log, in either run.log_format; None for one that is none."""
    if not line.startswith("{"):
        match = _LINE.fullmatch(line)
        return None if match is None else _shown(match["at"], match["text"])
    try:
        table = json.loads(line)
        at = datetime.fromisoformat(table["time"]).astimezone().strftime(_CLOCK)
        return _shown(at, str(table["message"]))
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return None


def _shown(at: str, text: str) -> EventView:
    return EventView(at, visible(text)[:_TEXT_CHARACTERS])


def journal_events(folder: Path) -> list[EventView]:
    """Those of an elastic run, whose coordinator keeps a journal."""
    try:
        rows = journal.read_events(folder / journal.NAME, _EVENTS)
    except (OSError, sqlite3.Error):
        return []
    return [event_view(at, text) for at, text in rows]


def event_view(at: float, text: str) -> EventView:
    """`at` in seconds since 1970."""
    try:
        clock = time.strftime(_CLOCK, time.localtime(at))
    except (ValueError, OverflowError, OSError):  # no time that there is
        clock = "?"
    return _shown(clock, text)
