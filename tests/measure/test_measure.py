"""All of a measurement, between ranks that are threads, over loopback."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.errors import RunAborted, TransferError
from dpipe.measure import measure as measuring
from dpipe.measure import rounds
from dpipe.measure.connections import Connections
from dpipe.measure.found import MeasuredCluster, _unique
from dpipe.measure.measure import Measuring
from dpipe.measure.reports import LayerReport, MachineReport
from dpipe.wire.rpc import Security

LAYER = LayerReport(
    kind="block",
    micro_batch_size=2,
    forward_ms=1.23456,
    backward_ms=2,
    backward_input_ms=1,
    backward_weight_ms=1,
)
NO_SECURITY = Security()
# What a busy machine makes of loopback, in so short a time.
BUSY = ("its time was over", "so many machines are so far apart")
Part = Callable[[Coordinator, Connections], object]


def machine(name: str = "m") -> MachineReport:
    return MachineReport(
        name=name,
        device="cpu",
        cores=2,
        devices=1,
        memory_gb=3.5,
        price_per_hour=1.5,
        layers=[LAYER],
    )


def honest(coordinator: Coordinator, connections: Connections) -> MeasuredCluster:
    said: list[str] = []
    part = Measuring(coordinator, connections, connect_s=5.0, wait_s=60.0, say=said.append)
    measured = part.run(machine(), "model")
    assert said[0].startswith("opening connections between ")
    return measured


def measured_by(*parts: Part, security: Security = NO_SECURITY) -> list:
    """What each rank returns, or raises."""
    with closing(CoordinatorServer(len(parts), security=security)) as server:

        def run(rank: int) -> object:
            with closing(Connections(rank, security=security)) as connections:
                coordinator = Coordinator.join(
                    f"127.0.0.1:{server.port}",
                    rank,
                    len(parts),
                    shared={},
                    advertised=f"127.0.0.1:{connections.port}",
                    security=security,
                )
                with closing(coordinator):
                    try:
                        result = parts[rank](coordinator, connections)
                        coordinator.leave()
                    except Exception as error:
                        return error
                    return result

        with ThreadPoolExecutor(len(parts)) as pool:
            return list(pool.map(run, range(len(parts))))


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seconds less; and nothing is left running."""
    monkeypatch.setattr(rounds, "ROUNDS_S", 2.0)
    monkeypatch.setattr(measuring, "_TOGETHER_S", 0.5)
    before = set(threading.enumerate())
    yield
    assert not [t for t in threading.enumerate() if t not in before and "dpipe" in t.name]


def doubted(found: MeasuredCluster) -> list[str]:
    """What is wrong with more than this machine."""
    return [line for line in found.problems if not any(words in line for words in BUSY)]


@pytest.mark.waits  # connections that a busy machine is late for count as none
def test_all_ranks_end_with_the_same_machines_and_links() -> None:
    first, *others = measured_by(honest, honest, honest)
    assert not doubted(first)
    assert all(other.cluster.links == first.cluster.links for other in others)
    cluster = first.cluster
    assert cluster.names == ("m-0", "m-1", "m-2")
    assert len(cluster.links) == 6
    for (source, target), link in cluster.links.items():
        assert 0 < link.delay_ms < 50, "loopback, on a busy machine"
        assert link.bandwidth_gbps > 0.01
        assert link.bandwidth_gbps <= cluster.machine(source).egress_gbps
        assert link.bandwidth_gbps <= cluster.machine(target).ingress_gbps
    described = cluster.machine("m-1")
    assert (described.cores, described.memory_gb, described.price_per_hour) == (2, 3.5, 1.5)
    assert described.layer_time("block", 2).forward_ms == 1.235
    assert cluster.measured.model == "model"


def test_connections_are_encrypted_where_the_run_is(authority) -> None:
    secure = authority().security(token="t")
    first, _ = measured_by(honest, honest, security=secure)
    assert not doubted(first)
    assert len(first.cluster.links) == 2


@pytest.mark.waits
def test_pair_that_cannot_talk_is_named_and_the_others_are_measured() -> None:
    """Rank 2 does not hear rank 1, as behind a firewall."""

    def deaf_to_1(coordinator: Coordinator, connections: Connections) -> MeasuredCluster:
        refuse = connections._refusal
        connections._refusal = lambda hello: "no" if hello.from_rank == 1 else refuse(hello)
        return honest(coordinator, connections)

    first, *_ = measured_by(honest, honest, deaf_to_1)
    (problem,) = doubted(first)
    assert problem.startswith("m-1 and m-2 cannot talk: rank 2 at 127.0.0.1:")
    assert problem.endswith(": no")
    assert set(first.cluster.links) == {
        ("m-0", "m-1"),
        ("m-1", "m-0"),
        ("m-0", "m-2"),
        ("m-2", "m-0"),
    }


