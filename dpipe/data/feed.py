"""A step's batch: a function of (seed, step, replica), so that the first and the last rank of a
pipeline agree on it without talking.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from dpipe.config.load import Config
from dpipe.config.run import TrainConfig
from dpipe.data.batch import Batch
from dpipe.data.bert_data import SentencePairs, SentenceTokenizer, Sequences
from dpipe.data.corpus import Corpus


class Feed(Protocol):
    """Batches of one replica."""

    def training(self, step: int) -> Batch: ...

    def held_out(self, index: int) -> Batch:
        """Batch `index` of those that every evaluation reads."""
        ...


@dataclass(frozen=True)
class TextFeed:
    """Micro-batches of token windows [B, T], and as targets the same windows one token on.

    A replica takes its share of the batch that one process would have, so the number of replicas
    changes no sequence.
    """

    corpus: Corpus
    train: TrainConfig
    context: int
    replica: int = 0
    num_replicas: int = 1

    def training(self, step: int) -> Batch:
        # Replica 0 for all: each cuts its share from the one batch.
        batch = self.corpus.batch(
            self.train.seed,
            step,
            0,
            self.train.batch_size,
            self.context,
        )
        return self._cut(batch)

    def held_out(self, index: int) -> Batch:
        size = self.train.batch_size
        return self._cut(self.corpus.held_out_batch(index, size, self.context))

    def _cut(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Batch:
        own = [tensor.chunk(self.num_replicas)[self.replica] for tensor in batch]
        inputs, targets = (tensor.chunk(self.train.num_microbatches) for tensor in own)
        return Batch([(tensor,) for tensor in inputs], list(targets))


@dataclass(frozen=True)
class PairFeed:
    """Micro-batches of what BERT reads. A replica makes only the sequences of its own share."""

    pairs: SentencePairs
    train: TrainConfig
    replica: int = 0
    num_replicas: int = 1

    def training(self, step: int) -> Batch:
        # Numbered from 0 in every step, which is part of the key itself.
        numbers = self._share(0)
        return self._cut(self.pairs.training(self.train.seed, step, numbers))

    def held_out(self, index: int) -> Batch:
        numbers = self._share(index)
        return self._cut(self.pairs.held_out(numbers))

    def _share(self, index: int) -> range:
        """This replica's sequences of batch `index`, counted through all batches."""
        size = self.train.batch_size // self.num_replicas
        start = index * self.train.batch_size + self.replica * size
        return range(start, start + size)

    def _cut(self, sequences: Sequences) -> Batch:
        inputs, targets = sequences
        count = self.train.num_microbatches
        columns = [tensor.chunk(count) for tensor in inputs]
        by_microbatch = list(zip(*columns, strict=True))
        return Batch(by_microbatch, list(targets.chunk(count)))


@dataclass(frozen=True)
class NoFeed:
    """For ranks without the first or last stage, and for replay: nothing to read."""

    num_microbatches: int

    def training(self, step: int) -> Batch:
        # An entry a micro-batch: a replay's first stage asks for its inputs too.
        nothing: Sequence[tuple[torch.Tensor, ...]] = [()] * self.num_microbatches
        return Batch(nothing)

    def held_out(self, index: int) -> Batch:
        return self.training(index)


def feed_of(
    config: Config,
    corpus: Corpus | None,
    replica: int = 0,
    num_replicas: int = 1,
) -> Feed:
    """What the configured model reads of `corpus`; nothing without one."""
    if corpus is None:
        return NoFeed(config.train.num_microbatches)
    if isinstance(corpus.tokenizer, SentenceTokenizer):
        pairs = SentencePairs(corpus, corpus.tokenizer, config.model.context)
        return PairFeed(pairs, config.train, replica, num_replicas)
    return TextFeed(corpus, config.train, config.model.context, replica, num_replicas)
