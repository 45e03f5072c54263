"""Runs the exchanges of `schedule/exchange.py` between replicas: part by part, each pair over its
own link.

    replica 0   a0 b0 c0        b0 -> 1, c0 -> 2      A = (a0 + a1 + a2) / 3     A -> 1, 2      A B C
    replica 1   a1 b1 c1        a1 -> 0, c1 -> 2      B = (b0 + b1 + b2) / 3     B -> 0, 2      A B C
    replica 2   a2 b2 c2        a2 -> 0, b2 -> 1      C = (c0 + c1 + c2) / 3     C -> 0, 1      A B C
                                reduce-scatter                                   all-gather

A ring (Patarasuk and Yuan 2009) moves the same bytes in 2 (R - 1) steps one behind the other, each
of which waits out a link's delay; this takes two. A ring also adds in an order that differs from
piece to piece, and a lossy wire rounds once a hop. Here the owner adds in replica order, so that
the same inputs give the same bits, and each number is rounded once on its way in and once on its
way out. The owner uses what it sent, rounded, itself: replicas stay equal to the last bit whatever
the wire. It rounds its own share as those of the others come rounded, so that a mean is the same
whoever owns it: the two copies of a tied weight lie at different places of their rows, and have to
step alike.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from dpipe.dataparallel.base import Traffic
from dpipe.dataparallel.feedback import Wire
from dpipe.schedule.exchange import AHEAD, Exchange, Message, Role, direct
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Links, Pending

_WINDOW = 2 * AHEAD  # messages of a link that have a place before they come

Ready = Callable[[slice], None]  # puts a piece of the row in its place, shortly before it is needed


class DirectExchange:
    """One replica's end. `ranks[r]` is the rank of replica r; all of them make the same calls in
    the same order.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        links: Links,
        replica: int,
        ranks: Sequence[int],
        wire: Wire,
        *,
        part_bytes: int = 4 << 20,
    ) -> None:
        self.links = links
        self.replica = replica
        self.ranks = ranks
        self.wire = wire
        self._part_values = max(1, part_bytes // 4)
        self._plans: dict[tuple[int, TensorSpec], Route] = {}
        self.buffers = _BufferPool()

    def average(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        """Replace `row` [N] by its mean over replicas."""
        plan = self._plan(row, stage)
        return _UnderWay(self, plan, row, ready).run(plan.sends, plan.arrivals)

    def reduce_scatter(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        """Replace this replica's shard of `row` by its mean over replicas."""
        plan = self._plan(row, stage)
        under_way = _UnderWay(self, plan, row, ready)
        traffic = under_way.run(_with(Role.REDUCE, plan.sends), _with(Role.REDUCE, plan.arrivals))
        for part in range(plan.num_parts):
            under_way.reduce(part)
        return traffic

    def all_gather(self, row: torch.Tensor, stage: int) -> list[Traffic]:
        """Replace the other shards of `row` by those of the replicas that own them."""
        plan = self._plan(row, stage)
        under_way = _UnderWay(self, plan, row, lambda piece: None, reduced=True)
        return under_way.run(_with(Role.GATHER, plan.sends), _with(Role.GATHER, plan.arrivals))

    def shard(self, length: int) -> slice:
        """What of a row this replica owns."""
        count = len(self.ranks)
        return slice(length * self.replica // count, length * (self.replica + 1) // count)

    def fail(self, error: Exception) -> None:
        self.links.fail(error)

    def _plan(self, row: torch.Tensor, stage: int) -> "Route":
        like = TensorSpec.of(row)
        if (stage, like) not in self._plans:
            num_parts = max(1, -(-row.numel() // self._part_values))
            exchange = direct(len(self.ranks), num_parts)
            self._plans[stage, like] = Route(exchange, self.replica, stage, like, self.wire)
        return self._plans[stage, like]


class Leg(NamedTuple):
    """A message, what of the row it carries, and how it looks there and on the wire."""

    message: Message
    tag: str
    piece: slice
    values: TensorSpec
    wire: TensorSpec


class Route:
    """What one end of an exchange of a `row` [N] sends and gets, in order: worked out once, used at
    every step.

    Of empty pieces nobody speaks.
    """

    def __init__(
        self, exchange: Exchange, replica: int, stage: int, row: TensorSpec, wire: Wire
    ) -> None:
        self.num_parts = exchange.num_parts
        self.stage = stage
        self.others = [other for other in range(exchange.num_replicas) if other != replica]
        self._exchange = exchange
        self._row = row
        self._wire = wire
        self.sends = self._legs(exchange.programs[replica])
        self.arrivals = self._legs(exchange.arrivals[replica])
        adds_up = (
            Message(Role.REDUCE, part, replica, replica, replica)
            for part in range(exchange.num_parts)
        )
        self.own = [self._leg(message) for message in adds_up]  # by part

    def _legs(self, messages: Iterable[Message]) -> list[Leg]:
        return [leg for leg in map(self._leg, messages) if leg.piece.start < leg.piece.stop]

    def _leg(self, message: Message) -> Leg:
        tag = f"{self.stage}{message.role} {message.part} of {message.owner}"
        piece = self._exchange.piece(message, *self._row.shape)
        values = TensorSpec((piece.stop - piece.start,), self._row.dtype)
        return Leg(message, tag, piece, values, self._wire.wire_spec(values))


def _with(role: Role, legs: Iterable[Leg]) -> list[Leg]:
    return [leg for leg in legs if leg.message.role is role]


class _BufferPool:
    """Memory for what comes, used again and again: fresh pages cost as much as the bytes that fill
    them.
    """

    def __init__(self) -> None:
        self._free: dict[TensorSpec, list[torch.Tensor]] = {}

    def take(self, spec: TensorSpec) -> torch.Tensor:
        free = self._free.get(spec)
        return free.pop() if free else spec.empty()

    def give_back(self, spec: TensorSpec, buffer: torch.Tensor) -> None:
        self._free.setdefault(spec, []).append(buffer)


class _UnderWay:
    """One exchange of one row. Of each link, `_WINDOW` messages are expected at a time: as much
    memory, and no more.
    """

    def __init__(
        self,
        ends: DirectExchange,
        plan: Route,
        row: torch.Tensor,
        ready: Ready,
        *,
        reduced: bool = False,
    ) -> None:
        self._ends = ends
        self._plan = plan
        self._row = row
        self._ready = ready
        self._links = ends.links
        self._wire = ends.wire
        self._coming: dict[int, deque[Leg]] = {
            other: deque() for other in plan.others
        }  # not expected yet, by source
        self._shares: dict[tuple[int, int], Pending[torch.Tensor]] = {}  # by part and replica
        self._averages: deque[tuple[Leg, Pending[torch.Tensor]]] = deque()
        self._sent: list[tuple[int, Pending[None]]] = []
        self._wires: dict[int, torch.Tensor] = {}  # by part: what goes to everybody
        self._reduced = reduced

    def run(self, sends: Iterable[Leg], arrivals: Iterable[Leg]) -> list[Traffic]:
        """Returns when everything has come and everything sent has left: until then the row is read
        from.
        """
        for leg in arrivals:
            self._coming[leg.message.source].append(leg)
        for source in self._coming:
            for _ in range(_WINDOW):
                self._expect_next(source)
        for leg in sends:
            self._send(leg)
            while self._averages and self._averages[0][1].done():
                self._collect()
        while self._averages:
            self._collect()
        for _, pending in self._sent:
            pending.wait()
        moved = ((rank, pending.moved) for rank, pending in self._sent)
        return [Traffic(self._plan.stage, rank, when) for rank, when in moved if when is not None]

    def reduce(self, part: int) -> None:
        """The mean of this replica's part, added in replica order."""
        own = self._plan.own[part]
        self._ready(own.piece)
        mine = self._row[own.piece]
        total = None
        received = {
            replica: self._share(part, replica) for replica in self._plan.others if mine.numel()
        }
        for replica in sorted({*received, self._ends.replica}):
            wire = received.get(replica)
            share = (
                self._wire.rounded(mine) if wire is None else self._wire.decode(wire, own.values)
            )
            total = (
                share if total is None else total.add_(share)
            )  # a buffer of this exchange, or `mine` itself
        assert total is not None
        torch.div(total, len(self._ends.ranks), out=mine)
        for wire in received.values():
            self._ends.buffers.give_back(own.wire, wire)

    def _share(self, part: int, replica: int) -> torch.Tensor:
        while (part, replica) not in self._shares:
            self._collect()  # what comes before it on its link, so that it is expected
        wire = self._shares.pop((part, replica)).wait()
        self._expect_next(replica)
        return wire

    def _send(self, leg: Leg) -> None:
        part = leg.message.part
        target = leg.message.target
        if leg.message.role is Role.REDUCE:
            self._ready(leg.piece)
            wire = self._wire.encode(
                self._row[leg.piece], (self._plan.stage, "reduce", part, target)
            )
        else:
            wire = self._agreed(leg)
        rank = self._ends.ranks[target]
        self._sent.append((rank, self._links.send(wire, rank, leg.tag)))

    def _agreed(self, leg: Leg) -> torch.Tensor:
        """This replica's part as it goes to everybody, and as it uses it itself."""
        part = leg.message.part
        if part not in self._wires:
            if not self._reduced:
                self.reduce(part)
            self._wires = {
                part: self._wire.encode(self._row[leg.piece], (self._plan.stage, "gather", part))
            }
            if self._wire.lossy:
                self._put(leg, self._wires[part])
        return self._wires[part]

    def _expect_next(self, source: int) -> None:
        """Expect the next message of a link. An average comes straight into the row where it needs
        no decoding.
        """
        if not self._coming[source]:
            return
        leg = self._coming[source].popleft()
        straight = leg.message.role is Role.GATHER and not self._wire.lossy
        into = self._row[leg.piece] if straight else self._ends.buffers.take(leg.wire)
        pending = self._links.recv(leg.wire, self._ends.ranks[source], leg.tag, into)
        if leg.message.role is Role.REDUCE:
            self._shares[leg.message.part, source] = pending
        else:
            self._averages.append((leg, pending))

    def _collect(self) -> None:
        leg, pending = self._averages.popleft()
        wire = pending.wait()
        if self._wire.lossy:
            self._put(leg, wire)
            self._ends.buffers.give_back(leg.wire, wire)
        self._expect_next(leg.message.source)

    def _put(self, leg: Leg, wire: torch.Tensor) -> None:
        self._row[leg.piece].copy_(self._wire.decode(wire, leg.values))
