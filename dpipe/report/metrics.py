"""Where the numbers of a run go: `metrics.jsonl` and TensorBoard, both on rank 0."""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from heapq import merge
from pathlib import Path
from typing import Any, BinaryIO

from dpipe.errors import CheckpointError
from dpipe.store.run_folder import needing_room
from dpipe.store.storage import parsed_json, regular_bytes

LOG = logging.getLogger("dpipe")
Show = Callable[[Mapping[str, Any]], None]


class Metrics:
    """Appends rows to `FOLDER/metrics.jsonl` and, if asked, to a TensorBoard log in
    `FOLDER/tensorboard`.

    A resumed run drops the rows of `first_step` and later: it trains those steps again.
    """

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool, show: Show) -> None:
        self._path = folder / "metrics.jsonl"
        self._show = show
        with needing_room(self._path):
            keep_rows_before(self._path, first_step)
            self._file = self._path.open("a", encoding="utf-8")
        self._board = _Board(folder / "tensorboard", first_step) if tensorboard else None

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row, `{"step": ..., name: value, ...}`. Numbers, also those one level down,
        become TensorBoard scalars.

        Raises `RunError` if the disk has no room for it.
        """
        with needing_room(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()  # others read it while the run goes on
        if self._board is not None:
            self._board.add(row["step"], scalars(row))
        self._show(row)

    def close(self) -> None:
        # A row that found no room is still in the buffer; `write` has already raised for it.
        with suppress(OSError):
            self._file.close()
        if self._board is not None:
            self._board.close()


class _Board:
    """A TensorBoard log. It repeats what the rows hold, so if it cannot be written the run goes on
    without it.

    TensorBoard's own writer would fail in a thread of its own, a step later, with a traceback. Its
    modules are imported when used: they take a while.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._path = folder / name
        self._file: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        except OSError as error:
            self._give_up(error)
        self._write(Event(file_version="brain.Event:2"))
        # TensorBoard hides what an earlier run logged of this step and later ones.
        self._write(Event(step=first_step, session_log=SessionLog(status=SessionLog.START)))

    def add(self, step: int, scalars: Sequence[tuple[str, float]]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars]
        self._write(Event(step=step, summary=Summary(value=values)))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, event: Any) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        if self._file is None:
            return
        event.wall_time = time.time()
        try:
            RecordWriter(self._file).write(event.SerializeToString())
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        file = self._file
        self._file = None
        if file is not None:
            with suppress(OSError):
                file.close()
        LOG.warning("cannot write %s: %s; the run continues without it", self._path, error)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, in order. Raises `CheckpointError` naming a line that is none."""
    path = folder / "metrics.jsonl"
    rows = []
    for number, line in enumerate(regular_bytes(path, folder).splitlines(), 1):
        row = parsed_json(line, f"{path} line {number}")
        if not _is_row(row):
            raise CheckpointError(f"{path} line {number} is damaged: it is not a row of metrics")
        rows.append(row)
    return rows


def keep_rows_before(path: Path, step: int) -> None:
    """Rewrite the file without the rows of `step` and later, and without lines that are no row."""
    if path.exists():
        _rewrite(path, lambda lines: (line for line in lines if _step_of(line) < step))


def insert_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Rewrite the file with more rows, each behind those of its step. Raises `RunError` if the disk
    has no room for it.
    """
    ordered = sorted(rows, key=lambda row: row["step"])
    inserted = [json.dumps(row).encode() for row in ordered]
    with needing_room(path):
        _rewrite(path, lambda lines: merge(lines, inserted, key=_step_of))


def _rewrite(path: Path, change: Callable[[Iterator[bytes]], Iterable[bytes]]) -> None:
    """A line at a time: a long run's coordinator does so at each epoch, and what the whole file
    takes would stay with its allocator.
    """
    # Synced, then renamed into place: a crash leaves the old rows or the new ones. A rename can
    # reach the disk before the content of a file that is not synced, which is then empty.
    rewritten = path.with_suffix(".tmp")
    with path.open("rb") as old, rewritten.open("wb") as file:
        file.writelines(line.rstrip(b"\r\n") + b"\n" for line in change(iter(old)))
        file.flush()
        os.fsync(file.fileno())
    os.replace(rewritten, path)


def _step_of(line: bytes) -> float:
    """Infinity for a line that is no row, such as one cut short by a crash."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return math.inf
    return row["step"] if _is_row(row) else math.inf


def _is_row(value: object) -> bool:
    return isinstance(value, dict) and type(value.get("step")) is int


def scalars(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    """All numbers of a row by their tag: first those of the row itself, then those of dicts in it,
    as `name/key`.
    """
    values = [(name, value) for name, value in row.items() if name != "step"]
    for name, value in row.items():
        if isinstance(value, dict):
            values += [(f"{name}/{key}", inner) for key, inner in value.items()]
    return [(tag, value) for tag, value in values if isinstance(value, int | float)]
