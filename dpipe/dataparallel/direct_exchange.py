"""Runs the exchanges of `schedule/exchange.py` between replicas: part by part, each pair over its
own link.

    replica 0   a0 b0 c0     b0 -> 1, c0 -> 2    A = (a0 + a1 + a2) / 3    A -> 1, 2     A B C
    replica 1   a1 b1 c1     a1 -> 0, c1 -> 2    B = (b0 + b1 + b2) / 3    B -> 0, 2     A B C
    replica 2   a2 b2 c2     a2 -> 0, b2 -> 1    C = (c0 + c1 + c2) / 3    C -> 0, 1     A B C
                             reduce-scatter                                all-gather

A ring (Patarasuk and Yuan 2009) moves the same bytes in 2 (R - 1) steps one behind the other, each
of which waits out a link's delay; this takes two. A ring also adds in an order that differs from
piece to piece, and a lossy wire rounds at every hop. Here the owner adds in replica order, so that
the same inputs give the same bits, and each value is rounded once on its way in and once on its way
out. The owner itself uses the rounded mean that it sends: replicas stay equal to the last bit
whatever the wire. It rounds its own share as the others' shares come rounded, so that a mean is the
same whoever owns it: the two copies of a tied weight lie at different places of their stages'
vectors, and have to step alike.
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from dpipe.dataparallel.background import Ready
from dpipe.dataparallel.base import Traffic
from dpipe.schedule.exchange import AHEAD, Exchange, Message, Role, direct
from dpipe.wire.feedback import Wire
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Links, Pending

_WINDOW = 2 * AHEAD  # messages of a link that have a place before they come


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
        by_stage: Mapping[int, Sequence[int]] | None = None,
    ) -> None:
        """A vector is exchanged in parts of about `part_bytes`; `by_stage` has the ranks of stages
        whose replicas are on others than `ranks`.
        """
        self.links = links
        self.replica = replica
        self._ranks = ranks
        self._by_stage = by_stage or {}
        self.wire = wire
        self.buffers = _BufferPool()
        self._part_values = max(1, part_bytes // 4)
        self._routes: dict[tuple[int, TensorSpec], Route] = {}  # by stage and vector

    def average(
        self, vector: torch.Tensor, stage: int, ready: Ready, without: Collection[int] = ()
    ) -> list[Traffic]:
        """Replace `vector` [N] by its mean over replicas, those `without` left out."""
        route = self._route(vector, stage)
        exchange = _RunningExchange(self, route, vector, ready, without=without)
        return exchange.run(route.sends, route.arrivals)

    def reduce_scatter(
        self, vector: torch.Tensor, stage: int, ready: Ready, without: Collection[int] = ()
    ) -> list[Traffic]:
        """Replace this replica's shard of `vector` by its mean over replicas, those `without` left
        out.
        """
        route = self._route(vector, stage)
        exchange = _RunningExchange(self, route, vector, ready, without=without)
        sends = _with(Role.REDUCE, route.sends)
        traffic = exchange.run(sends, _with(Role.REDUCE, route.arrivals))
        for part in range(route.num_parts):
            exchange.reduce(part)
        return traffic

    def all_gather(self, vector: torch.Tensor, stage: int) -> list[Traffic]:
        """Replace the other shards of `vector` by those of the replicas that own them."""
        route = self._route(vector, stage)
        exchange = _RunningExchange(self, route, vector, lambda piece: None, reduced=True)
        sends = _with(Role.GATHER, route.sends)
        return exchange.run(sends, _with(Role.GATHER, route.arrivals))

    def ranks_of(self, stage: int) -> Sequence[int]:
        """By replica, who holds `stage`."""
        return self._by_stage.get(stage, self._ranks)

    def shard(self, length: int) -> slice:
        """The part of a vector of `length` that this replica owns."""
        # Multiplied first: shards differ by one value at most, and each ends where the next begins.
        count = len(self._ranks)
        start = length * self.replica // count
        stop = length * (self.replica + 1) // count
        return slice(start, stop)

    def fail(self, error: Exception) -> None:
        self.links.fail(error)

    def _route(self, vector: torch.Tensor, stage: int) -> "Route":
        like = TensorSpec.of(vector)
        if (stage, like) not in self._routes:
            num_parts = max(1, -(-vector.numel() // self._part_values))
            exchange = direct(len(self._ranks), num_parts)
            route = Route(exchange, self.replica, stage, like, self.wire)
            self._routes[stage, like] = route
        return self._routes[stage, like]


class Leg(NamedTuple):
    """A message, which piece of the vector it carries, and how that looks here and on the wire."""

    message: Message
    tag: str
    piece: slice
    values: TensorSpec
    wire: TensorSpec


class Route:
    """What one end of an exchange of a vector [N] sends and receives, in order: worked out once,
    used at every step.

    Empty pieces are skipped.
    """

    def __init__(
        self, exchange: Exchange, replica: int, stage: int, vector: TensorSpec, wire: Wire
    ) -> None:
        self.num_parts = exchange.num_parts
        self.stage = stage
        self.others = [other for other in range(exchange.num_replicas) if other != replica]
        self._exchange = exchange
        self._vector = vector
        self._wire = wire
        self.sends = self._legs(exchange.programs[replica])
        self.arrivals = self._legs(exchange.arrivals[replica])
        # by part: what this replica adds to what it owns, as if it sent it to itself
        self.own: list[Leg] = []
        for part in range(exchange.num_parts):
            message = Message(Role.REDUCE, part, replica, replica, replica)
            self.own.append(self._leg(message))

    def _legs(self, messages: Iterable[Message]) -> list[Leg]:
        legs = [self._leg(message) for message in messages]
        return [leg for leg in legs if leg.piece.start < leg.piece.stop]

    def _leg(self, message: Message) -> Leg:
        tag = f"{self.stage}{message.role} {message.part} of {message.owner}"
        piece = self._exchange.piece(message, *self._vector.shape)
        size = piece.stop - piece.start
        values = TensorSpec((size,), self._vector.dtype)
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


class _RunningExchange:
    """One exchange of one vector. Of each link, `_WINDOW` messages are expected at a time: as much
    memory, and no more.
    """

    def __init__(
        self,
        end: DirectExchange,
        route: Route,
        vector: torch.Tensor,
        ready: Ready,
        *,
        reduced: bool = False,
        without: Collection[int] = (),
    ) -> None:
        """With `reduced` this replica's shard is the mean already. What the replicas `without` send
        is received and dropped, whatever it is.
        """
        self._end = end
        self._route = route
        self._vector = vector
        self._ready = ready
        self._reduced = reduced
        self._without = without
        self._links = end.links
        self._wire = end.wire
        self._ranks = end.ranks_of(route.stage)
        # by source: not expected yet
        self._coming: dict[int, deque[Leg]] = {other: deque() for other in route.others}
        self._shares: dict[tuple[int, int], Pending[torch.Tensor]] = {}  # by part and replica
        self._averages: deque[tuple[Leg, Pending[torch.Tensor]]] = deque()
        self._sent: list[tuple[int, Pending[None]]] = []  # with the rank
        # the part that goes to everybody now, encoded once
        self._outgoing: tuple[int, torch.Tensor] | None = None

    def run(self, sends: Iterable[Leg], arrivals: Iterable[Leg]) -> list[Traffic]:
        """Returns when everything has come and everything sent has left: until then the vector is
        read from.
        """
        for leg in arrivals:
            self._coming[leg.message.source].append(leg)
        for source in self._coming:
            for _ in range(_WINDOW):
                self._expect_next(source)
        for leg in sends:
            self._send(leg)
            # What has come makes room in the window of its link: the others need not wait until
            # this end has sent all of its own.
            while self._averages and self._averages[0][1].done():
                self._collect()
        while self._averages:
            self._collect()
        return self._finish_sends()

    def reduce(self, part: int) -> None:
        """The mean of this replica's part, added in replica order."""
        own = self._route.own[part]
        self._ready(own.piece)
        mine = self._vector[own.piece]
        if not mine.numel():  # nobody sends an empty piece
            return
        received: dict[int, torch.Tensor] = {}
        for replica in self._route.others:
            received[replica] = self._share(part, replica)
        total: torch.Tensor | None = None  # a buffer of this exchange, or `mine` itself
        # By replica, whoever was here first: a sum in another order has other bits.
        counted = {*received, self._end.replica}
        counted.difference_update(self._without)
        for replica in sorted(counted):
            if replica in received:
                share = self._wire.decode(received[replica], own.values)
            else:
                share = self._wire.rounded(mine)
            total = share if total is None else total.add_(share)
        assert total is not None, "not all replicas are left out"
        num_replicas = len(self._ranks) - len(self._without)
        torch.div(total, num_replicas, out=mine)
        for wire in received.values():
            self._end.buffers.give_back(own.wire, wire)

    def _share(self, part: int, replica: int) -> torch.Tensor:
        while (part, replica) not in self._shares:
            # What comes before it on its link makes place for it.
            self._collect()
        wire = self._shares.pop((part, replica)).wait()
        self._expect_next(replica)
        return wire

    def _send(self, leg: Leg) -> None:
        part = leg.message.part
        target = leg.message.target
        if leg.message.role is Role.REDUCE:
            self._ready(leg.piece)
            key = (self._route.stage, "reduce", part, target)
            wire = self._wire.encode(self._vector[leg.piece], key)
        else:
            wire = self._mean(leg)
        rank = self._ranks[target]
        pending = self._links.send(wire, rank, leg.tag)
        self._sent.append((rank, pending))

    def _finish_sends(self) -> list[Traffic]:
        # The step may write to the vector as soon as this returns.
        for _, pending in self._sent:
            pending.wait()
        traffic = []
        for rank, pending in self._sent:
            if pending.moved is not None:
                traffic.append(Traffic(self._route.stage, rank, pending.moved))
        return traffic

    def _mean(self, leg: Leg) -> torch.Tensor:
        """This replica's part as it goes to everybody, and as it uses it itself."""
        part = leg.message.part
        if self._outgoing is not None and self._outgoing[0] == part:
            return self._outgoing[1]
        if not self._reduced:
            self.reduce(part)
        piece = self._vector[leg.piece]
        key = (self._route.stage, "gather", part)
        wire = self._wire.encode(piece, key)
        if self._wire.lossy:  # what the others will read, or replicas would drift apart
            self._put(leg, wire)
        self._outgoing = (part, wire)
        return wire

    def _expect_next(self, source: int) -> None:
        """Expect the next message of a link. A mean comes straight into the vector where it needs
        no decoding.
        """
        if not self._coming[source]:
            return
        leg = self._coming[source].popleft()
        straight = leg.message.role is Role.GATHER and not self._wire.lossy
        into = self._vector[leg.piece] if straight else self._end.buffers.take(leg.wire)
        rank = self._ranks[source]
        pending = self._links.recv(leg.wire, rank, leg.tag, into)
        if leg.message.role is Role.REDUCE:
            self._shares[leg.message.part, source] = pending
        else:
            self._averages.append((leg, pending))

    def _collect(self) -> None:
        """Wait for the next mean."""
        leg, pending = self._averages.popleft()
        wire = pending.wait()
        if self._wire.lossy:
            self._put(leg, wire)
            self._end.buffers.give_back(leg.wire, wire)
        self._expect_next(leg.message.source)

    def _put(self, leg: Leg, wire: torch.Tensor) -> None:
        values = self._wire.decode(wire, leg.values)
        self._vector[leg.piece].copy_(values)
