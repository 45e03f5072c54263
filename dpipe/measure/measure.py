"""All ranks measure their machines and the links between them; each ends with the same `Cluster`.

every rank                                                  the coordinator
its machine, its layers       ──share──▶  machines          who is there, and that all are
opens its connections         ──share──▶  who cannot talk   at the same point; a rank that
pings all                     ──share──▶  delays            dies ends it, by name
round 0: streams to its peer  ──share──▶  rates, losses
round 1: ...
streams to several at once    ──share──▶  egress, ingress
"""

import time
from collections.abc import Callable, Mapping, Sequence

from dpipe.coordinator.base import Coordination
from dpipe.machines.machine import Measurement
from dpipe.measure.connections import Connections
from dpipe.measure.found import FoundLinks, MeasuredCluster, date_now, measured
from dpipe.measure.pings import Delay, ping_all
from dpipe.measure.reports import (
    DATE,
    MACHINE_REPORT,
    PEERS_REPORT,
    PROBLEMS,
    STREAM_REPORT,
    TOGETHER_REPORT,
    DelayReport,
    MachineReport,
    PeersReport,
    Problem,
    StreamReport,
    TogetherReport,
)
from dpipe.measure.rounds import (
    Pair,
    Timetable,
    pair_of,
    partner,
    tournament,
)
from dpipe.measure.traffic import Inflow, Outflow, PeerTraffic, exchange, gbps

_TOGETHER = 4  # peers that a rank sends to, and that send to it, when all do
_TOGETHER_S = 2.0
_SETTLED = 0.4  # of that time: when all send, and TCP has found its rates
_LATE_S = 5.0  # behind a round's time, until a peer counts as silent
_NEWS_S = 2.0  # between lines on the progress

Say = Callable[[str], None]


