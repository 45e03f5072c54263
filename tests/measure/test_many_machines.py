"""64 machines in a few seconds: ranks are threads, and what moves bytes or waits is replaced."""

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from dpipe.measure import measure as measuring
from dpipe.measure.found import MeasuredCluster
from dpipe.measure.measure import Measuring
from dpipe.measure.pings import Delay
from dpipe.measure.reports import MachineReport, StreamReport, TogetherReport

NUM = 64
# Seconds beside the rounds' own: joining, layers, connections, pings, all at once, and a word with
# the coordinator after each round, at 100 ms there and back.
AROUND_S = 5 + 5 + 3 + 4 + 3 + NUM * 0.1
BLOCKED = (3, 40)


class Table:
    """A coordinator around which all ranks sit."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(NUM, timeout=60)
        self.shared: dict[str, dict[int, Any]] = {}

    def seat(self, rank: int) -> Any:
        def share(key: str, value: Any, timeout_s: float, schema: Any) -> list[Any]:
            self.shared.setdefault(key, {})[rank] = value
            self.barrier.wait()
            return [schema._adapter.validate_python(self.shared[key][r]) for r in range(NUM)]

        return SimpleNamespace(
            rank=rank,
            world_size=NUM,
            addresses=dict.fromkeys(range(NUM)),
            link_secrets={},
            relayed=(),
            routes=lambda here, peers, timeout_s: {},
            share=share,
            on_abort=lambda callback: None,
        )


class Open:
    """Connections that are there, but for one pair's."""

    def __init__(self, rank: int) -> None:
        self.peers = {peer: object() for peer in range(NUM) if peer != rank}
        self.rank = rank
        self.here = ""

    def open(
        self, addresses: object, timeout_s: float, secrets: object, routes: object
    ) -> dict[int, str]:
        return {BLOCKED[1]: "firewall"} if self.rank == BLOCKED[0] else {}

    def drop(self, peer: int) -> None:
        self.peers.pop(peer, None)

    def seal(self) -> None:
        pass


@pytest.mark.slow
def test_64_machines_are_measured_in_less_than_two_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    met: Counter[tuple[int, int]] = Counter()
    lengths: dict[int, float] = {}

    def pinged(rank: int, peers: dict[int, object]) -> tuple[dict[int, Delay], dict[int, str]]:
        far_ms = 67.0
        return {peer: Delay(far_ms, 0.1) for peer in peers if peer > rank}, {}

    def streamed(
        self: Measuring, peer: int | None, length_s: float, timetable: object
    ) -> StreamReport:
        if peer in self._connections.peers:
            met[self._rank, peer] += 1
        if self._rank == 0:
            lengths[peer] = length_s
        return StreamReport(gbps=1.0 + self._rank, loss_percent=0, rising=False, problem="")

    monkeypatch.setattr(measuring, "ping_all", pinged)
    monkeypatch.setattr(Measuring, "_stream", streamed)
    monkeypatch.setattr(
        Measuring,
        "_stream_together",
        lambda self: [TogetherReport(egress_gbps=1, ingress_gbps=1)] * NUM,
    )
    here = MachineReport(
        name="m",
        device="cpu",
        cores=1,
        devices=1,
        memory_gb=1.0,
        price_per_hour=None,
        layers=[],
    )
    table = Table()
    said: list[str] = []

    def run(rank: int) -> MeasuredCluster:
        say = said.append if rank == 0 else lambda text: None
        part = Measuring(table.seat(rank), Open(rank), connect_s=1.0, wait_s=60.0, say=say)
        return part.run(here, "model")

    with ThreadPoolExecutor(NUM) as pool:
        first, *_ = pool.map(run, range(NUM))
    pairs = set(combinations(range(NUM), 2)) - {BLOCKED}
    assert met == Counter([*pairs, *((higher, lower) for lower, higher in pairs)])
    doubt, *others = first.problems
    assert "measured both ways at once: they may carry up to half as much again" in doubt
    assert others == ["m-3 and m-40 cannot talk: firewall"]
    assert len(first.cluster.links) == NUM * (NUM - 1) - 2
    assert first.cluster.link("m-5", "m-9").bandwidth_gbps == 6
    assert len(lengths) == NUM - 1
    assert sum(lengths.values()) + AROUND_S < 120
    assert "63 rounds of disjoint pairs: at most 87 s" in said
