"""Replicas over a network shaped in software, compared with the simulator: the overlap of an
exchange.

forward and backward of four micro-batches 180 ms a gradient's way, out and back, of two replicas
120 ms and the delays
"""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config.load import Config, build
from dpipe.plan.forecast import forecast
from dpipe.report.metrics import read_rows

LATE_S = 0.06  # the delay that a busy machine adds even to the best of a few steps
COMPUTE_S = 0.36


@pytest.fixture
def replayed(tmp_path: Path) -> Callable[..., Config]:
    """`replayed("sharded", delay=True)`: two replicas of one replayed stage."""
    (tmp_path / "far.toml").write_text("delay_ms = 5\nbandwidth_gbps = 0.1")

    def make(kind: str, **data_parallel: object) -> Config:
        sizes = {
            "forward_ms": 30,
            "backward_ms": 60,
            "message_bytes": 4,
            "parameter_bytes": 3_000_000,
        }
        return build(
            {
                "model": {"layers": "replay"},
                "replay": sizes,
                "train": {"steps": 4, "batch_size": 8, "num_microbatches": 4, "clip_norm": 0},
                "data_parallel": {
                    "kind": kind,
                    "replicas": 2,
                    "chunk_bytes": 1 << 18,
                    **data_parallel,
                },
                "transport": {"kind": "tcp", "shape": str(tmp_path / "far.toml")},
                "run": {"folder": str(tmp_path / "run"), "tensorboard": False, "trace_steps": 1},
            }
        )

    return make


@pytest.mark.waits
@pytest.mark.parametrize(
    ("kind", "beside_compute_s"),
    [
        ("all-reduce", 0.0),  # all of it behind the next step
        ("sharded", 0.12),  # except the returned parameters
    ],
)
def test_delayed_step_takes_the_simulated_time(
    kind: str,
    beside_compute_s: float,
    replayed: Callable[..., Config],
    run_ranks: Callable[..., list[object]],
) -> None:
    config = replayed(kind, delay=True)
    assert run_ranks(config) == [None, None]
    measured = min(row["step_s"] for row in read_rows(Path(config.run.folder))[1:])
    predicted = forecast(config).step_us / 1e6
    assert predicted == pytest.approx(COMPUTE_S + beside_compute_s, abs=0.025)
    assert 0.97 * predicted <= measured <= 1.05 * predicted + LATE_S
