"""Whose chunks of a step's gradient are in, and their mean, added in replica order.

    chunk 4    replica 0 -> sum    2 waits, early    1 -> sum, then 2 -> sum, / 3: final

However chunks arrive, and however often, they are added in the order of the replicas: the same
gradients give the same bits. One that is early is held until its turn. At worst, where replica 0 is
the last to come, that is R - 1 whole gradients.
"""

import torch

from dpipe.errors import TransferError


class GradientSum:
    """One step of one stage. A chunk of `average` [N] holds the mean where `is_final` says so."""

    def __init__(self, num_replicas: int, num_chunks: int, average: torch.Tensor) -> None:
        self.average = average
        self._num_replicas = num_replicas
        self._next = [0] * num_chunks  # by chunk, the replica whose turn it is
        # by chunk and replica
        self._early: list[dict[int, torch.Tensor]] = [{} for _ in range(num_chunks)]
        self._num_open = num_chunks

    @property
    def final(self) -> bool:
        """Whether every chunk is."""
        return self._num_open == 0

    def is_final(self, chunk: int) -> bool:
        return self._next[chunk] == self._num_replicas

    def missing(self) -> list[int]:
        """The replicas of which some chunk is not in."""
        chunks = range(len(self._next))
        replicas = range(self._num_replicas)
        missing = []
        for replica in replicas:
            if not all(self.has(replica, chunk) for chunk in chunks):
                missing.append(replica)
        return missing

    def add(
        self,
        replica: int,
        chunk: int,
        part: slice,
        values: torch.Tensor,
    ) -> None:
        """Take a replica's chunk, elements `part` of the gradient; one that is in already is not
        added again.

        `values` must not change afterwards. Raises `TransferError` for a replica or a chunk that
        does not exist, or another number of values.
        """
        size = part.stop - part.start
        knows_replica = 0 <= replica < self._num_replicas
        knows_chunk = 0 <= chunk < len(self._next)
        if not (knows_replica and knows_chunk) or values.shape != (size,):
            raise TransferError(
                f"replica {replica} pushed {values.numel()} values as chunk {chunk}, where "
                f"{self._num_replicas} replicas push {len(self._next)} chunks, of {max(size, 0)} "
                "values there"
            )
        if replica >= self._next[chunk]:
            # A push that is repeated brings the same values again.
            self._early[chunk].setdefault(replica, values)
            self._add_up(chunk, self.average[part])

    def has(self, replica: int, chunk: int) -> bool:
        return replica < self._next[chunk] or replica in self._early[chunk]

    def so_far(self, chunk: int, part: slice) -> torch.Tensor:
        """The mean over the replicas that are in, of which there is at least one."""
        if self.is_final(chunk):
            return self.average[part]
        num_added = self._next[chunk]
        early = list(self._early[chunk].values())
        # Before the first is added, `average` still holds an older gradient.
        total = self.average[part] if num_added else torch.zeros(())
        for values in early:
            total = total + values  # not in place: the sum in progress must not see it
        return total / (num_added + len(early))

    def set_average(self, average: torch.Tensor) -> None:
        """Take the mean [N] from a journal: no chunk is missing any more."""
        self.average.copy_(average)
        self._next = [self._num_replicas] * len(self._next)
        self._num_open = 0

    def _add_up(self, chunk: int, total: torch.Tensor) -> None:
        """Add every replica whose turn has come."""
        early = self._early[chunk]
        while self._next[chunk] in early:
            values = early.pop(self._next[chunk])
            if self._next[chunk] == 0:
                total.copy_(values)
            else:
                total.add_(values)
            self._next[chunk] += 1
            if self.is_final(chunk):
                total.div_(self._num_replicas)
                self._num_open -= 1
