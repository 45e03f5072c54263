"""Samples that are read while the run trains on them, from files that may be larger than this disk.

    files ──rows, in order──> samples ──buffer, shuffled──> [ sample 7 | sample 2 | padding ]
            └── in a thread ──┘ │                           a sequence begins here
                                └──────────────────────────> Mark, kept in CACHE/stream-<digest>

While one buffer is used the thread makes the next, and waits then: a step finds its samples ready.

Sequence n is what it would be if nothing had been streamed: it depends on seed and files alone.
To go on at sequence n a rank begins at the last mark before it; without marks, on a machine that
has not read so far, it reads from the beginning, and comes to the same sequence.
"""

import hashlib
import json
from collections.abc import Generator, Iterator, Sequence
from dataclasses import astuple, dataclass, field, fields, replace
from functools import cached_property
from itertools import islice
from pathlib import Path

import numpy as np

from dpipe.config.model import DataConfig
from dpipe.data.read_ahead import read_ahead
from dpipe.data.rows import RowFile, find_row_files, rows_of
from dpipe.data.samples import (
    ChatTokenizer,
    Columns,
    Samples,
    Stored,
    check_rows_apart,
    columns_of,
    held_out_files,
    no_rows_held_out,
    samples_of_files,
    samples_of_row,
    shuffled,
)
from dpipe.errors import DataError
from dpipe.hub.extra import hub_function

_FORMAT = b"dpipe-stream-1"
_BUFFER = 1000  # samples that are shuffled together where data.shuffle is "all"
_SEQUENCES_A_MARK = 256
_AHEAD = 64  # samples that are made before they are asked for, at least

Place = tuple[int, int, int]  # file, row of it, sample of that row
Sequences = Generator[tuple["Mark", list[Stored]], None, None]
PlacedSamples = Generator[tuple[Place, Stored], None, None]


@dataclass(frozen=True)
class Mark:
    """Where a sequence begins, and where the buffer begins that its first sample is in."""

    sequence: int = 0  # counted through all epochs
    epoch: int = 0
    block: int = 0  # of the epoch: how many buffers were full before
    skipped: int = 0  # samples of the buffer, shuffled, that are in earlier sequences
    file: int = 0
    row: int = 0
    part: int = 0

    @property
    def place(self) -> Place:
        return self.file, self.row, self.part