class Measuring:
    """One rank's part. `connections` listen already, and the coordinator has told where; they stay
    the caller's to close.
    """

    def __init__(
        self,
        coordinator: Coordination,
        connections: Connections,
        *,
        connect_s: float,
        wait_s: float,
        say: Say = lambda text: None,
    ) -> None:
        """`connect_s` bounds the opening of connections, `wait_s` each wait for the other ranks.
        `say` is told the progress.
        """
        self._coordinator = coordinator
        self._connections = connections
        self._connect_s = connect_s
        self._wait_s = wait_s
        self._say = say
        self._rank = coordinator.rank
        self._size = coordinator.world_size
        self._links = FoundLinks()

    def run(self, here: MachineReport, model: str) -> MeasuredCluster:
        """`here` is this machine, `model` the digest of what its layers' times depend on. Raises
        `RunAborted` naming a rank that was lost.
        """
        machines = self._coordinator.share(
            "measure/machine", here.model_dump(), self._wait_s, MACHINE_REPORT
        )
        # What waits for a peer ends with the run: a rank that is lost is named by the coordinator.
        self._coordinator.on_abort(lambda _: self._connections.interrupt())
        self._open()
        self._ping()
        self._stream_in_rounds()
        together = self._stream_together()
        addresses = self._coordinator.addresses
        # Rank 0's: clocks differ, and what is found must not.
        dates = self._coordinator.share("measure/date", date_now(), self._wait_s, DATE)
        return measured(machines, together, addresses, self._links, Measurement(dates[0], model))

    # The parts, in their order. All ranks are in the same one.

    def _open(self) -> None:
        self._say(f"opening connections between {self._size} machines")
        coordinator = self._coordinator
        others = set(range(self._size)) - {self._rank}
        routes = coordinator.routes(self._connections.here, others, self._connect_s)
        self._links.relayed = frozenset(coordinator.relayed)
        reasons = self._connections.open(
            coordinator.addresses, self._connect_s, coordinator.link_secrets, routes
        )
        mine = [Problem(peer=peer, reason=reason).model_dump() for peer, reason in reasons.items()]
        # Others may still wait for their deadline.
        shared = self._coordinator.share(
            "measure/opened", mine, self._connect_s + self._wait_s, PROBLEMS
        )
        self._refuse(shared)
        self._connections.seal()

    def _ping(self) -> None:
        self._say("pinging all of them")
        found, reasons = ping_all(self._rank, self._connections.peers)
        delays = []
        for peer, delay in found.items():
            delays.append(
                DelayReport(peer=peer, delay_ms=delay.one_way_ms, jitter_ms=delay.jitter_ms)
            )
        for peer in range(self._size):
            unknown = peer not in self._connections.peers and peer != self._rank
            if unknown and pair_of(self._rank, peer) not in self._links.reasons:
                reasons[peer] = f"rank {peer} has opened no connection with rank {self._rank}"
        problems = [Problem(peer=peer, reason=reason) for peer, reason in reasons.items()]
        mine = PeersReport(delays=delays, problems=problems).model_dump()
        shared = self._coordinator.share("measure/delays", mine, self._wait_s, PEERS_REPORT)
        for rank, report in enumerate(shared):
            for one in report.delays:
                pair = rank, one.peer
                jitter_ms = min(one.jitter_ms, one.delay_ms)
                # The lower rank of a pair pings; what another says of it is not asked for.
                if rank < one.peer < self._size:
                    self._links.delays[pair] = Delay(one.delay_ms, jitter_ms)
        self._refuse([report.problems for report in shared])

    def _refuse(self, problems: Sequence[Sequence[Problem]]) -> None:
        """Leave out the pairs that some rank has a problem with."""
        for rank, of_rank in enumerate(problems):
            for problem in of_rank:
                if problem.peer < self._size and problem.peer != rank:
                    self._leave_out(rank, problem.peer, problem.reason)

    def _leave_out(self, rank: int, peer: int, reason: str) -> None:
        self._links.refuse(pair_of(rank, peer), reason)
        if rank == self._rank:
            self._connections.drop(peer)
        elif peer == self._rank:
            self._connections.drop(rank)

    def _stream_in_rounds(self) -> None:
        rounds = tournament(self._size)
        round_trips_s = self._links.round_trips_s()
        timetable = Timetable(rounds, round_trips_s)
        lengths = timetable.lengths_s
        self._links.in_turns = timetable.in_turns
        self._say(
            f"{len(rounds)} rounds of disjoint pairs: at most {sum(lengths) + _TOGETHER_S:.0f} s"
        )
        said_at = time.monotonic()
        for number, (pairs, length_s) in enumerate(zip(rounds, lengths, strict=True)):
            peer = partner(pairs, self._rank)
            mine = self._stream(peer, length_s, timetable)
            shared = self._coordinator.share(
                f"measure/round/{number}", mine.model_dump(), self._wait_s, STREAM_REPORT
            )
            for lower, higher in pairs:
                if (lower, higher) in round_trips_s:
                    self._note(lower, higher, shared[lower])
                    self._note(higher, lower, shared[higher])
            if time.monotonic() - said_at >= _NEWS_S:
                said_at = time.monotonic()
                left_s = sum(lengths[number + 1 :]) + _TOGETHER_S
                self._say(f"round {number + 1} of {len(rounds)}: at most {left_s:.0f} s left")

    def _stream(self, peer: int | None, length_s: float, timetable: Timetable) -> StreamReport:
        """This rank's part of a round."""
        idle = StreamReport(
            gbps=0.0,
            loss_percent=0.0,
            rising=False,
            problem="",
        )
        if peer is None:
            return idle
        round_trip_s = timetable.round_trips_s.get(pair_of(self._rank, peer))
        sockets = self._connections.peers.get(peer)
        if round_trip_s is None or sockets is None:
            return idle
        lasts_s = timetable.stream_s(length_s, round_trip_s)
        relayed = pair_of(self._rank, peer) in self._links.relayed
        out = Outflow(sockets.data, round_trip_s, lasts_s, relayed=relayed)
        # Of two that take turns the lower rank is first.
        waits = self._rank > peer and not timetable.at_once(round_trip_s)
        into = Inflow(sockets.data, relayed=relayed)
        flow = PeerTraffic(peer, sockets, out, into, into_first=waits)
        exchange([flow], time.monotonic() + length_s + _LATE_S)
        if flow.problem:
            self._connections.drop(peer)
            return idle.model_copy(update={"problem": flow.problem})
        return StreamReport(
            gbps=out.gbps,
            loss_percent=out.loss_percent,
            rising=out.rising,
            problem="",
        )

    def _note(self, source: int, target: int, report: StreamReport) -> None:
        if report.problem or not report.gbps:
            reason = report.problem or f"nothing of rank {source} arrived at rank {target}"
            self._leave_out(source, target, reason)
        else:
            self._links.streams[source, target] = report

    def _stream_together(self) -> list[TogetherReport]:
        self._say("all send at once")
        round_trips_s = self._links.round_trips_s()
        lasts_s = _TOGETHER_S + 4 * max(round_trips_s.values(), default=0.0)
        flows = self._flows_together(round_trips_s, lasts_s)
        began = time.monotonic()
        exchange(flows, began + lasts_s + _LATE_S)
        settled = began + _SETTLED * lasts_s
        ended = began + lasts_s
        egress = 0.0
        ingress = 0.0
        # While all send: a stream that is alone finds the interface free.
        for flow in flows:
            if flow.out is not None:
                egress += flow.out.meter.rate_between(settled, ended)
            if flow.into is not None:
                ingress += flow.into.meter.rate_between(settled, ended)
        mine = TogetherReport(
            egress_gbps=gbps(egress),
            ingress_gbps=gbps(ingress),
        )
        return self._coordinator.share(
            "measure/together", mine.model_dump(), self._wait_s, TOGETHER_REPORT
        )

    def _flows_together(
        self, round_trips_s: Mapping[Pair, float], lasts_s: float
    ) -> list[PeerTraffic]:
        """To the next ranks of a ring, and from those before."""
        # A ring: every rank has as many to send to as send to it, without asking.
        offsets = range(1, min(_TOGETHER, self._size - 1) + 1)
        targets = {(self._rank + offset) % self._size for offset in offsets}
        sources = {(self._rank - offset) % self._size for offset in offsets}
        flows = []
        for peer in sorted(targets | sources):
            round_trip_s = round_trips_s.get(pair_of(self._rank, peer))
            sockets = self._connections.peers.get(peer)
            if round_trip_s is None or sockets is None:
                continue
            relayed = pair_of(self._rank, peer) in self._links.relayed
            out = None
            into = None
            if peer in targets:
                out = Outflow(
                    sockets.data, round_trip_s, lasts_s, until_steady=False, relayed=relayed
                )
            if peer in sources:
                into = Inflow(sockets.data, relayed=relayed)
            flows.append(PeerTraffic(peer, sockets, out, into))
        return flows
