"""Shaping in software compared with the simulator, on the same network."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.settled import settled

from dpipe.config.load import Config
from dpipe.data.batch import Batch
from dpipe.dataparallel.single import Single
from dpipe.engine.executor import Executor, Parts
from dpipe.engine.hop_codecs import HopCodecs
from dpipe.engine.recorder import Recorder
from dpipe.errors import ProfileError
from dpipe.network.in_transit import InTransit
from dpipe.network.link import Link, Network
from dpipe.plan.forecast import forecast
from dpipe.schedule.action import SENDS, Action
from dpipe.schedule.generate import generate
from dpipe.schedule.links import counterpart, peer
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.stage.replay import ReplayStage
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from dpipe.timeline.span import Lane, Timeline
from dpipe.transport.base import Transport
from dpipe.transport.local import LocalHub
from dpipe.transport.shaped import ShapedTransport
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

RANKS, MICROBATCHES, MESSAGE_BYTES = 3, 4, 500_000
FORWARD_S, BACKWARD_S = (
    0.1,
    0.2,
)  # long, so that 3 % of a step are more than a busy machine adds to all its sleeps
LATE_S = 0.015  # a thread of a busy machine may wake this late


def rank_main(schedule: Schedule, transport: Transport, rank: int) -> None:
    stage = ReplayStage(
        rank,
        num_microbatches=MICROBATCHES,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        input_share=0.5,
        message_bytes=MESSAGE_BYTES,
        first=rank == 0,
        last=rank == RANKS - 1,
    )
    boundaries = ((TensorSpec((MESSAGE_BYTES // 4,), torch.float32),),) * (RANKS - 1)
    codecs = HopCodecs(HopFormats.alike("none", RANKS - 1))
    parts = Parts(
        rank,
        {rank: stage},
        transport,
        codecs,
        boundaries,
        Single(),
        Recorder(rank),
    )
    Executor(parts).run(schedule, Batch([()] * MICROBATCHES))


def measured_s(schedule: Schedule, network: Network) -> float:
    hub = LocalHub(RANKS)
    transports = [ShapedTransport(hub.transport(rank), network) for rank in range(RANKS)]
    threads = [
        threading.Thread(target=rank_main, args=(schedule, end, end.rank)) for end in transports
    ]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    seconds = time.perf_counter() - start
    for transport in transports:
        transport.close()
    return seconds


CASES = pytest.mark.parametrize(
    ("name", "delay_ms", "gbps"),
    [("gpipe", 50, 0.1), ("1f1b", 20, 0.05), ("zero-bubble", 150, 0.05)],
)


def simulated(name: str, delay_ms: float, gbps: float) -> tuple[Schedule, Network, Timeline]:
    network = Network(default=Link(delay_ms, gbps))
    schedule = lower(generate(name, RANKS, MICROBATCHES))
    cost = Cost.uniform(RANKS, FORWARD_S * 1e6, BACKWARD_S * 1e6, MESSAGE_BYTES)
    return schedule, network, simulate_alone(Scenario(schedule, cost, network))


@CASES
def test_shaping_delivers_every_message_at_the_simulated_time(
    name: str, delay_ms: float, gbps: float
) -> None:
    """Exactly, on paper: the shaper's own clockless part, offered what the simulated ranks send
    when they send it.
    """
    schedule, network, timeline = simulated(name, delay_ms, gbps)
    made_us = {span.action: span.end_us for span in timeline.spans if span.lane is Lane.COMPUTE}
    arrives_us = {span.action: span.end_us for span in timeline.spans if span.lane is Lane.RECV}
    for rank in range(RANKS):
        flight, seen = InTransit[Action](network, rank), dict[Action, float]()
        sends = [action for action in schedule.programs[rank] if action.op in SENDS]
        for action in sends:
            flight.offer(
                peer(schedule, action), action, MESSAGE_BYTES, made_us[schedule.requires(action)[0]]
            )
        while (due_us := flight.due_us) < math.inf:
            if (sent := flight.arrived(due_us)) is not None:
                seen[sent.item] = due_us
        assert seen == {
            action: pytest.approx(arrives_us[counterpart(action, RANKS)], abs=0.01)
            for action in sends
        }


@pytest.mark.waits
@CASES
def test_shaped_run_takes_the_simulated_time_plus_the_machines_delays(
    name: str, delay_ms: float, gbps: float
) -> None:
    """Never less. More by 3 %, and by a late wake-up for each wait of the longest chain: a machine
    may be busy.
    """
    schedule, network, timeline = simulated(name, delay_ms, gbps)
    predicted_s, chain = timeline.duration_us / 1e6, 3 * (MICROBATCHES + RANKS)
    most_s = 1.03 * predicted_s + chain * LATE_S

    def look() -> float:
        seconds = measured_s(schedule, network)
        assert predicted_s <= seconds
        return seconds

    assert settled(look, lambda seconds: seconds <= most_s, tries=3) <= most_s


def test_run_over_a_shaped_network_takes_its_time_with_the_same_losses(
    tiny: Callable[..., Config], losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    (tmp_path / "far.toml").write_text("delay_ms = 20\nbandwidth_gbps = 1")
    near = tiny(pipeline__stages=2)
    far = tiny(
        pipeline__stages=2,
        transport__shape=str(tmp_path / "far.toml"),
        run__folder=str(tmp_path / "far"),
    )
    expected = losses(near)
    start = time.perf_counter()
    assert losses(far) == expected
    assert time.perf_counter() - start > 3 * 2 * 0.020  # three steps, there and back


def profile(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_forecast_assumes_the_shaped_network_unless_told_otherwise(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    far = profile(tmp_path / "far.toml", "delay_ms = 20\nbandwidth_gbps = 1")
    other = profile(tmp_path / "other.toml", "delay_ms = 1\nbandwidth_gbps = 1")
    assert forecast(tiny(transport__shape=far)).network.name == "far"
    assert forecast(tiny(transport__shape=far, predict__network=other)).network.name == "other"


def test_forecast_counts_the_connections(tiny: Callable[..., Config], tmp_path: Path) -> None:
    text = "delay_ms = 50\nbandwidth_gbps = 1\nwindow_bytes = 1e6"
    far = tiny(transport__shape=profile(tmp_path / "far.toml", text), transport__connections=4)
    assert forecast(far).network.rate_gbps(0, 1) == pytest.approx(4 * 1e6 * 8 / 100e6)


def test_forecast_refuses_more_ranks_than_the_profile_has_pairs_for(
    tiny: Callable[..., Config], tmp_path: Path
) -> None:
    pairs = profile(
        tmp_path / "pair.toml", "link = [{ from = 0, to = 1, delay_ms = 1, bandwidth_gbps = 1 }]"
    )
    forecast(tiny(pipeline__stages=2, predict__network=pairs))
    with pytest.raises(ProfileError, match="'pair' has no link from rank 0 to 2"):
        forecast(tiny(pipeline__stages=4, predict__network=pairs))
