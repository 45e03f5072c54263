"""Rows to samples to sequences: chats, instructions, texts and tokens.

    rows ──template, tokenizer──> samples in CACHE/<digest>/      tokens · learned · ends
    samples ──shuffled, packed──> [ sample 7 | sample 2 | sample 31 | padding ]    context tokens

A sample is tokens and, for each, whether it is learned: of a chat the assistant's turns. Sequence n
of a run is a function of (seed, n): ranks agree on it without talking, and a resumed run goes on at
the very sample.
"""

import hashlib
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpipe.config.model import DataConfig
from dpipe.data.corpus import check_apart
from dpipe.data.rows import Row, RowFile, find_row_files, local_files, read_rows
from dpipe.errors import DataError
from dpipe.hub.extra import hub_function
from dpipe.tokenizer.tokenizer import Tokenizer

IGNORED = -100  # the target of a token that is not learned, as transformers has it
_FORMAT = b"dpipe-samples-4"
# A file each: two with a value a token, two with a value a sample.
_COLUMNS = {"tokens": np.int32, "learned": np.bool_, "ends": np.int64, "held_out": np.bool_}
_PART = 1 << 20  # tokens in memory at a time

Ints = NDArray[np.int64]
Arrays = dict[str, NDArray[Any]]
Turn = dict[str, str]  # role and content
Columns = tuple[Ints, NDArray[np.int32], Ints]
Key = tuple[int, int]
Sample = tuple[list[int], list[bool]]
Stored = tuple[NDArray[Any], NDArray[np.bool_]]  # tokens of a sample, and which are learned
Parts = tuple[Sequence[RowFile], Sequence[RowFile]]  # to train on, and held out


class ChatTokenizer(Tokenizer, Protocol):
    """A published model's (`hub/words.py`)."""

    @property
    def end(self) -> int | None: ...

    @property
    def has_template(self) -> bool: ...

    def chat(self, turns: Sequence[Turn], *, asks: bool = False) -> str: ...


@dataclass(frozen=True)
class Samples:
    """All samples of a run, one behind the other; the last `num_held_out` are held out."""

    tokens: NDArray[np.int32]  # [total]
    learned: NDArray[np.bool_]  # [total]
    ends: Ints  # [samples]
    num_held_out: int
    tokenizer: Tokenizer
    packing: bool
    shuffle: str | int = "all"  # as data.shuffle
    # by (seed, epoch), the sequences of an epoch
    _epochs: dict[Key, list[Ints]] = field(default_factory=dict)

    def training_row(self, seed: int, number: int, context: int) -> Columns:
        """Inputs, positions and targets of training sequence `number`."""
        return self.rows(self.sequence(seed, number, context), context)

    def held_out_row(self, number: int, context: int) -> Columns:
        return self.rows(self.held_out_sequence(number, context), context)

    def sequence(self, seed: int, number: int, context: int) -> Ints:
        """The samples of training sequence `number`, counted through all epochs."""
        epoch = 0
        while True:
            sequences = self._epoch(seed, epoch, context)
            if number < len(sequences):
                return sequences[number]
            number -= len(sequences)
            epoch += 1

    def sequences_in(self, epochs: float, seed: int, context: int) -> int:
        """How many sequences so many passes over the training samples are."""
        whole = math.floor(epochs)
        count = 0
        for epoch in range(whole):
            count += len(self._epoch(seed, epoch, context))
        if epochs > whole:
            last = self._epoch(seed, whole, context)
            count += round((epochs - whole) * len(last))
        return count

    def held_out_sequence(self, number: int, context: int) -> Ints:
        """As `sequence`, of the held-out samples in order, over and over."""
        sequences = self._epoch(0, -1, context)
        place = number % len(sequences)
        return sequences[place]

    def rows(self, samples: Ints, context: int) -> Columns:
        """Inputs, positions and targets [context] of one sequence."""
        parts = []
        for sample in samples:
            start, end = self._range(int(sample))
            parts.append((self.tokens[start:end], self.learned[start:end]))
        return columns_of(parts, context)

    def _range(self, sample: int) -> tuple[int, int]:
        start = 0
        if sample:
            start = int(self.ends[sample - 1])
        end = int(self.ends[sample])
        return start, end

    def _epoch(self, seed: int, epoch: int, context: int) -> list[Ints]:
        """The sequences of an epoch; -1 is what is held out."""
        key = (seed, epoch)
        if key not in self._epochs:
            order = self._order(seed, epoch)
            self._epochs[key] = self._packed(order, context)
        return self._epochs[key]

    def _order(self, seed: int, epoch: int) -> Ints:
        num_trained = len(self.ends) - self.num_held_out
        if epoch < 0:
            return np.arange(num_trained, len(self.ends))
        if self.shuffle == "none":
            return np.arange(num_trained)
        size = num_trained if self.shuffle == "all" else int(self.shuffle)
        blocks = [np.zeros(0, np.int64)]
        for block, start in enumerate(range(0, num_trained, max(1, size))):
            count = min(size, num_trained - start)
            blocks.append(start + shuffled(count, seed, epoch, block))
        return np.concatenate(blocks)

    def _packed(self, order: Ints, context: int) -> list[Ints]:
        """In that order, each sequence as many samples as fit."""
        if not self.packing:
            return [np.array([sample]) for sample in order]
        lengths = np.diff(self.ends, prepend=0) - 1  # the last token of a sample is only a target
        sequences = []
        first = 0
        used = 0
        for index, sample in enumerate(order):
            length = int(lengths[sample])
            after = used + length
            if after > context:
                sequences.append(order[first:index])
                first = index
                used = 0
            used += length
        sequences.append(order[first:])
        return sequences


