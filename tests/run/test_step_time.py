"""The step time of a run is the predicted one: whole runs of four replayed stages, ranks as threads
behind the shaped transport.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support.settled import settled

from dpipe.config.load import Config, build
from dpipe.plan.forecast import forecast
from dpipe.report.metrics import read_rows
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone

SLOW = "delay_ms = 5\nbandwidth_gbps = 0.1\n"
LATE = 1.04  # even an idle machine wakes threads a little late
# The last ranks end a step with weight gradients while rank 0 begins the next.
DEEP = {"schedule": "zero-bubble", "in_flight": 7, "memory_limit": 12}
PIPELINES = [{"schedule": "gpipe"}, {"schedule": "1f1b"}, DEEP]

Run = Callable[..., list[BaseException | None]]
Make = Callable[..., Config]


@pytest.fixture
def replayed(tmp_path: Path) -> Make:
    (tmp_path / "slow.toml").write_text(SLOW)
    folders = count()

    def make(pipeline: dict[str, Any], clip_norm: float) -> Config:
        table: dict[str, dict[str, Any]] = {
            "model": {"layers": "replay"},
            "replay": {"forward_ms": 25, "backward_ms": 50, "message_bytes": 50_000},
            "train": {
                "steps": 5,
                "batch_size": 10,
                "num_microbatches": 10,
                "clip_norm": clip_norm,
            },
            "pipeline": {"stages": 4, **pipeline},
            "transport": {"kind": "tcp", "shape": str(tmp_path / "slow.toml")},
            "run": {
                "folder": str(tmp_path / f"run-{next(folders)}"),
                "tensorboard": False,
                "trace_steps": 1,
            },
            "timeouts": {"join": 20, "transfer": 20},
        }
        return build(table)

    return make


def predicted_s(config: Config) -> float:
    return forecast(config).step_us / 1e6


def measured_s(config: Config, run_ranks: Run) -> float:
    assert run_ranks(config) == [None] * config.world_size
    return median(row["step_s"] for row in read_rows(Path(config.run.folder))[1:])


def test_steps_overlap_where_no_rank_waits_for_a_vote(replayed: Make) -> None:
    config = replayed(DEEP, 0)
    found = forecast(config)
    alone = simulate_alone(Scenario(found.schedule, found.cost, found.network))
    assert found.step_us < 0.95 * alone.duration_us
    assert predicted_s(replayed(DEEP, 1)) == pytest.approx(alone.duration_us / 1e6, rel=0.01)


@pytest.mark.parametrize("clip_norm", [0, 1])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline["schedule"])
def test_no_step_takes_less_than_predicted(
    pipeline: dict[str, Any], clip_norm: float, replayed: Make, run_ranks: Run
) -> None:
    config = replayed(pipeline, clip_norm)
    assert measured_s(config, run_ranks) >= 0.995 * predicted_s(config)


@pytest.mark.alone
@pytest.mark.parametrize("clip_norm", [0, 1])
@pytest.mark.parametrize("pipeline", PIPELINES, ids=lambda pipeline: pipeline["schedule"])
def test_step_takes_the_predicted_time(
    pipeline: dict[str, Any], clip_norm: float, replayed: Make, run_ranks: Run
) -> None:
    most_s = LATE * predicted_s(replayed(pipeline, clip_norm))

    def look() -> float:
        return measured_s(replayed(pipeline, clip_norm), run_ranks)

    assert settled(look, lambda seconds: seconds <= most_s) <= most_s
