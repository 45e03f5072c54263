"""A tracker that fails, hangs or is slow never stops or slows the run."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from dpipe.errors import ConfigError
from dpipe.trackers import background
from dpipe.trackers.background import Background
from dpipe.trackers.kinds import TRACKERS, TrackerKind, refuse_missing
from dpipe.trackers.tracker import TracedStep, TrackedRun


@dataclass
class Fake:
    """Does `on_log` at each row."""

    on_log: Callable[[], object] = lambda: None
    logged: list[int] = field(default_factory=list)
    is_closed: bool = False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.on_log()
        self.logged.append(step)

    def trace(self, steps: Sequence[TracedStep]) -> None:
        self.logged += [each.step for each in steps]

    def close(self) -> None:
        self.is_closed = True


FAKE = Fake()
RUN = TrackedRun(Path("run"), {}, {})


def build(run: TrackedRun) -> Fake:
    return FAKE


def build_that_fails(run: TrackedRun) -> Fake:
    raise OSError("no space left on device")


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Fake]]:
    """`declared(fake)`: the tracker "fake"."""

    def declare(fake: Fake, builder: str = "build") -> Fake:
        monkeypatch.setitem(globals(), "FAKE", fake)
        TRACKERS.add(TrackerKind("fake", f"{__name__}:{builder}", ("json",), "fake"))
        return fake

    yield declare
    TRACKERS.remove("fake")


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


def test_tracker_gets_all_in_order_and_is_closed(declared: Callable[..., Fake]) -> None:
    fake = declared(Fake())
    tracker = Background("fake", RUN)
    for step in range(3):
        tracker.log(step, {})
    tracker.trace([TracedStep(2, ())])
    tracker.close()
    assert fake.logged == [0, 1, 2, 2]
    assert fake.is_closed


def test_tracker_that_fails_is_warned_of_once_and_tried_again(
    declared: Callable[..., Fake], caplog: pytest.LogCaptureFixture
) -> None:
    failures = iter([True, True, False])
    is_back = threading.Event()

    def fail() -> None:
        if next(failures):
            raise ConnectionError("server away")
        is_back.set()

    fake = declared(Fake(fail))
    tracker = Background("fake", RUN)
    for step in range(3):
        tracker.log(step, {})
    assert is_back.wait(60)
    tracker.close()
    assert fake.logged == [2]
    assert warnings_of(caplog) == [
        'run.trackers "fake" failed (ConnectionError: server away); the run goes on; this is not '
        "said again"
    ]


def test_tracker_that_cannot_begin_is_a_warning(
    declared: Callable[..., Fake], caplog: pytest.LogCaptureFixture
) -> None:
    declared(Fake(), "build_that_fails")
    tracker = Background("fake", RUN)
    tracker.log(0, {})
    tracker.close()
    assert warnings_of(caplog) == [
        'run.trackers "fake" failed (OSError: no space left on device); the run continues without '
        "it"
    ]


def test_tracker_that_hangs_blocks_nothing_and_is_left_behind(
    declared: Callable[..., Fake],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(background, "_MOST_WAITING", 5)
    released = threading.Event()
    fake = declared(Fake(lambda: released.wait(100)))
    tracker = Background("fake", RUN, close_s=0.1)
    began = time.monotonic()
    for step in range(20):
        tracker.log(step, {})
    tracker.close()
    took_s = time.monotonic() - began
    released.set()
    tracker._thread.join(60)
    assert took_s < 50, "it waits for a tracker that hangs for 100 s"
    assert fake.is_closed, "once it no longer hangs"
    assert warnings_of(caplog) == [
        'run.trackers "fake" is too slow; it misses rows',
        'run.trackers "fake" has not ended in 0 s; what it has not written is lost',
    ]


def test_after_the_run_a_tracker_that_fails_gets_no_more(declared: Callable[..., Fake]) -> None:
    may_fail = threading.Event()
    tried: list[float] = []

    def fail() -> None:
        may_fail.wait(60)
        tried.append(1)
        raise ConnectionError("server away")

    declared(Fake(fail))
    tracker = Background("fake", RUN, close_s=0)
    for step in range(20):
        tracker.log(step, {})
    tracker.close()
    may_fail.set()
    tracker._thread.join(60)
    assert len(tried) == 1, "each may take as long as its timeout"


def test_missing_library_is_refused_with_how_to_install_it(declared: Callable[..., Fake]) -> None:
    declared(Fake())
    refuse_missing(["fake"])
    TRACKERS.add(TrackerKind("absent", "absent:build", ("no_such_package.part",), "wandb"))
    try:
        with pytest.raises(
            ConfigError, match=r'"absent" needs its library: pip install dpipe\[wan'
        ):
            refuse_missing(["fake", "absent"])
    finally:
        TRACKERS.remove("absent")
