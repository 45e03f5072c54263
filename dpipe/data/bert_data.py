"""What BERT reads: two passages of a text, some of their words masked out (Devlin et al. 2019).

    text      one sentence a line, a blank line between documents
    cache     s1 [SEP] s2 [SEP] s3 [SEP] [SEP] s4 [SEP] ...     two separators end a document
    sequence  [CLS] A [SEP] B [SEP] padding                     A: sentences in a row
    types      0    0  0    1  1                                B: the next, or from elsewhere
    targets   0 if B follows A, otherwise 1; then each word that was masked out, IGNORED for others

A sequence is a function of (seed, step, its number in the batch), so the number of replicas that
share a batch changes none.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dpipe.data.corpus import Corpus, Part
from dpipe.errors import DataError
from dpipe.stage.bert import IGNORED
from dpipe.tokenizer.process import TokenizerProcess
from dpipe.tokenizer.tokenizer import FileTokenizer

Ints = NDArray[np.int64]
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # tokens, types, lengths
Sequences = tuple[Inputs, torch.Tensor]  # and targets

_SPECIAL = ("[CLS]", "[SEP]", "[MASK]")
_FRAME = 3  # special tokens of a sequence: one in front, one after each passage
_MASKED_SHARE = 0.15  # as Devlin et al. have it
_REACH = 4  # contexts that are read to find sentences
_PART_NAMES = {"train": "training", "held_out": "held-out"}
_SAMPLES = 64  # places of a text that are looked at before it is accepted


class SentenceTokenizer(FileTokenizer):
    """A `tokenizer.json` with BERT's special tokens, applied line by line: a sentence's tokens and
    [SEP]; for a blank line [SEP] alone.

    Raises `DataError` naming the special tokens that are missing.
    """

    marks = _SPECIAL
    special_is_text = True  # "[SEP]" in a text is text

    def __init__(self, path: str) -> None:
        if path == "bytes":
            raise DataError(
                f'data.tokenizer "bytes" has no {" ".join(_SPECIAL)}, which BERT needs; '
                f"{_HOW_TO_TOKENISE}"
            )
        super().__init__(path)
        present: dict[str, int] = {}
        missing = []
        for token, number in self.mark_ids.items():
            if number is None:
                missing.append(token)
            else:
                present[token] = number
        if missing:
            raise DataError(
                f"data.tokenizer {path} has no {' '.join(missing)}, which BERT needs; "
                f"{_HOW_TO_TOKENISE}"
            )
        self.first = present["[CLS]"]
        self.separator = present["[SEP]"]
        self.masked = present["[MASK]"]
        # The same tokenizer.json gives other tokens of the same text to a GPT.
        self.fingerprint = b"sentences" + self.fingerprint

    def ids(self, process: TokenizerProcess, text: str) -> list[int]:
        ids: list[int] = []
        for line in process.encode(text.removesuffix("\n").split("\n")):
            # Of several blank lines the first already ends the document.
            document_has_ended = ids[-2:] == [self.separator] * 2
            if line or not document_has_ended:
                ids += [*line, self.separator]
        return ids


_HOW_TO_TOKENISE = "give a WordPiece tokenizer.json, such as scripts/bert_text.py trains"


class Draws:
    """The random numbers of one sequence, straight from Philox (Salmon et al. 2011): no version of
    numpy changes them.
    """

    def __init__(self, key: int, *counter: int) -> None:
        # The lowest word is left at 0: Philox counts its own draws there.
        self._philox = np.random.Philox(key=key % 2**64, counter=[0, *counter])

    def below(self, limit: int) -> int:
        return int(self._philox.random_raw()) % limit

    def all_below(self, limit: int, count: int) -> Ints:
        raw = self._philox.random_raw(count)
        return (raw % np.uint64(limit)).astype(np.int64)

    def some_of(self, places: Ints, count: int) -> Ints:
        raw = self._philox.random_raw(len(places))
        # Stable, or equal numbers would be ordered as this numpy happens to sort.
        order = np.argsort(raw, kind="stable")
        return places[order[:count]]


def mask_out(
    tokens: Ints,
    targets: Ints,
    words: Ints,
    length: int,
    draws: Draws,
    mask: int,
    vocab_size: int,
) -> None:
    """Make some of the `words`, which are places in a sequence of `length`, targets, in place. What
    the model reads for them: for eight of ten the mask, for one any word, for one the word itself.
    """
    num_masked = max(1, round(_MASKED_SHARE * length))
    masked = draws.some_of(words, num_masked)
    targets[masked] = tokens[masked]
    fate = draws.all_below(10, len(masked))
    others = draws.all_below(vocab_size, len(masked))
    masks = np.full_like(masked, mask)
    tokens[masked] = np.select([fate < 8, fate == 8], [masks, others], tokens[masked])


@dataclass(frozen=True)
class SentencePairs:
    """Sequences of `context` tokens of a text that `tokenizer` has cut into sentences."""

    corpus: Corpus
    tokenizer: SentenceTokenizer
    context: int

    def training(
        self,
        seed: int,
        step: int,
        numbers: Iterable[int],
    ) -> Sequences:
        """Tokens and types [B, T], int64, lengths [B], int32; targets [B, T], int64. `numbers` are
        the sequences' numbers in the batch.
        """
        draws = (Draws(seed, number, step, 0) for number in numbers)
        return self._stacked(self._sequence("train", each) for each in draws)

    def held_out(self, numbers: Iterable[int]) -> Sequences:
        """As `training`, from the held-out text, without a seed: every run is judged by the same
        sequences.
        """
        # The last word keeps these counters apart from those of training with seed 0.
        draws = (Draws(0, number, 0, 1) for number in numbers)
        return self._stacked(self._sequence("held_out", each) for each in draws)

    def check(self, *, need_held_out: bool) -> None:
        """Raises `DataError` for a part that is too short, and for a text in which hardly any
        sentence follows another.
        """
        if self.context < _FRAME + 2:
            raise DataError(
                f"model.context {self.context} has no room for two passages and {_FRAME} special "
                f"tokens; raise it to {_FRAME + 2}"
            )
        parts: list[Part] = ["train", "held_out"] if need_held_out else ["train"]
        for part in parts:
            self._check_part(part)

    def _check_part(self, part: Part) -> None:
        start, stop = self._range(part)
        reach = _REACH * self.context
        if stop - start <= reach:
            raise DataError(
                f"the {_PART_NAMES[part]} text has {stop - start} tokens, BERT with model.context "
                f"{self.context} needs more than {reach}; give more text, lower model.context, or "
                "change data.held_out"
            )
        places = np.linspace(start, stop - reach, _SAMPLES).astype(np.int64)
        pairs = 0
        for place in places:
            pairs += len(self._sentences(int(place))) > 1
        if 10 * pairs < _SAMPLES:
            raise DataError(
                f"of {_SAMPLES} places in the {_PART_NAMES[part]} text only {pairs} have a "
                "sentence that follows another, which BERT learns from; write one sentence a line "
                "and a blank line between documents, as scripts/bert_text.py does"
            )

    def _range(self, part: Part) -> tuple[int, int]:
        facts = self.corpus.facts
        if part == "train":
            return 0, facts.num_train_tokens
        return facts.num_train_tokens, facts.num_tokens

    def _sentences(self, place: int) -> list[NDArray[Any]]:
        """The sentences that begin after `place`, up to the end of their document; if none ends
        within reach, the tokens that are there.
        """
        window = self.corpus.tokens[place : place + _REACH * self.context]
        ends = np.flatnonzero(window == self.tokenizer.separator)
        document: list[NDArray[Any]] = []
        for before, end in pairwise(ends):
            sentence = window[before + 1 : end]
            if len(sentence):
                document.append(sentence)
            elif document:  # an empty sentence is the end of a document
                return document
        if document:
            return document
        return [window[window != self.tokenizer.separator]]

    def _somewhere(self, part: Part, draws: Draws) -> list[NDArray[Any]]:
        start, stop = self._range(part)
        reach = _REACH * self.context
        return self._sentences(start + draws.below(stop - start - reach))

    def _passages(
        self,
        part: Part,
        draws: Draws,
    ) -> tuple[NDArray[Any], NDArray[Any], bool]:
        """A, B, and whether B is from elsewhere. Together they mostly fill the context; one pair in
        ten is shorter.
        """
        most = self.context - _FRAME
        length = most
        if draws.below(10) == 0:
            length = 2 + draws.below(most - 1)
        sentences = self._somewhere(part, draws)
        ends = np.cumsum([len(sentence) for sentence in sentences])
        # As many as fill the length, the one that crosses it included.
        num_used = int(np.searchsorted(ends, length)) + 1
        used = sentences[:num_used]
        cut = 1 + draws.below(max(1, len(used) - 1))
        # A single sentence has no next one. Then nothing is drawn for the choice, nor must be: a
        # change in the order of draws makes other sequences of the same seed.
        elsewhere = len(used) == 1 or draws.below(2) == 1
        follows = self._somewhere(part, draws) if elsewhere else used[cut:]
        a = np.concatenate(used[:cut])
        b = np.concatenate(follows)
        # The words next to the seam stay: they show whether B follows A.
        b = b[: max(length - len(a), length // 2)]
        return a[-(length - len(b)) :], b, elsewhere

    def _sequence(self, part: Part, draws: Draws) -> tuple[Ints, ...]:
        """Tokens, types and targets [T], and the length."""
        a, b, elsewhere = self._passages(part, draws)
        first = [self.tokenizer.first]
        separator = [self.tokenizer.separator]
        seam = len(a) + 2
        length = len(a) + len(b) + _FRAME
        # Padding may be anything: nothing reads it.
        tokens = np.zeros(self.context, np.int64)
        tokens[:length] = np.concatenate([first, a, separator, b, separator])
        types = np.zeros(self.context, np.int64)
        types[seam:length] = 1
        targets = np.full(self.context, IGNORED)
        targets[0] = elsewhere
        words = np.r_[1 : seam - 1, seam : length - 1]
        tokenizer = self.tokenizer
        mask_out(tokens, targets, words, length, draws, tokenizer.masked, tokenizer.vocab_size)
        return tokens, types, targets, np.array(length)

    @staticmethod
    def _stacked(sequences: Iterable[tuple[Ints, ...]]) -> Sequences:
        columns = zip(*sequences, strict=True)
        tokens, types, targets, lengths = (torch.from_numpy(np.stack(each)) for each in columns)
        return (tokens, types, lengths.to(torch.int32)), targets
