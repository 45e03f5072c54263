"""Samples that come again, for links that go by them (`wire/deltas.py`): which ones a step has, and
where what came of them is kept.

    epoch 0    samples 4 0 2 | 1 3 5      numbered as they come    0 1 2 | 3 4 5
    epoch 1    samples 0 5 4 | 2 3 1                               1 5 0 | 2 4 3

    rank 0 ==hop 0==> rank 1 ==hop 1==> rank 2      a rank keeps what has crossed
    hop 0             hops 0, 1         hop 1       its links, on either side
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from dpipe.data.batch import Batch, micro_batches
from dpipe.data.feed import Feed
from dpipe.data.samples import Samples
from dpipe.errors import ConfigError
from dpipe.plan.deltas import is_by_sample
from dpipe.wire.deltas import SampleCache, cache_bytes
from dpipe.wire.format import HopFormats
from dpipe.wire.spec import TensorSpec

Place = tuple[int, int]  # a hop, and the place of a tensor in what crosses it


@dataclass(frozen=True)
class RecurringSequences:
    """Sequences of which each epoch has the same ones: each holds one sample, or they come in one
    order.
    """

    samples: Samples
    seed: int
    context: int

    @cached_property
    def count(self) -> int:
        """In an epoch."""
        return self.samples.sequences_in(1, self.seed, self.context)

    def of(self, number: int) -> int:
        """That of training sequence `number`, counted through all epochs."""
        return self._numbers[self._first_sample(number)]

    @cached_property
    def _numbers(self) -> dict[int, int]:
        return {self._first_sample(number): number for number in range(self.count)}

    def _first_sample(self, number: int) -> int:
        return int(self.samples.sequence(self.seed, number, self.context)[0])


@dataclass(frozen=True)
class RecurringFeed:
    """`feed` with the sequences' numbers, also on ranks that read no data."""

    feed: Feed
    sequences: RecurringSequences
    batch_size: int
    num_microbatches: int
    replica: int = 0
    num_replicas: int = 1

    def training(self, step: int) -> Batch:
        first = step * self.batch_size
        numbers = torch.arange(first, first + self.batch_size)
        cut = micro_batches(numbers, self.replica, self.num_replicas, self.num_microbatches)
        samples = []
        for part in cut:
            samples.append([self.sequences.of(number) for number in part.tolist()])
        return replace(self.feed.training(step), samples=samples)

    def held_out(self, index: int) -> Batch:
        return self.feed.held_out(index)


@dataclass(frozen=True)
class DeltaLinks:
    """The links of a pipeline, and what crosses them forward."""

    formats: HopFormats
    rank_of_stage: Sequence[int]
    boundaries: Sequence[tuple[TensorSpec, ...]]  # [s]: what stage s gives to the next
    num_rows: int  # of a micro-batch
    num_sequences: int  # in an epoch

    def check_room(self, most_gb: float) -> None:
        """Raises `ConfigError` for more than `pipeline.delta_cache_gb` on a rank."""
        for rank in sorted(set(self.rank_of_stage)):
            rows = [row for _, row in self._kept(rank)]
            total = sum(cache_bytes(self.num_sequences, row) for row in rows)
            if total > most_gb * 1e9:
                raise ConfigError(
                    f'links with "+delta" keep {total / 1e9:.3g} GB of {self.num_sequences} '
                    f"sequences on rank {rank} of each pipeline, more than "
                    f"pipeline.delta_cache_gb {most_gb:g}: raise it if the disk has the room, "
                    'lower model.context, or leave "+delta" out'
                )

    def caches(self, rank: int, folder: Path) -> dict[Place, SampleCache]:
        """Those of a rank of the pipeline, empty. Raises as `SampleCache` does."""
        caches = {}
        for place, row in self._kept(rank):
            folder.mkdir(parents=True, exist_ok=True)
            caches[place] = SampleCache(self.num_sequences, row, folder)
        return caches

    def _kept(self, rank: int) -> Iterator[tuple[Place, tuple[int, ...]]]:
        """Where a cache is needed, and the shape of what it has of a sequence."""
        for hop, name in enumerate(self.formats.forward):
            ends = self.rank_of_stage[hop], self.rank_of_stage[hop + 1]
            crosses = ends[0] != ends[1]
            if not (is_by_sample(name) and crosses and rank in ends):
                continue
            for position, spec in enumerate(self.boundaries[hop]):
                by_row = spec.shape[:1] == (self.num_rows,)
                if spec.dtype.is_floating_point and by_row:
                    yield (hop, position), spec.shape[1:]