def columns_of(samples: Iterable[Stored], context: int) -> Columns:
    """Inputs, positions and targets [context] of a sequence of these samples. Padding, which is at
    the end, sees itself alone and is not learned.
    """
    inputs = np.zeros(context, np.int64)
    positions = np.zeros(context, np.int32)
    targets = np.full(context, IGNORED)
    place = 0
    for tokens, learned in samples:
        length = len(tokens) - 1
        here = slice(place, place + length)
        inputs[here] = tokens[:-1]
        positions[here] = np.arange(length)
        targets[here] = np.where(learned[1:], tokens[1:], IGNORED)
        place = here.stop
    return inputs, positions, targets


def shuffled(count: int, seed: int, epoch: int, block: int) -> Ints:
    """The order of a block of `count` samples."""
    # Counter-based (Salmon et al. 2011), and the raw words: no version of numpy changes them.
    counter = [0, 0, block, epoch]
    philox = np.random.Philox(key=seed % 2**64, counter=counter)
    drawn = philox.random_raw(count)
    return np.argsort(drawn, kind="stable")


def prepare_samples(data: DataConfig, tokenizer: ChatTokenizer, context: int) -> Samples:
    """The samples of the configured files, from the cache or into it.

    Raises `DataError` naming file and line of a row that is broken, too long, or has nothing to
    learn, and for too few rows.
    """
    files = (training_files(data), held_out_files(data))
    check_rows_apart(*files)
    return samples_of_files(files, data, tokenizer, context)


def check_rows_apart(files: Sequence[RowFile], held_out: Sequence[RowFile]) -> None:
    """Raises `DataError` for a file that would be trained on and held out."""
    check_apart([Path(file.name) for file in files], [Path(file.name) for file in held_out])


def samples_of_files(
    files: Parts, data: DataConfig, tokenizer: ChatTokenizer, context: int
) -> Samples:
    """As `prepare_samples`, of these files."""
    digest = _digest(files, data, tokenizer, context)
    folder = Path(data.cache) / f"samples-{digest}"
    if not folder.is_dir():
        _store(_tokenised(files, data, tokenizer, context), folder)
    # Mapped from the files: ranks of one machine share their pages.
    columns = []
    for name, dtype in _COLUMNS.items():
        path = folder / name
        columns.append(mapped(path, dtype))
    tokens, learned, ends, held_out = columns
    total = 0
    if len(ends):
        total = int(ends[-1])
    if not (total == len(tokens) == len(learned) and len(ends) == len(held_out)):
        raise _damaged(folder, f"{total}, {len(tokens)} and {len(learned)} tokens")
    num_held_out = int(held_out.sum())
    if isinstance(data.held_out, float):
        num_held_out = _share(len(ends), data.held_out)
    return Samples(tokens, learned, ends, num_held_out, tokenizer, data.packing, data.shuffle)


def _share(num_samples: int, held_out: float) -> int:
    """One at least, where a share is wanted."""
    count = round(num_samples * held_out)
    if held_out and num_samples > 1:
        count = max(1, count)
    return count


def mapped(path: Path, dtype: Any) -> NDArray[Any]:
    """A column of the cache. Raises `DataError` for one that is damaged."""
    try:
        if path.stat().st_size == 0:  # no row at all, which nothing maps
            return np.zeros(0, dtype)
        return np.memmap(path, dtype, mode="r")
    except (OSError, ValueError) as error:
        raise _damaged(path.parent, error) from None


def _damaged(folder: Path, error: object) -> DataError:
    return DataError(f"the token cache {folder} is damaged ({error}): remove it to have it remade")