@dataclass
class SampleStream:
    """As `Samples`, without knowing how many there are."""

    files: Sequence[RowFile]
    held_out: Samples  # in files of their own
    data: DataConfig
    tokenizer: ChatTokenizer
    context: int
    seed: int
    _marks: list[Mark] = field(default_factory=list)
    _reading: Sequences | None = None
    _next: int = 0  # the number of the sequence that `_reading` gives next

    def __post_init__(self) -> None:
        self._marks = [Mark(), *self._marks_kept()]

    def training_row(self, seed: int, number: int, context: int) -> Columns:
        """As `Samples.training_row`. Raises `DataError` as a row does that is read for it."""
        assert (seed, context) == (self.seed, self.context)
        return columns_of(self._sequence(number), context)

    def held_out_row(self, number: int, context: int) -> Columns:
        return self.held_out.held_out_row(number, context)

    def check(self, *, need_held_out: bool) -> None:
        """Raises `DataError` where there is nothing to train on, or nothing held out."""
        if need_held_out and not self.held_out.num_held_out:
            raise no_rows_held_out()
        if next(self._placed((0, 0, 0)), None) is None:
            raise _no_rows()

    def close(self) -> None:
        """End the thread that reads, if there is one."""
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def _sequence(self, number: int) -> list[Stored]:
        mark = max(
            (mark for mark in self._marks if mark.sequence <= number),
            key=lambda mark: mark.sequence,
        )
        behind = number < self._next
        if self._reading is None or behind or self._next < mark.sequence:
            self.close()
            self._reading = self._sequences_from(mark)
            self._next = mark.sequence
        samples: list[Stored] = []
        while self._next <= number:
            begins, samples = next(self._reading)
            self._next += 1
            self._keep(begins)
        return samples

    def _sequences_from(self, mark: Mark) -> Sequences:
        """Sequences without end, epoch after epoch, each with where it begins."""
        number = mark.sequence
        while True:
            for begins, samples in self._packed(mark):
                yield replace(begins, sequence=number), samples
                number += 1
            if number == 0:
                raise _no_rows()
            mark = Mark(sequence=number, epoch=mark.epoch + 1)

    def _packed(self, mark: Mark) -> Sequences:
        """Of the rest of one epoch: in each sequence as many samples as fit."""
        begins = mark
        samples: list[Stored] = []
        used = 0
        for here, sample in self._shuffled(mark):
            length = len(sample[0]) - 1  # the last token of a sample is only a target
            is_full = not self.data.packing or used + length > self.context
            if samples and is_full:
                yield begins, samples
                samples = []
                used = 0
            if not samples:
                begins = here
            samples.append(sample)
            used += length
        if samples:
            yield begins, samples

    def _shuffled(self, mark: Mark) -> Iterator[tuple[Mark, Stored]]:
        """The samples of the rest of one epoch, in the order in which they are learned."""
        size = _BUFFER if self.data.shuffle == "all" else self.data.shuffle
        size = 1 if size == "none" else size
        # The thread knows nothing of this object, which may be dropped while it waits.
        placed = read_ahead(self._placed(mark.place), max(size, _AHEAD))
        block = mark.block
        skipped = mark.skipped
        while buffer := list(islice(placed, size)):
            file, row, part = buffer[0][0]
            order = shuffled(len(buffer), self.seed, mark.epoch, block)
            for index in range(skipped, len(buffer)):
                _, sample = buffer[order[index]]
                yield Mark(0, mark.epoch, block, index, file, row, part), sample
            skipped = 0
            block += 1

    def _placed(self, start: Place) -> PlacedSamples:
        return _placed_samples(self.files, self.data, self.tokenizer, self.context, start)

    @cached_property
    def _journal(self) -> Path:
        """For each of these files, read like this, one."""
        # Made once: elsewhere a file is asked for its state over the network.
        data = self.data
        choices = f"{data.format} {data.too_long} {self.context} {data.packing} {data.shuffle}"
        parts = [_FORMAT, self.tokenizer.fingerprint, f"{choices} {self.seed}".encode()]
        parts += [file.state_digest() for file in self.files]
        digest = hashlib.sha256()
        for part in parts:
            digest.update(hashlib.sha256(part).digest())
        return Path(data.cache) / f"stream-{digest.hexdigest()[:32]}"

    def _marks_kept(self) -> list[Mark]:
        """What earlier runs and other ranks have written."""
        try:
            return marks_in(self._journal.read_bytes())
        except OSError:
            return []

    def _keep(self, mark: Mark) -> None:
        last = max(kept.sequence for kept in self._marks)
        if mark.sequence < last + _SEQUENCES_A_MARK:
            return
        self._marks.append(mark)
        line = json.dumps(astuple(mark))
        try:
            self._journal.parent.mkdir(parents=True, exist_ok=True)
            with open(self._journal, "a") as file:  # of several ranks, who write the same
                file.write(f"{line}\n")
        except OSError as error:
            raise DataError(
                f"the token cache {self.data.cache} cannot be written: {error}; set data.cache"
            ) from None


def _placed_samples(
    files: Sequence[RowFile],
    data: DataConfig,
    tokenizer: ChatTokenizer,
    context: int,
    start: Place,
) -> PlacedSamples:
    """The samples of all files as they lie there, from `start` on."""
    first_file, first_row, _ = start
    for number in range(first_file, len(files)):
        first = first_row if number == first_file else 0
        rows = rows_of(files[number], first)
        for index, (place, row) in enumerate(rows, first):
            samples = samples_of_row(row, place, data, tokenizer, context)
            for part, (ids, learned) in enumerate(samples):
                here = (number, index, part)
                if here >= start:
                    yield here, (np.array(ids, np.int32), np.array(learned))


def _no_rows() -> DataError:
    return DataError("data.files hold no rows to train on: give more")


def marks_in(content: bytes) -> list[Mark]:
    """One a line. A line that is broken, or that a rank has not ended, is left out: a mark saves
    reading, and no more.
    """
    marks = []
    for line in content.splitlines():
        try:
            numbers = json.loads(line)
        except (RecursionError, ValueError):
            continue
        is_whole = isinstance(numbers, list) and len(numbers) == len(fields(Mark))
        if is_whole and all(type(number) is int and number >= 0 for number in numbers):
            marks.append(Mark(*numbers))
    return marks


def open_stream(
    data: DataConfig, tokenizer: ChatTokenizer, context: int, seed: int
) -> SampleStream:
    """Nothing of it is read yet but what is held out. Raises `DataError` for files that are not
    there, and for one that would be trained on and held out.
    """
    patterns = data.files
    if data.hub is not None:
        patterns = hub_function("dataset:split_urls")(data.hub)
    files = find_row_files(patterns, "data.files")
    apart = held_out_files(data)
    check_rows_apart(files, apart)
    held_out = samples_of_files(([], apart), data, tokenizer, context)
    return SampleStream(files, held_out, data, tokenizer, context, seed)
