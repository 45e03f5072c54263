"""Where one rank stands in a run: pipeline stage, tensor-parallel group, replica. Imports nothing.

    replica 0     rank 0  1  2  3          along a row: the pipeline-parallel (PP) group
    replica 1     rank 4  5  6  7          down a column: the data-parallel (DP) group

Ranks are numbered tensor parallel first, then pipeline, then replicas. With tp_size 2 and two
stages, replica 0 has the PP groups 0 2 and 1 3, replica 1 has 4 6 and 5 7, and the TP groups are 0
1, 2 3, 4 5 and 6 7.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelRanks:
    """The coordinates of `rank`, and the groups of ranks that it belongs to."""

    rank: int = 0
    pp_size: int = 1
    dp_size: int = 1
    tp_size: int = 1

    @property
    def pp_rank(self) -> int:
        """The rank in the schedule."""
        return self.rank // self.tp_size % self.pp_size

    @property
    def tp_rank(self) -> int:
        """Which shard of its stages is here. Rank 0 reports what all ranks of the group know."""
        return self.rank % self.tp_size

    @property
    def dp_rank(self) -> int:
        """The replica."""
        return self.replica_of(self.rank)

    def replica_of(self, rank: int) -> int:
        """That of any rank of the run."""
        return rank // self._replica_size

    @property
    def tp_group(self) -> range:
        """The ranks that share the stages of this one."""
        first = self.rank - self.tp_rank
        return range(first, first + self.tp_size)

    @property
    def pp_group(self) -> range:
        """The ranks of this replica that hold the same shard of their stages, by pp_rank."""
        return self.replica_ranks[self.tp_rank :: self.tp_size]

    @property
    def dp_group(self) -> range:
        """The ranks that hold the same shard of the same stages, by dp_rank."""
        size = self._replica_size
        return range(self.rank % size, size * self.dp_size, size)

    def holders(self, stages: Iterable[int]) -> list[int]:
        """By replica, the rank that holds the same shard as this one of the stage that is given for
        it; each rank has one stage.
        """
        ranks = []
        for replica, stage in enumerate(stages):
            first = replica * self._replica_size + stage * self.tp_size
            ranks.append(first + self.tp_rank)
        return ranks

    @property
    def replica_ranks(self) -> range:
        """All ranks of this replica."""
        first = self.dp_rank * self._replica_size
        return range(first, first + self._replica_size)

    @property
    def _replica_size(self) -> int:
        return self.pp_size * self.tp_size

    def peers(self, neighbours: Iterable[int], *, across_replicas: bool = True) -> set[int]:
        """The ranks that this one has a link to: those at the pp_ranks `neighbours` of its PP
        group, and its DP group.

        `across_replicas` is false where replicas do not talk to each other directly.
        """
        peers = {self.pp_group[pp_rank] for pp_rank in neighbours}
        if across_replicas:
            peers |= set(self.dp_group) - {self.rank}
        return peers