def check_samples(samples: Samples, *, need_held_out: bool) -> None:
    if len(samples.ends) <= samples.num_held_out:
        raise DataError("data.files hold no rows to train on; give more, or lower data.held_out")
    if need_held_out and not samples.num_held_out:
        raise no_rows_held_out()


def no_rows_held_out() -> DataError:
    return DataError("no rows are held out: set data.held_out, or unset train.eval_every")


def training_files(data: DataConfig) -> list[RowFile]:
    """What holds the rows; of a folder of datasets the files of its table."""
    if data.hub is not None:
        return local_files(hub_function("dataset:split_files")(data.hub))
    return find_row_files(data.files, "data.files")


def held_out_files(data: DataConfig) -> list[RowFile]:
    if isinstance(data.held_out, float):
        return []
    return find_row_files(data.held_out, "data.held_out")


def _digest(files: Parts, data: DataConfig, tokenizer: ChatTokenizer, context: int) -> str:
    trained, held_out = files
    choices = f"{data.format} {data.too_long} {context} {len(held_out)}"
    parts = [_FORMAT, tokenizer.fingerprint, choices.encode()]
    for file in (*trained, *held_out):
        # What lies elsewhere is read once, not twice.
        content = file.state_digest() if "://" in file.name else file.content_digest()
        parts += [file.suffix.encode(), content]
    digest = hashlib.sha256()
    for part in parts:
        # Of one length each: of parts that are just joined, a byte could change sides.
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()[:32]


def _tokenised(
    files: Parts, data: DataConfig, tokenizer: ChatTokenizer, context: int
) -> Iterator[Arrays]:
    """The columns of all samples, some rows at a time: together they may be larger than memory."""
    columns: dict[str, list[Any]] = {name: [] for name in _COLUMNS}
    tokens = columns["tokens"]
    before = 0  # tokens of earlier parts
    for is_held_out, place, row in _rows(files):
        for ids, mask in samples_of_row(row, place, data, tokenizer, context):
            tokens += ids
            columns["learned"] += mask
            columns["ends"].append(before + len(tokens))
            columns["held_out"].append(is_held_out)
        if len(tokens) >= _PART:
            yield _as_arrays(columns)
            before += len(tokens)
            for column in columns.values():
                column.clear()
    yield _as_arrays(columns)


def _rows(files: Parts) -> Iterator[tuple[bool, str, Row]]:
    """Whether it is held out, its place, and what is there."""
    for is_held_out, part in enumerate(files):
        for place, row in read_rows(part):
            yield bool(is_held_out), place, row


def _as_arrays(columns: dict[str, list[Any]]) -> Arrays:
    return {name: np.array(columns[name], dtype) for name, dtype in _COLUMNS.items()}


def samples_of_row(
    row: Row, place: str, data: DataConfig, tokenizer: ChatTokenizer, context: int
) -> Iterator[Sample]:
    """One, or several of a row that is split. Raises as `sample_of`."""
    sample = sample_of(row, place, data.format, tokenizer)
    return _fitted(sample, place, data.too_long, context)


def sample_of(row: Row, place: str, format: str, tokenizer: ChatTokenizer) -> Sample:
    """Raises `DataError` naming `place` for a row that `format` cannot have."""
    try:
        ids, mask = _READERS[format](row, tokenizer)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None
    if not any(mask[1:]):
        raise DataError(f"{place} has nothing to learn: no token behind the first is an answer's")
    return ids, mask


def _chat(row: Row, tokenizer: ChatTokenizer) -> Sample:
    return _pieces(_turns_of(row), tokenizer)


def _turns_of(row: Row) -> list[Turn]:
    """`messages` of role and content, or ShareGPT's `conversations` of from and value."""
    roles = {"human": "user", "gpt": "assistant"}
    names = ("role", "content") if "messages" in row else ("from", "value")
    turns = []
    found = row.get("messages", row.get("conversations"))
    for turn in found if isinstance(found, list) else [None]:
        values = turn if isinstance(turn, dict) else {}
        role = values.get(names[0])
        content = values.get(names[1])
        if not isinstance(role, str) or not isinstance(content, str):
            raise DataError(
                'a chat must have "messages", a list of {"role": ..., "content": ...} with texts'
            )
        turns.append({"role": roles.get(role, role), "content": content})
    if not any(turn["role"] == "assistant" for turn in turns):
        raise DataError("the chat has no turn of the assistant, and only these are learned")
    return turns


