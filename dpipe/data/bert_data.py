"""What BERT reads: two passages of a text, some of their words masked out (Devlin et al. 2019).

    text      one sentence a line, a blank line between documents
    tokens    s1 [SEP] s2 [SEP] s3 [SEP] [SEP] s4 [SEP] ...        as the cache keeps them: a document ends in two
    sequence  [CLS] A: sentences in a row [SEP] B: those that follow, or some from elsewhere [SEP] padding
    types      0    0 ...                  0    1 ...                                         1
    targets    0: B follows A, 1: it does not; then each word that was masked out, IGNORED for all others

A sequence is a function of (seed, step, its number in the batch): how many replicas share a batch
changes none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import dropwhile, pairwise, takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpipe.data.corpus import Corpus, Part
from dpipe.data.tokenizer import FileTokenizer
from dpipe.errors import DataError
from dpipe.stage.bert import IGNORED

Sequences = tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

_MARKS = ("[CLS]", "[SEP]", "[MASK]")
_FRAME = 3  # marks of a sequence: one in front, one behind each passage
_MASKED_SHARE = 0.15
_REACH = 4  # times the context that is read to find sentences
_CALLED = {"train": "training", "held_out": "held-out"}
_PLACES = 64  # of a text that are looked at before it is taken


class SentenceTokenizer(FileTokenizer):
    """A `tokenizer.json` with BERT's marks, by lines: a sentence's pieces and [SEP], for a blank
    line [SEP] alone.

    Raises `DataError` naming the marks that are missing.
    """

    def __init__(self, path: str) -> None:
        if path == "bytes":
            raise DataError(
                f'data.tokenizer "bytes" has no {" ".join(_MARKS)}, which BERT needs; '
                f"{_HOW_TO_TOKENISE}"
            )
        super().__init__(path)
        ids = {mark: self._pieces.token_to_id(mark) for mark in _MARKS}
        if missing := [mark for mark, number in ids.items() if number is None]:
            raise DataError(
                f"data.tokenizer {path} has no {' '.join(missing)}, which BERT needs; "
                f"{_HOW_TO_TOKENISE}"
            )
        self.first, self.separator, self.masked = (
            number for number in ids.values() if number is not None
        )
        self.fingerprint = b"sentences" + self.fingerprint
        self._pieces.encode_special_tokens = True  # "[SEP]" in a text is text

    def encode(self, text: str) -> list[int]:
        lines = self._pieces.encode_batch(
            text.removesuffix("\n").split("\n"), add_special_tokens=False
        )
        ids: list[int] = []
        for line in lines:
            if (
                line.ids or ids[-2:] != [self.separator] * 2
            ):  # of several blank lines the first says it all
                ids += [*line.ids, self.separator]
        return ids


_HOW_TO_TOKENISE = "give a WordPiece tokenizer.json, such as scripts/bert_text.py trains"


class _Draws:
    """The random numbers of one sequence, straight from Philox (Salmon et al. 2011): no numpy
    changes them.
    """

    def __init__(self, key: int, *counter: int) -> None:
        self._philox = np.random.Philox(key=key % 2**64, counter=[0, *counter])

    def below(self, limit: int) -> int:
        return int(self._philox.random_raw()) % limit

    def all_below(self, limit: int, count: int) -> NDArray[np.int64]:
        return (self._philox.random_raw(count) % np.uint64(limit)).astype(np.int64)

    def some_of(self, places: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        return places[np.argsort(self._philox.random_raw(len(places)), kind="stable")[:count]]


@dataclass(frozen=True)
class SentencePairs:
    """Sequences of `context` tokens of a text that `tokenizer` has cut into sentences."""

    corpus: Corpus
    tokenizer: SentenceTokenizer
    context: int

    def training(self, seed: int, step: int, numbers: Iterable[int]) -> Sequences:
        """Tokens and types [B, T], int64, lengths [B], int32; targets [B, T], int64. `numbers`
        count in the batch.
        """
        return self._stacked(
            self._sequence("train", _Draws(seed, number, step, 0)) for number in numbers
        )

    def held_out(self, numbers: Iterable[int]) -> Sequences:
        """As `training`, from the held-out text, without a seed: every run is judged by the
        same.
        """
        return self._stacked(
            self._sequence("held_out", _Draws(0, number, 0, 1)) for number in numbers
        )

    def check(self, *, need_held_out: bool) -> None:
        """Raises `DataError` for a part that is too short, and for a text where hardly a sentence
        follows another.
        """
        if self.context < _FRAME + 2:
            raise DataError(
                f"model.context {self.context} holds no two passages and their {_FRAME} marks; "
                f"raise it to {_FRAME + 2}"
            )
        parts: list[Part] = ["train", "held_out"] if need_held_out else ["train"]
        for part in parts:
            self._check_part(part)

    def _check_part(self, part: Part) -> None:
        start, stop = self._range(part)
        if stop - start <= (reach := _REACH * self.context):
            raise DataError(
                f"the {_CALLED[part]} text has {stop - start} tokens, BERT with model.context "
                f"{self.context} needs "
                f"more than {reach}; give more text, lower model.context, or change data.held_out"
            )
        places = np.linspace(start, stop - reach, _PLACES).astype(np.int64)
        pairs = sum(len(self._sentences(int(place))) > 1 for place in places)
        if 10 * pairs < _PLACES:
            raise DataError(
                f"of {_PLACES} places in the {_CALLED[part]} text only {pairs} have a sentence "
                "that follows another, "
                "which BERT learns from; write one sentence a line and a blank line between "
                "documents, as "
                "scripts/bert_text.py does"
            )

    def _range(self, part: Part) -> tuple[int, int]:
        ends = 0, self.corpus.num_train_tokens, self.corpus.facts.num_tokens
        return ends[:2] if part == "train" else ends[1:]

    def _sentences(self, place: int) -> list[NDArray[Any]]:
        """Those that begin behind `place`, as far as their document goes; what is there, of a
        sentence without end.
        """
        window = self.corpus.tokens[place : place + _REACH * self.context]
        ends = np.flatnonzero(window == self.tokenizer.separator)
        between = (window[before + 1 : end] for before, end in pairwise(ends))
        document = list(takewhile(len, dropwhile(lambda sentence: not len(sentence), between)))
        return document or [window[window != self.tokenizer.separator]]

    def _somewhere(self, part: Part, draws: _Draws) -> list[NDArray[Any]]:
        start, stop = self._range(part)
        return self._sentences(start + draws.below(stop - start - _REACH * self.context))

    def _passages(self, part: Part, draws: _Draws) -> tuple[NDArray[Any], NDArray[Any], bool]:
        """A, B and whether B is from elsewhere; together mostly as long as fits, one in ten is
        shorter.
        """
        most = self.context - _FRAME
        length = most if draws.below(10) else 2 + draws.below(most - 1)
        sentences = self._somewhere(part, draws)
        enough = (
            int(np.searchsorted(np.cumsum([len(sentence) for sentence in sentences]), length)) + 1
        )
        chosen = sentences[:enough]
        cut = 1 + draws.below(max(1, len(chosen) - 1))
        elsewhere = len(chosen) == 1 or draws.below(2) == 1
        a = np.concatenate(chosen[:cut])
        b = np.concatenate(self._somewhere(part, draws) if elsewhere else chosen[cut:])
        # The words next to the seam stay: whether B follows A shows there.
        b = b[: max(length - len(a), length // 2)]
        return a[-(length - len(b)) :], b, elsewhere

    def _sequence(self, part: Part, draws: _Draws) -> tuple[NDArray[np.int64], ...]:
        """Tokens, types and targets [T], and the length."""
        a, b, elsewhere = self._passages(part, draws)
        marks = self.tokenizer
        tokens, types = np.zeros(
            (2, self.context), np.int64
        )  # any padding will do: nobody looks at it
        targets = np.full(self.context, IGNORED)
        seam = len(a) + 2
        length = len(a) + len(b) + _FRAME
        tokens[:length] = np.concatenate(
            [[marks.first], a, [marks.separator], b, [marks.separator]]
        )
        types[seam:length] = 1
        targets[0] = elsewhere
        words = np.r_[1 : seam - 1, seam : length - 1]
        chosen = draws.some_of(words, max(1, round(_MASKED_SHARE * length)))
        targets[chosen] = tokens[chosen]
        # Of ten words that are to be found eight are masked, one is any other, and one stays as it
        # is.
        fate = draws.all_below(10, len(chosen))
        others = draws.all_below(marks.vocab_size, len(chosen))
        tokens[chosen] = np.select(
            [fate < 8, fate == 8], [np.full_like(chosen, marks.masked), others], tokens[chosen]
        )
        return tokens, types, targets, np.array(length)

    @staticmethod
    def _stacked(sequences: Iterable[tuple[NDArray[np.int64], ...]]) -> Sequences:
        tokens, types, targets, lengths = (
            torch.from_numpy(np.stack(each)) for each in zip(*sequences, strict=True)
        )
        return (tokens, types, lengths.to(torch.int32)), targets
