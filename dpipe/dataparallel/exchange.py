"""Reduce-scatter and all-gather between the replicas of a stage, direct: each pair over its own link, part by part.

Three replicas, one part; each owns a piece of it and sends the other pieces to their owners:

    replica 0   a0 b0 c0        b0 -> 1, c0 -> 2      A = (a0 + a1 + a2) / 3     A -> 1, 2      A B C
    replica 1   a1 b1 c1        a1 -> 0, c1 -> 2      B = (b0 + b1 + b2) / 3     B -> 0, 2      A B C
    replica 2   a2 b2 c2        a2 -> 0, b2 -> 1      C = (c0 + c1 + c2) / 3     C -> 0, 1      A B C
                                reduce-scatter                                   all-gather

A ring (Patarasuk and Yuan 2009) moves the same bytes, 2 (R - 1) / R of the row out of each replica, but in 2 (R - 1)
steps one behind the other, each of which waits out a link's delay; this takes two. A ring also adds in an order that
differs from piece to piece, and a lossy wire would round once a hop. Here the owner adds in replica order, so that the
same inputs give the same bits, and each number is rounded once on its way in and once on its way out. The owner uses
what it sent, rounded, itself: replicas stay equal to the last bit whatever the wire.
"""

from collections import deque
from collections.abc import Callable, Sequence

import torch

from dpipe.dataparallel.base import Links, Pending, Traffic
from dpipe.dataparallel.feedback import Key, Wire
from dpipe.dataparallel.row import Pieces
from dpipe.wire.spec import TensorSpec

Phase = Callable[[int], None]
Ready = Callable[[slice], None]  # puts a piece of the row in its place, shortly before it is sent

_AHEAD = 8  # parts that a phase may be ahead of the next: what is on its way over a long link at once


class DirectExchange:
    """One replica's end. `ranks[r]` is the rank of replica r; all of them make the same calls in the same order."""

    def __init__(
        self, links: Links, replica: int, ranks: Sequence[int], wire: Wire, *, part_bytes: int = 4 << 20
    ) -> None:
        self.links, self.replica, self.ranks, self.wire = links, replica, ranks, wire
        self._part_values = max(1, part_bytes // 4)

    @property
    def num_replicas(self) -> int:
        return len(self.ranks)

    def fail(self, error: Exception) -> None:
        self.links.fail(error)

    def pieces(self, length: int) -> Pieces:
        return Pieces(length, self.num_replicas, self._part_values)

    def average(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        """Replace `row` [N] by its mean over replicas."""
        under_way = _UnderWay(self, row, stage, ready)
        return under_way.run([under_way.scatter, under_way.reduce_and_gather, under_way.collect])

    def reduce_scatter(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        """Replace this replica's shard of `row` by its mean over replicas."""
        under_way = _UnderWay(self, row, stage, ready)
        return under_way.run([under_way.scatter, under_way.reduce])

    def all_gather(self, row: torch.Tensor, stage: int) -> list[Traffic]:
        """Replace the other shards of `row` by those of the replicas that own them."""
        under_way = _UnderWay(self, row, stage, lambda piece: None)
        return under_way.run([under_way.gather, under_way.collect])


class _UnderWay:
    """One exchange of one row."""

    def __init__(self, ends: DirectExchange, row: torch.Tensor, stage: int, ready: Ready) -> None:
        self._ends, self._row, self._stage, self._ready = ends, row, stage, ready
        self._pieces = ends.pieces(row.numel())
        self._me = ends.replica
        # The next replica first, so that they do not all send to replica 0 at once.
        self._others = [(self._me + hop) % ends.num_replicas for hop in range(1, ends.num_replicas)]
        self._sent: list[tuple[int, Pending[None]]] = []
        self._shares: deque[dict[int, Pending[torch.Tensor]]] = deque()
        self._averages: deque[dict[int, Pending[torch.Tensor]]] = deque()

    def run(self, phases: Sequence[Phase]) -> list[Traffic]:
        """Each part through all phases; a phase is `_AHEAD` parts ahead of the one behind it.

        Returns when everything sent has left: until then the transport reads from the row.
        """
        num_parts = self._pieces.num_parts
        for turn in range(num_parts + _AHEAD * (len(phases) - 1)):
            for depth, phase in enumerate(phases):
                if 0 <= turn - depth * _AHEAD < num_parts:
                    phase(turn - depth * _AHEAD)
        for _, pending in self._sent:
            pending.wait()
        moved = [(self._ends.ranks[other], pending.moved) for other, pending in self._sent]
        return [Traffic(self._stage, rank, when) for rank, when in moved if when is not None]

    def scatter(self, part: int) -> None:
        """Send every other replica its piece; expect theirs of this one's."""
        tag, mine = f"{self._stage}SCATTER{part}", self._pieces.piece(part, self._me)
        for other in self._others:
            piece = self._pieces.piece(part, other)
            self._ready(piece)
            self._send([other], piece, tag, ("scatter", part, other))
        self._ready(mine)
        self._shares.append(self._receive(tag, dict.fromkeys(self._others, mine)))

    def reduce(self, part: int) -> None:
        """The mean of this replica's piece, added in replica order."""
        mine, shares = self._row[self._pieces.piece(part, self._me)], self._shares.popleft()
        like, total = TensorSpec.of(mine), None
        for replica in sorted({self._me, *shares}):
            share = mine if replica == self._me else self._ends.wire.decode(shares[replica].wait(), like)
            total = share if total is None else total.add_(share)  # its memory is this exchange's, whichever it is
        assert total is not None
        torch.div(total, self._ends.num_replicas, out=mine)

    def gather(self, part: int) -> None:
        """Send this replica's piece to all; expect theirs."""
        piece, tag = self._pieces.piece(part, self._me), f"{self._stage}GATHER{part}"
        wire = self._send(self._others, piece, tag, ("gather", part))
        if self._ends.wire.lossy and wire is not None:
            self._put(piece, wire)
        self._averages.append(self._receive(tag, {other: self._pieces.piece(part, other) for other in self._others}))

    def reduce_and_gather(self, part: int) -> None:
        self.reduce(part)
        self.gather(part)

    def collect(self, part: int) -> None:
        for other, pending in self._averages.popleft().items():
            self._put(self._pieces.piece(part, other), pending.wait())

    def _put(self, piece: slice, wire: torch.Tensor) -> None:
        out = self._row[piece]
        out.copy_(self._ends.wire.decode(wire, TensorSpec.of(out)))

    def _send(self, others: Sequence[int], piece: slice, tag: str, key: Key) -> torch.Tensor | None:
        """Send a piece, the same bytes to each; what went on the wire. Of an empty piece nobody speaks."""
        if piece.start == piece.stop:
            return None
        wire = self._ends.wire.encode(self._row[piece], (self._stage, *key))
        for other in others:
            self._sent.append((other, self._ends.links.send(wire, self._ends.ranks[other], tag)))
        return wire

    def _receive(self, tag: str, pieces: dict[int, slice]) -> dict[int, Pending[torch.Tensor]]:
        """Expect from each other replica a piece such as the one that lies here."""
        expected = {other: self._row[piece] for other, piece in pieces.items() if piece.start < piece.stop}
        return {
            other: self._ends.links.recv(self._ends.wire.wire_spec(TensorSpec.of(values)), self._ends.ranks[other], tag)
            for other, values in expected.items()
        }
