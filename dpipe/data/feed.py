"""A step's batch: a function of (seed, step, replica), so that the first and the last rank of a
pipeline agree on it without talking.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dpipe.config.load import Config
from dpipe.config.run import TrainConfig
from dpipe.data.batch import Batch, micro_batches
from dpipe.data.bert_data import SentencePairs, SentenceTokenizer, Sequences
from dpipe.data.corpus import Corpus
from dpipe.data.masked import MaskedFeed, MaskedText
from dpipe.data.samples import IGNORED, Columns, Samples
from dpipe.data.stream import SampleStream

Text = Corpus | Samples | SampleStream | MaskedText  # what a run reads


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
        batch = self.corpus.held_out_batch(index, size, self.context)
        return self._cut(batch)

    def _cut(self, batch: tuple[torch.Tensor, torch.Tensor]) -> Batch:
        cut = self.replica, self.num_replicas, self.train.num_microbatches
        inputs, targets = (micro_batches(tensor, *cut) for tensor in batch)
        return Batch([(tensor,) for tensor in inputs], targets)


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
        seed = self.train.seed
        return self._cut(self.pairs.training(seed, step, numbers))

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
class SampleFeed:
    """Micro-batches of sequences of samples: tokens and their positions [B, T]; as targets the
    tokens behind them, and in one more column how many of the whole batch are learned.
    """

    samples: Samples | SampleStream
    train: TrainConfig
    context: int
    replica: int = 0
    num_replicas: int = 1

    def training(self, step: int) -> Batch:
        size = self.train.batch_size
        seed = self.train.seed
        rows = []
        for number in range(step * size, (step + 1) * size):
            rows.append(self.samples.training_row(seed, number, self.context))
        return self._cut(rows)

    def held_out(self, index: int) -> Batch:
        size = self.train.batch_size
        rows = []
        for number in range(index * size, (index + 1) * size):
            rows.append(self.samples.held_out_row(number, self.context))
        return self._cut(rows)

    def _cut(self, rows: Sequence[Columns]) -> Batch:
        # Of all replicas: the mean is over the learned tokens of the whole batch.
        by_row = zip(*rows, strict=True)
        columns = [np.stack(column) for column in by_row]
        tokens, positions, targets = map(torch.from_numpy, columns)
        learned = int((targets != IGNORED).sum())
        counts = torch.full((len(targets), 1), learned)
        targets = torch.cat([targets, counts], dim=1)
        cut = self.replica, self.num_replicas, self.train.num_microbatches
        parts = [micro_batches(tensor, *cut) for tensor in (tokens, positions, targets)]
        inputs = list(zip(parts[0], parts[1], strict=True))
        return Batch(inputs, parts[2])


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
    corpus: Text | None,
    replica: int = 0,
    num_replicas: int = 1,
) -> Feed:
    """What the configured model reads of `corpus`; nothing without one."""
    if corpus is None:
        return NoFeed(config.train.num_microbatches)
    context = config.model.context
    if isinstance(corpus, Samples | SampleStream):
        return SampleFeed(corpus, config.train, context, replica, num_replicas)
    if isinstance(corpus, MaskedText):
        return MaskedFeed(corpus, config.train, context, replica, num_replicas)
    if isinstance(corpus.tokenizer, SentenceTokenizer):
        pairs = SentencePairs(corpus, corpus.tokenizer, context)
        return PairFeed(pairs, config.train, replica, num_replicas)
    return TextFeed(corpus, config.train, context, replica, num_replicas)
