"""Where the numbers of a run go: `metrics.jsonl` and TensorBoard on rank 0, a line in the log of
every rank.
"""

import json
import logging
import math
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from dpipe.store.run_folder import needing_room

LOG = logging.getLogger("dpipe")
Show = Callable[[Mapping[str, Any]], None]


class Metrics:
    """Appends rows to `FOLDER/metrics.jsonl` and, if asked, to a TensorBoard log in
    `FOLDER/tensorboard`.

    A resumed run drops the rows after the step that it resumes from: they are trained again.
    """

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool, show: Show) -> None:
        self._path = folder / "metrics.jsonl"
        self._show = show
        with needing_room(self._path):
            keep_rows_before(self._path, first_step)
            self._file = self._path.open("a", encoding="utf-8")
        self._board = _Board(folder / "tensorboard", first_step) if tensorboard else None

    def write(self, row: Mapping[str, Any]) -> None:
        """One row: {"step": ..., name: value, ...}. Numbers, also one level down, become
        TensorBoard scalars.

        Raises `RunError` where there is no room for it.
        """
        with needing_room(self._path):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()
        if self._board is not None:
            self._board.add(row["step"], _scalars(row))
        self._show(row)

    def close(self) -> None:
        with suppress(OSError):  # of a row that there was no room for, as `write` has said
            self._file.close()
        if self._board is not None:
            self._board.close()


class _Board:
    """A TensorBoard log. It only shows what the rows have: where it cannot be written, the run goes
    on without it.

    TensorBoard's own writer would fail in a thread of its own, with a traceback and a step later.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import (  # imported when used: it takes its time
            Event,
            SessionLog,
        )

        self._path = (
            folder / f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        )
        self._file: BinaryIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("wb")
        except OSError as error:
            self._give_up(error)
        self._write(Event(file_version="brain.Event:2"))
        # What an earlier try logged of this step and later ones is not shown any more.
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
        with suppress(OSError):
            if file is not None:
                file.close()
        LOG.warning("cannot write %s: %s; the run goes on without it", self._path, error)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, in order."""
    return [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def keep_rows_before(path: Path, step: int) -> None:
    """Rewrite the file without the rows of `step` and later, and without lines that are none: one
    was cut short.
    """
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines() if _step_of(line) < step]
    whole = path.with_suffix(".tmp")
    whole.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(whole, path)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (
        ValueError,
        LookupError,
        TypeError,
    ):  # torn by a crash in the middle of a write, or no row of a run
        return math.inf


def _scalars(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    nested = [
        (f"{k}/{inner}", v)
        for k, value in row.items()
        if isinstance(value, dict)
        for inner, v in value.items()
    ]
    flat = [(k, v) for k, v in row.items() if k != "step"]
    return [(k, v) for k, v in (*flat, *nested) if isinstance(v, int | float)]