@pytest.mark.parametrize("part", ["_ping", "_stream", "_stream_together"])
def test_rank_that_dies_in_the_middle_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = getattr(Measuring, part)

    def dies(self: Measuring, *arguments: object) -> object:
        if self._rank == 1:
            self._coordinator.close()
            raise RunAborted("killed")
        return whole(self, *arguments)

    monkeypatch.setattr(Measuring, part, dies)
    first, _, third = measured_by(honest, honest, honest)
    for error in (first, third):
        assert isinstance(error, RunAborted)
        assert "lost rank 1 (127.0.0.1:" in str(error)


def test_pair_that_breaks_in_its_round_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Measuring._stream

    def breaks(self: Measuring, peer: int | None, *arguments: object) -> object:
        if {self._rank, peer} == {0, 1} and self._rank == 0:
            self._connections.interrupt()
        return whole(self, peer, *arguments)

    monkeypatch.setattr(Measuring, "_stream", breaks)
    first, second = measured_by(honest, honest)
    assert first.cluster.links == second.cluster.links == {}
    assert first.problems == second.problems
    assert first.problems[0].startswith("m-0 and m-1 cannot talk: rank ")


@pytest.mark.waits
def test_peer_that_falls_silent_in_a_round_costs_that_round_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_LATE_S", 1.0)
    whole = Measuring._stream

    def sleeps(self: Measuring, peer: int | None, length_s: float, *arguments: object) -> object:
        if {self._rank, peer} == {0, 1} and self._rank == 1:
            time.sleep(length_s + 3.0)
        return whole(self, peer, length_s, *arguments)

    monkeypatch.setattr(Measuring, "_stream", sleeps)
    first, *_ = measured_by(honest, honest, honest)
    (problem,) = doubted(first)
    assert problem == "m-0 and m-1 cannot talk: rank 1 fell silent in the middle"
    assert len(first.cluster.links) == 4


@pytest.mark.parametrize(
    ("part", "payload"),
    [
        ("machine", {**machine().model_dump(), "cores": -1}),
        ("machine", {**machine().model_dump(), "memory_gb": float("inf")}),
        ("machine", {**machine().model_dump(), "name": "a\nb"}),
        ("machine", {**machine().model_dump(), "layers": [LAYER.model_dump()] * 4097}),
        ("opened", [{"peer": -1, "reason": "x"}]),
        ("delays", {"delays": [{"peer": 1, "delay_ms": -1, "jitter_ms": 0}], "problems": []}),
        ("delays", {"delays": [{"peer": 1, "delay_ms": 1e9, "jitter_ms": 0}], "problems": []}),
        # An hour: all machines waited for four round trips of it.
        ("delays", {"delays": [{"peer": 1, "delay_ms": 3.6e6, "jitter_ms": 0}], "problems": []}),
        ("round/0", {"gbps": 1e99, "loss_percent": 0, "rising": False, "problem": ""}),
        ("round/0", {"gbps": 1, "loss_percent": 100, "rising": False, "problem": ""}),
        ("together", {"egress_gbps": -1, "ingress_gbps": 0}),
    ],
)
def test_absurd_measurement_is_refused_with_the_rank_that_sent_it(
    part: str, payload: object
) -> None:
    def hostile(coordinator: Coordinator, connections: Connections) -> object:
        share = coordinator.share

        def lie(key: str, value: object, *arguments: object) -> object:
            return share(key, payload if key == f"measure/{part}" else value, *arguments)

        coordinator.share = lie
        return honest(coordinator, connections)

    first, _ = measured_by(honest, hostile)
    assert isinstance(first, TransferError)
    assert "rank 1 sent " in str(first)
    assert f"for 'measure/{part}' that do not belong there" in str(first)


def test_machines_of_one_name_differ_in_the_file() -> None:
    assert _unique(["a", "b", "c"]) == ["a", "b", "c"]
    assert _unique(["a", "a", "b"]) == ["a-0", "a-1", "b"]
    assert _unique(["a", "a", "a-0"]) == ["a-0-", "a-1", "a-0"]