def _pieces(turns: list[Turn], tokenizer: ChatTokenizer) -> Sample:
    """What is learned is the difference between the chat with an answer and the chat that asks."""
    ids: list[int] = []
    mask: list[bool] = []
    written = ""
    for number, turn in enumerate(turns):
        if turn["role"] != "assistant":
            continue
        asking = tokenizer.chat(turns[:number], asks=True)
        answered = tokenizer.chat(turns[: number + 1])
        grows = asking.startswith(written)
        if not (grows and answered.startswith(asking)):
            raise DataError(
                "the model's chat template changes earlier turns when a later one is added, so "
                'that what is learned cannot be told apart; take data.format = "instruction"'
            )
        question = tokenizer.encode(asking[len(written) :])
        answer = tokenizer.encode(answered[len(asking) :])
        ids += question + answer
        mask += [False] * len(question)
        mask += [True] * len(answer)
        written = answered
    return ids, mask


def _instruction(row: Row, tokenizer: ChatTokenizer) -> Sample:
    """Alpaca's keys; as a chat if the tokenizer has a template, else in Alpaca's own words."""
    instruction = row.get("instruction")
    answer = row.get("output")
    more = row.get("input") or ""
    texts = (instruction, answer, more)
    if not all(isinstance(text, str) for text in texts):
        raise DataError('an instruction must have the texts "instruction" and "output"')
    question = f"{instruction}\n\n{more}" if more else str(instruction)
    if tokenizer.has_template:
        asks = {"role": "user", "content": question}
        answers = {"role": "assistant", "content": str(answer)}
        return _pieces([asks, answers], tokenizer)
    asking = f"### Instruction:\n{question}\n\n### Response:\n"
    asked = list(tokenizer.start)
    asked += tokenizer.encode(asking)
    answered = tokenizer.encode(str(answer))
    if tokenizer.end is not None:
        answered.append(tokenizer.end)
    mask = [False] * len(asked)
    mask += [True] * len(answered)
    return asked + answered, mask


def _completion(row: Row, tokenizer: ChatTokenizer) -> Sample:
    """Every token of a text, and that it ends."""
    text = row.get("text")
    if not isinstance(text, str):
        raise DataError('a completion must have a "text"')
    ids = list(tokenizer.start)
    ids += tokenizer.encode(text)
    if tokenizer.end is not None:
        ids.append(tokenizer.end)
    mask = [True] * len(ids)
    return ids, mask


def _tokens(row: Row, tokenizer: ChatTokenizer) -> Sample:
    ids = row.get("input_ids")
    labels = row.get("labels", ids)
    below = tokenizer.vocab_size
    if not (_are_ids(ids, below) and isinstance(labels, list)):
        raise DataError(f'tokens must be in "input_ids", a list of numbers below {below}')
    assert isinstance(ids, list)
    if len(labels) != len(ids):
        raise DataError(f"{len(labels)} labels do not fit {len(ids)} input_ids")
    learned = [label != IGNORED for label in labels]
    return ids, learned


def _are_ids(ids: object, below: int) -> bool:
    if not isinstance(ids, list):
        return False
    # `type`, not isinstance: True is an int too.
    return all(type(each) is int and 0 <= each < below for each in ids)


_READERS: dict[str, Callable[[Row, ChatTokenizer], Sample]] = {
    "chat": _chat,
    "instruction": _instruction,
    "completion": _completion,
    "tokens": _tokens,
}


def _fitted(sample: Sample, place: str, too_long: str, context: int) -> Iterator[Sample]:
    """Of a sample that is too long its beginning, or several; raises `DataError` to refuse it."""
    ids, mask = sample
    most = context + 1  # the last token is only a target
    if len(ids) <= most:
        yield sample
        return
    if too_long == "refuse":
        raise DataError(
            f"{place} has {len(ids)} tokens, and model.context {context} takes {most}: raise it, "
            'or set data.too_long to "truncate" or "split"'
        )
    # Each begins with the last token of the one before, which was only a target there.
    starts = range(0, len(ids) - 1, context)
    if too_long == "truncate":
        starts = starts[:1]
    for start in starts:
        stop = start + most
        part = mask[start:stop]
        # A part of the question alone teaches nothing.
        if any(part[1:]):
            yield ids[start:stop], part


def _store(parts: Iterator[Arrays], folder: Path) -> None:
    """Under a temporary name first: a folder that exists is complete, whoever wrote it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".tmp-", dir=folder.parent))
        for arrays in parts:
            for name, array in arrays.items():
                with open(unfinished / name, "ab") as file:
                    array.tofile(file)
        with suppress(OSError):  # another process was first, with the same arrays
            os.rename(unfinished, folder)
        shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        raise DataError(
            f"the token cache {folder.parent} cannot be written: {error}; set data.cache"
        ) from None
