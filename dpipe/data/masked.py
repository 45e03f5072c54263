"""What a published encoder reads: windows of a text, some of their words masked out.

    sequence  [CLS] window of the text [SEP]        as many masked words in each
    targets   each word that was masked out, IGNORED for others

A sequence is a function of (seed, step, its number in the batch), as BERT's own (`bert_data.py`).
"""

from dataclasses import dataclass

import numpy as np
import torch

from dpipe.config.run import TrainConfig
from dpipe.data.batch import Batch, micro_batches
from dpipe.data.bert_data import Draws, mask_out
from dpipe.data.corpus import Corpus
from dpipe.errors import DataError
from dpipe.stage.bert import IGNORED
from dpipe.tokenizer.tokenizer import Tokenizer

_FRAME = 2  # special tokens of a sequence


@dataclass(frozen=True)
class MaskedText:
    """A text for a model that has learned `frame`: what is before and behind a sequence, and what
    stands in place of a masked word.
    """

    corpus: Corpus
    frame: tuple[int, int, int]

    @property
    def tokenizer(self) -> Tokenizer:
        return self.corpus.tokenizer

    @property
    def num_train_tokens(self) -> int:
        return self.corpus.num_train_tokens

    def check(self, context: int, *, need_held_out: bool) -> None:
        """Raises `DataError` for a part that is too short."""
        if context <= _FRAME:
            raise DataError(
                f"model.context {context} has no room for a word between {_FRAME} special tokens; "
                f"raise it to {_FRAME + 1}"
            )
        self.corpus.check_length(context - _FRAME, need_held_out=need_held_out)


@dataclass(frozen=True)
class MaskedFeed:
    """Micro-batches of tokens [B, T], and as targets the words that were masked out."""

    text: MaskedText
    train: TrainConfig
    context: int
    replica: int = 0
    num_replicas: int = 1

    def training(self, step: int) -> Batch:
        seed = self.train.seed
        size = self.train.batch_size
        windows, _ = self.text.corpus.batch(seed, step, 0, size, self.context - _FRAME)
        # The last word keeps these draws apart from those of pairs and of held-out text.
        draws = [Draws(seed, number, step, 2) for number in range(size)]
        return self._masked(windows, draws)

    def held_out(self, index: int) -> Batch:
        size = self.train.batch_size
        windows, _ = self.text.corpus.held_out_batch(index, size, self.context - _FRAME)
        numbers = range(index * size, (index + 1) * size)
        draws = [Draws(0, number, 0, 3) for number in numbers]
        return self._masked(windows, draws)

    def _masked(self, windows: torch.Tensor, draws: list[Draws]) -> Batch:
        first, last, mask = self.text.frame
        tokens = np.pad(windows.numpy(), ((0, 0), (1, 1)), constant_values=last)
        tokens[:, 0] = first
        targets = np.full_like(tokens, IGNORED)
        words = np.arange(1, self.context - 1)
        vocab_size = self.text.tokenizer.vocab_size
        for row, drawn in enumerate(draws):
            mask_out(tokens[row], targets[row], words, self.context, drawn, mask, vocab_size)
        cut = self.replica, self.num_replicas, self.train.num_microbatches
        inputs = micro_batches(torch.from_numpy(tokens), *cut)
        return Batch(
            [(tensor,) for tensor in inputs], micro_batches(torch.from_numpy(targets), *cut)
        )
