"""What a step is fed with: a function of (seed, step, replica), so that first and last rank agree without talking."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dpipe.config import Train
from dpipe.engine.data import Corpus
from dpipe.engine.executor import Batch


class Feed(Protocol):
    def training(self, step: int) -> Batch: ...
    def held_out(self, index: int) -> Batch: ...


@dataclass(frozen=True)
class TextFeed:
    """Micro-batches of token windows [B, T] and the tokens that follow them.

    A replica takes its share of the batch that one process would have: how many there are changes no sequence.
    """

    corpus: Corpus
    train: Train
    context: int
    replica: int = 0
    num_replicas: int = 1

    def training(self, step: int) -> Batch:
        return self._cut(self.corpus.batch(self.train.seed, step, 0, self.train.batch_size, self.context))

    def held_out(self, index: int) -> Batch:
        return self._cut(self.corpus.held_out_batch(index, self.train.batch_size, self.context))

    def _cut(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Batch:
        mine = (tensor.chunk(self.num_replicas)[self.replica] for tensor in batch)
        inputs, targets = (tensor.chunk(self.train.num_microbatches) for tensor in mine)
        return Batch([(tensor,) for tensor in inputs], list(targets))


@dataclass(frozen=True)
class NoFeed:
    """For ranks that host neither end of the model, and for replay: nothing to read."""

    num_microbatches: int

    def training(self, step: int) -> Batch:
        nothing: Sequence[tuple[torch.Tensor, ...]] = [()] * self.num_microbatches
        return Batch(nothing)

    def held_out(self, index: int) -> Batch:
        return self.training(index)
