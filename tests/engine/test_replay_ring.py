"""Tensor parallelism over a network, replayed: whole runs, ranks as threads behind the shaped
transport.
"""

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from support.settled import settled

from dpipe.config.load import Config, build
from dpipe.engine.replay_ring import neighbours, ring_peers
from dpipe.errors import ConfigError
from dpipe.network.link import Link, Network
from dpipe.plan.forecast import forecast
from dpipe.plan.text import forecast_text
from dpipe.ranks import ParallelRanks
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_trace
from dpipe.timeline.span import Lane

SLOW = "delay_ms = 20\nbandwidth_gbps = 0.08\n"  # 200 kB take 20 ms, and arrive 20 ms later
EXCHANGES, ROUND_MS = 1, 20 + 20  # of half an exchange's bytes: long beside what a machine is late
LATE = 1.5  # a busy machine wakes threads late

Run = Callable[..., list[BaseException | None]]


@pytest.fixture
def shared(tmp_path: Path) -> Callable[..., Config]:
    """`shared(pipeline__stages=2)`: replayed stages on two ranks each, on a slow network."""
    (tmp_path / "slow.toml").write_text(SLOW)
    table: dict[str, dict[str, Any]] = {
        "model": {"layers": "replay"},
        "replay": {
            "forward_ms": 10,
            "backward_ms": 20,
            "message_bytes": 4000,
            "exchanges": EXCHANGES,
            "exchange_bytes": 400_000,
        },
        "train": {"steps": 2, "batch_size": 2, "num_microbatches": 2, "clip_norm": 0},
        "tensor_parallel": {"size": 2},
        "transport": {"kind": "tcp", "shape": str(tmp_path / "slow.toml")},
        "run": {"folder": str(tmp_path / "run"), "tensorboard": False, "trace_steps": 1},
        "timeouts": {"join": 20, "transfer": 20},
    }

    def make(**overrides: Any) -> Config:
        return build(table).with_(**overrides)

    return make


def seconds_of(config: Config, run_ranks: Run) -> float:
    assert run_ranks(config) == [None] * config.world_size
    seconds: float = read_rows(Path(config.run.folder))[1]["step_s"]
    return seconds


@pytest.mark.parametrize("stages", [1, 2])
def test_step_takes_its_waits_and_the_network_time_of_its_exchanges(shared, run_ranks, stages):
    config = shared(pipeline__stages=stages)
    assert seconds_of(config, run_ranks) >= forecast(config).step_us / 1e6


@pytest.mark.waits
def test_step_takes_little_more_than_that(shared, run_ranks, tmp_path):
    folders = (str(tmp_path / f"run-{number}") for number in count())
    most_s = LATE * forecast(shared()).step_us / 1e6

    def look() -> float:
        return seconds_of(shared(run__folder=next(folders)), run_ranks)

    assert settled(look, lambda seconds: seconds < most_s) < most_s


def test_exchanges_are_part_of_each_forward_and_backward(shared):
    """An all-reduce of two ranks has two rounds; there are two micro-batches."""
    all_of_them_ms = 2 * 2 * EXCHANGES * 2 * ROUND_MS
    assert forecast(shared()).step_us / 1e3 == pytest.approx(2 * (10 + 20) + all_of_them_ms)


def test_trace_shows_what_each_rank_sends_the_next(shared, run_ranks):
    config = shared()
    run_ranks(config)
    ((_, _, measured),) = load_trace(Path(config.run.folder)).steps
    exchanged = [
        span.num_bytes for span in measured.spans if span.lane is Lane.TENSOR and span.rank == 1
    ]
    assert exchanged == [400_000] * (2 * 2 * EXCHANGES)


@pytest.mark.parametrize(("rank", "around"), [(0, (2, 1)), (1, (0, 2)), (2, (1, 0)), (5, (4, 3))])
def test_tensor_parallel_ranks_form_a_ring(rank, around):
    assert neighbours(ParallelRanks(rank, pp_size=2, tp_size=3)) == around


def test_only_a_replay_has_links_for_its_exchanges(shared):
    here = ParallelRanks(0, tp_size=2)
    assert ring_peers(shared(), here) == {1}
    assert ring_peers(build({"tensor_parallel": {"size": 2}}), here) == set()


def test_each_rank_is_a_host_of_its_own(shared):
    assert shared(pipeline__stages=2).num_machines == 4


def test_simulation_says_so(shared, tmp_path: Path):
    lines = ["model.layers = 'replay'", "tensor_parallel.size = 2", "replay.exchanges = 1"]
    (tmp_path / "job.toml").write_text("\n".join(lines))
    assert "2 ranks a stage, each on a host of its own" in forecast_text(
        str(tmp_path / "job.toml"), (), None, False
    )


@pytest.mark.parametrize("exchanges", [1, 0])
def test_network_of_unlike_links_is_refused(shared, exchanges):
    unlike = Network("pair", Link(1, 1), {(0, 1): Link(2, 1)})
    with pytest.raises(ConfigError, match="whose links are alike, and pair lists some apart"):
        forecast(shared(replay__exchanges=exchanges), network=unlike)
