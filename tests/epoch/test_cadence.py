"""How far apart copies are taken, and what they hold."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from epoch.cluster import Cluster

from dpipe.config.load import Config
from dpipe.engine.ballot import RankReport
from dpipe.engine.update import Verdict
from dpipe.epoch.cadence import Cadence, steps_between
from dpipe.memory.copies import copies_bytes, state_bytes
from dpipe.network.link import Link, Network
from dpipe.plan.run_plan import draft

Make = Callable[..., Config]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({}, 34),  # 4 ms, and 12 bytes of 500,000 parameters at 200 bytes a us: 1 % of 3.4 s
        ({"step_us": 1e6}, 4),
        ({"step_us": 1e9}, 1),
        ({"network": Network(default=Link(10, 0.001))}, 480),  # 6 MB at 1 Mbit/s
    ],
)
def test_copies_cost_little_and_have_time(changes: dict[str, Any], steps: int, tiny: Make) -> None:
    config = tiny(pipeline__stages=2)
    forecast = draft(config).forecast
    cost = replace(forecast.cost, reduce_bytes=(2_000_000, 1_000_000))
    idle = replace(forecast.timeline, spans=())
    made = replace(
        forecast, cost=cost, timeline=idle, **{"step_us": 1e5, "network": Network(), **changes}
    )
    assert steps_between(config, made) == steps
    assert steps_between(config.with_(guard__every=7), made) == 7


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ({"data_parallel__address": ("127.0.0.1:7100",)}, 72_034),  # 9 MB of two stages: 72 s
        ({}, 24_034),  # 3 MB of the second stage, from rank 0
        ({"data_parallel__servers": "per-stage"}, 480),  # beside its rank
    ],
)
def test_copies_that_are_fetched_from_a_server_hold_steps_up(
    changes: dict[str, Any], steps: int, tiny: Make
) -> None:
    """At 1 Mbit/s, of 1 % of steps of 0.1 s."""
    served = {"data_parallel__kind": "parameter-server", "data_parallel__replicas": 2}
    config = tiny(pipeline__stages=2, **served, **changes)
    forecast = draft(config).forecast
    made = replace(
        forecast,
        cost=replace(forecast.cost, reduce_bytes=(2_000_000, 1_000_000)),
        timeline=replace(forecast.timeline, spans=()),
        step_us=1e5,
        network=Network(default=Link(10, 0.001)),
    )
    assert steps_between(config, made) == steps


def verdict(step: int, *step_s: float) -> Verdict:
    reports = tuple(RankReport(step_s=seconds) for seconds in step_s)
    return Verdict(step, loss=1.0, norm=None, stop=False, culprit=None, reports=reports)


def test_steps_that_are_measured_count_for_more_than_the_prediction(tiny: Make) -> None:
    config = tiny(pipeline__stages=2)
    forecast = draft(config).forecast
    made = replace(forecast, step_us=1e3)
    cadence = Cadence(config, made)
    predicted = cadence.every
    # The first ones are slow; the slowest rank is what a step waits for.
    for step in range(4):
        cadence.hear(verdict(step, 30.0, 30.0))
    for step in range(4, 7):
        cadence.hear(verdict(step, 0.1, 0.01))
    assert cadence.every == predicted
    cadence.hear(verdict(7, 0.1, 0.01))
    assert cadence.every == steps_between(config, replace(forecast, step_us=1e5))
    assert cadence.every < predicted / 50


def test_cadence_that_is_said_stays(tiny: Make) -> None:
    config = tiny(pipeline__stages=2, guard__every=7)
    cadence = Cadence(config, draft(config).forecast)
    for step in range(100):
        cadence.hear(verdict(step, 1e-3))
        assert cadence.every == 7


def test_keeper_holds_what_is_predicted(tiny: Make, tmp_path: Path) -> None:
    config = tiny(
        pipeline__stages=2,
        train__steps=6,
        model__width=64,
        guard__every=2,
        run__checkpoint_url=str(tmp_path / "elastic"),
    )
    cluster = Cluster(config, 2)
    cluster.begin([0, 1]).join()
    sizes = draft(config).forecast.cost.reduce_bytes
    for keeper, layers, size in zip(cluster.keepers, ([0, 1], [2, 3]), sizes, strict=True):
        copies = [keeper.find(6, layer) for layer in layers]
        held = sum(len(copy.content) for copy in copies if copy is not None)
        # With names and shapes.
        assert held == pytest.approx(state_bytes(size, "adamw"), rel=0.02)
        assert len(keeper.held()) <= 3, "two, and the last state of all"
        assert copies_bytes(size, 1, "adamw") == pytest.approx(5 * held, rel=0.02)
    cluster.close()
