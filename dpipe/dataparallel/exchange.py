"""Runs the exchanges of `schedule/exchange.py` between replicas: part by part, each pair over its own link.

    replica 0   a0 b0 c0        b0 -> 1, c0 -> 2      A = (a0 + a1 + a2) / 3     A -> 1, 2      A B C
    replica 1   a1 b1 c1        a1 -> 0, c1 -> 2      B = (b0 + b1 + b2) / 3     B -> 0, 2      A B C
    replica 2   a2 b2 c2        a2 -> 0, b2 -> 1      C = (c0 + c1 + c2) / 3     C -> 0, 1      A B C
                                reduce-scatter                                   all-gather

A ring (Patarasuk and Yuan 2009) moves the same bytes in 2 (R - 1) steps one behind the other, each of which waits out
a link's delay; this takes two. A ring also adds in an order that differs from piece to piece, and a lossy wire rounds
once a hop. Here the owner adds in replica order, so that the same inputs give the same bits, and each number is rounded
once on its way in and once on its way out. The owner uses what it sent, rounded, itself: replicas stay equal to the
last bit whatever the wire.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from dpipe.dataparallel.base import Links, Pending, Traffic
from dpipe.dataparallel.feedback import Wire
from dpipe.schedule.exchange import AHEAD, Exchange, Message, Role, direct
from dpipe.wire.spec import TensorSpec

_WINDOW = 2 * AHEAD  # messages of a link that have a place before they come

Ready = Callable[[slice], None]  # puts a piece of the row in its place, shortly before it is needed


class DirectExchange:
    """One replica's end. `ranks[r]` is the rank of replica r; all of them make the same calls in the same order."""

    device = torch.device("cpu")

    def __init__(
        self, links: Links, replica: int, ranks: Sequence[int], wire: Wire, *, part_bytes: int = 4 << 20
    ) -> None:
        self.links, self.replica, self.ranks, self.wire = links, replica, ranks, wire
        self._part_values = max(1, part_bytes // 4)
        self._plans: dict[int, Plan] = {}
        self.buffers = _Buffers()

    def average(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        """Replace `row` [N] by its mean over replicas."""
        plan = self._plan(row)
        return _UnderWay(self, plan, row, stage, ready).run(plan.sends, plan.arrivals)

    def reduce_scatter(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        """Replace this replica's shard of `row` by its mean over replicas."""
        plan = self._plan(row)
        under_way = _UnderWay(self, plan, row, stage, ready)
        traffic = under_way.run(_with(Role.REDUCE, plan.sends), _with(Role.REDUCE, plan.arrivals))
        for part in range(plan.exchange.num_parts):
            under_way.reduce(part)
        return traffic

    def all_gather(self, row: torch.Tensor, stage: int) -> list[Traffic]:
        """Replace the other shards of `row` by those of the replicas that own them."""
        plan = self._plan(row)
        under_way = _UnderWay(self, plan, row, stage, lambda piece: None, reduced=True)
        return under_way.run(_with(Role.GATHER, plan.sends), _with(Role.GATHER, plan.arrivals))

    def shard(self, length: int) -> slice:
        """What of a row this replica owns."""
        count = len(self.ranks)
        return slice(length * self.replica // count, length * (self.replica + 1) // count)

    def fail(self, error: Exception) -> None:
        self.links.fail(error)

    def _plan(self, row: torch.Tensor) -> "Plan":
        if row.numel() not in self._plans:
            num_parts = max(1, -(-row.numel() // self._part_values))
            self._plans[row.numel()] = Plan(direct(len(self.ranks), num_parts), self.replica, row.numel())
        return self._plans[row.numel()]


class Plan:
    """What one end of an exchange of `length` values sends and gets, in order. Of empty pieces nobody speaks."""

    def __init__(self, exchange: Exchange, replica: int, length: int) -> None:
        self.exchange, self.replica, self.length = exchange, replica, length
        self.others = [other for other in range(exchange.num_replicas) if other != replica]
        self.sends = [m for m in exchange.programs[replica] if self._has_bytes(m)]
        self.arrivals = [m for m in exchange.arrivals[replica] if self._has_bytes(m)]

    def piece(self, message: Message) -> slice:
        return self.exchange.piece(message, self.length)

    def own(self, part: int) -> slice:
        """The part that this replica adds up."""
        return self.piece(Message(Role.REDUCE, part, self.replica, self.replica, self.replica))

    def _has_bytes(self, message: Message) -> bool:
        piece = self.piece(message)
        return bool(piece.start < piece.stop)


def _with(role: Role, messages: Iterable[Message]) -> list[Message]:
    return [message for message in messages if message.role is role]


class _Buffers:
    """Memory for what comes, used again and again: fresh pages cost as much as the bytes that fill them."""

    def __init__(self) -> None:
        self._free: dict[TensorSpec, list[torch.Tensor]] = {}

    def take(self, spec: TensorSpec) -> torch.Tensor:
        free = self._free.get(spec)
        return free.pop() if free else spec.empty()

    def give_back(self, buffer: torch.Tensor) -> None:
        self._free.setdefault(TensorSpec.of(buffer), []).append(buffer)


class _UnderWay:
    """One exchange of one row. Of each link, `_WINDOW` messages are expected at a time: as much memory, and no more."""

    def __init__(
        self, ends: DirectExchange, plan: Plan, row: torch.Tensor, stage: int, ready: Ready, *, reduced: bool = False
    ) -> None:
        self._ends, self._plan, self._row, self._stage, self._ready = ends, plan, row, stage, ready
        self._coming: dict[int, deque[Message]] = {}  # by source, what is not expected yet
        self._shares: dict[tuple[int, int], Pending[torch.Tensor]] = {}  # by part and replica
        self._averages: deque[tuple[Message, Pending[torch.Tensor]]] = deque()
        self._sent: list[tuple[int, Pending[None]]] = []
        self._wires: dict[int, torch.Tensor] = {}  # by part: what goes to everybody
        self._reduced = reduced

    def run(self, sends: Iterable[Message], arrivals: Iterable[Message]) -> list[Traffic]:
        """Returns when everything has come and everything sent has left: until then the row is read from."""
        for message in arrivals:
            self._coming.setdefault(message.source, deque()).append(message)
        for source in self._coming:
            for _ in range(_WINDOW):
                self._expect_next(source)
        for message in sends:
            self._send(message)
            while self._averages and self._averages[0][1].done():
                self._collect()
        while self._averages:
            self._collect()
        for _, pending in self._sent:
            pending.wait()
        moved = ((self._ends.ranks[target], pending.moved) for target, pending in self._sent)
        return [Traffic(self._stage, rank, when) for rank, when in moved if when is not None]

    def reduce(self, part: int) -> None:
        """The mean of this replica's part, added in replica order."""
        piece = self._plan.own(part)
        self._ready(piece)
        mine, total = self._row[piece], None
        received = {replica: self._share(part, replica) for replica in self._plan.others if mine.numel()}
        for replica in sorted({*received, self._ends.replica}):
            wire = received.get(replica)
            share = mine if wire is None else self._ends.wire.decode(wire, TensorSpec.of(mine))
            total = share if total is None else total.add_(share)  # a buffer of this exchange, or `mine` itself
        assert total is not None
        torch.div(total, len(self._ends.ranks), out=mine)
        for wire in received.values():
            self._ends.buffers.give_back(wire)

    def _share(self, part: int, replica: int) -> torch.Tensor:
        while (part, replica) not in self._shares:
            self._collect()  # what comes before it on its link, so that it is expected
        wire = self._shares.pop((part, replica)).wait()
        self._expect_next(replica)
        return wire

    def _send(self, message: Message) -> None:
        piece = self._plan.piece(message)
        if message.role is Role.REDUCE:
            self._ready(piece)
            wire = self._ends.wire.encode(self._row[piece], (self._stage, "reduce", message.part, message.target))
        else:
            wire = self._agreed(message.part, piece)
        rank = self._ends.ranks[message.target]
        self._sent.append((message.target, self._ends.links.send(wire, rank, self._tag(message))))

    def _agreed(self, part: int, piece: slice) -> torch.Tensor:
        """This replica's part as it goes to everybody, and as it uses it itself."""
        if part not in self._wires:
            if not self._reduced:
                self.reduce(part)
            self._wires = {part: self._ends.wire.encode(self._row[piece], (self._stage, "gather", part))}
            if self._ends.wire.lossy:
                self._put(piece, self._wires[part])
        return self._wires[part]

    def _expect_next(self, source: int) -> None:
        """Expect the next message of a link. An average comes straight into the row where it needs no decoding."""
        if not self._coming[source]:
            return
        message = self._coming[source].popleft()
        place = self._row[self._plan.piece(message)]
        like = self._ends.wire.wire_spec(TensorSpec.of(place))
        straight = message.role is Role.GATHER and not self._ends.wire.lossy
        into = place if straight else self._ends.buffers.take(like)
        pending = self._ends.links.recv(like, self._ends.ranks[source], self._tag(message), into)
        if message.role is Role.REDUCE:
            self._shares[message.part, source] = pending
        else:
            self._averages.append((message, pending))

    def _collect(self) -> None:
        message, pending = self._averages.popleft()
        wire = pending.wait()
        if self._ends.wire.lossy:
            self._put(self._plan.piece(message), wire)
            self._ends.buffers.give_back(wire)
        self._expect_next(message.source)

    def _put(self, piece: slice, wire: torch.Tensor) -> None:
        out = self._row[piece]
        out.copy_(self._ends.wire.decode(wire, TensorSpec.of(out)))

    def _tag(self, message: Message) -> str:
        return f"{self._stage}{message.role} {message.part} of {message.owner}"
