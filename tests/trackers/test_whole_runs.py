"""Who gives rows to trackers, and when a missing library is noticed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dpipe.agent.coordinate import PlannedJob, coordinate
from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.plan.forecast import without_search
from dpipe.plan.run_plan import draft
from dpipe.store.run_folder import opened
from dpipe.trackers.kinds import TRACKERS, TrackerKind
from dpipe.trackers.tracker import TracedStep, TrackedRun

BUILT: list["Toy"] = []


class Toy:
    """The smallest tracker."""

    def __init__(self, run: TrackedRun) -> None:
        self.run = run
        self.rows: list[tuple[int, Mapping[str, float]]] = []
        self.traced: list[int] = []
        BUILT.append(self)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, values))

    def trace(self, steps: Sequence[TracedStep]) -> None:
        self.traced += [each.step for each in steps]

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def toys() -> Iterator[None]:
    BUILT.clear()
    TRACKERS.add(TrackerKind("toy", f"{__name__}:Toy", libraries=(), extra="toy"))
    TRACKERS.add(TrackerKind("absent", "absent:build", libraries=("no_such",), extra="absent"))
    yield
    TRACKERS.remove("toy")
    TRACKERS.remove("absent")


def test_rank_0_alone_gives_rows_and_the_trace(
    tiny: Callable[..., Config], losses: Callable[..., Any]
) -> None:
    keys = {"pipeline__stages": 2, "node__token": "secret", "run__trace_steps": 1}
    measured = losses(tiny(run__trackers=("toy",), **keys))
    (toy,) = BUILT
    assert [values["loss"] for _, values in toy.rows] == pytest.approx(measured)
    assert toy.traced == [2]
    assert "secret" not in str(toy.run.config)


def test_run_that_is_resumed_gives_only_its_own_trace(
    tiny: Callable[..., Config], losses: Callable[..., Any]
) -> None:
    config = tiny(run__trackers=("toy",), pipeline__stages=1, run__trace_steps=1)
    losses(config)
    losses(config, resume=True)  # it has no step to do
    assert [toy.traced for toy in BUILT] == [[2], []]


def test_coordinator_gives_the_rows_of_its_machines(tiny: Callable[..., Config]) -> None:
    config = tiny(run__trackers=("toy",), pipeline__stages=2)
    with opened(config, resume=False, rank=0) as folder, ExitStack() as stack:
        job = PlannedJob(draft(config, choose=without_search), folder, stack)
        job.rows.take({"step": 0, "held_out_loss": 2.0})
    (toy,) = BUILT
    assert toy.rows == [(0, {"held_out_loss": 2.0})]


def test_missing_library_is_refused_before_the_folder_is_made(
    tiny: Callable[..., Config], losses: Callable[..., Any]
) -> None:
    config = tiny(run__trackers=("absent",), pipeline__stages=1)
    with pytest.raises(ConfigError, match=r"pip install dpipe\[absent\]"):
        losses(config)
    assert not Path(config.run.folder).exists()


def test_coordinator_without_the_library_is_refused(tiny: Callable[..., Config]) -> None:
    config = tiny(run__trackers=("absent",), pipeline__stages=2)
    options: dict[str, Any] = {"patience_s": 1.0, "say": lambda text: None}
    with pytest.raises(ConfigError, match=r"pip install dpipe\[absent\]"):
        coordinate(config, (), "127.0.0.1:0", **options)  # type: ignore[arg-type]
    assert not Path(config.run.folder).exists()
