"""Whose pieces of a step's gradient are in, and their mean, in replica order.

    chunk 4      replica 0  -> sum     replica 2 waits, early     replica 1 -> sum, then 2 -> sum, / 3: final

However pieces arrive, and however often, they are added in the order of the replicas: the same
gradients give the same bits. What is early is held until its turn; at worst, where replica 0 is the
last to come, that is R - 1 rows.
"""

import torch

from dpipe.errors import TransferError


class GradientSum:
    """One step of one row. `average` [N] is final where `is_final` says so."""

    def __init__(self, num_replicas: int, num_chunks: int, average: torch.Tensor) -> None:
        self.average = average
        self._num_replicas = num_replicas
        self._next = [0] * num_chunks  # by chunk, the replica whose turn it is
        self._early: list[dict[int, torch.Tensor]] = [{} for _ in range(num_chunks)]
        self._num_open = num_chunks

    @property
    def final(self) -> bool:
        """Every chunk is."""
        return self._num_open == 0

    def is_final(self, chunk: int) -> bool:
        return self._next[chunk] == self._num_replicas

    def missing(self) -> list[int]:
        """The replicas of which some piece is not in."""
        turns = list(zip(self._next, self._early, strict=True))
        return [
            r
            for r in range(self._num_replicas)
            if any(r >= turn and r not in early for turn, early in turns)
        ]

    def add(self, replica: int, chunk: int, part: slice, values: torch.Tensor) -> None:
        """Take a replica's piece, elements `part` of the row; one that is in already is not added
        again.

        `values` must not change afterwards. Raises `TransferError` for a replica or a chunk that is
        none, or another number of values.
        """
        size = part.stop - part.start
        if not (
            0 <= replica < self._num_replicas and 0 <= chunk < len(self._next)
        ) or values.shape != (size,):
            raise TransferError(
                f"replica {replica} pushed {values.numel()} values as chunk {chunk}, where "
                f"{self._num_replicas} "
                f"replicas push {len(self._next)} chunks, of {max(size, 0)} values there"
            )
        if replica >= self._next[chunk]:
            self._early[chunk].setdefault(replica, values)
            self._add_up(chunk, self.average[part])

    def has(self, replica: int, chunk: int) -> bool:
        return replica < self._next[chunk] or replica in self._early[chunk]

    def so_far(self, chunk: int, part: slice) -> torch.Tensor:
        """The mean of the pieces that are in; there is one. Once the chunk is final, its mean."""
        early = list(self._early[chunk].values())
        added = self._next[chunk]
        if self.is_final(chunk):
            return self.average[part]
        total = sum(early, start=self.average[part] if added else torch.zeros(()))
        return total / (added + len(early))

    def settle(self, average: torch.Tensor) -> None:
        """Take the mean [N] from somewhere else: no piece is missing any more."""
        self.average.copy_(average)
        self._next = [self._num_replicas] * len(self._next)
        self._num_open = 0

    def _add_up(self, chunk: int, total: torch.Tensor) -> None:
        while (values := self._early[chunk].pop(self._next[chunk], None)) is not None:
            if self._next[chunk] == 0:
                total.copy_(values)
            else:
                total.add_(values)
            self._next[chunk] += 1
            if self.is_final(chunk):
                total.div_(self._num_replicas)
                self._num_open -= 1
