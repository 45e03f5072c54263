"""Where the numbers of a run go: `metrics.jsonl` and TensorBoard on rank 0, a line in the log of every rank."""

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Show = Callable[[Mapping[str, Any]], None]


class Metrics:
    """Appends rows to `FOLDER/metrics.jsonl` and, if asked, to a TensorBoard log in `FOLDER/tensorboard`.

    A resumed run drops the rows after the step that it resumes from: they are trained again.
    """

    def __init__(self, folder: Path, *, first_step: int, tensorboard: bool, show: Show) -> None:
        self._path = folder / "metrics.jsonl"
        self._show = show
        keep_rows_before(self._path, first_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = _board(folder / "tensorboard", first_step) if tensorboard else None

    def write(self, row: Mapping[str, Any]) -> None:
        """One row: {"step": ..., name: value, ...}. Numbers, also one level down, become TensorBoard scalars."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        for name, value in _scalars(row):
            if self._board is not None:
                self._board.add_scalar(name, value, row["step"])
        self._show(row)

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()


def read_rows(folder: Path) -> list[dict[str, Any]]:
    """All rows of a run, in order."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def keep_rows_before(path: Path, step: int) -> None:
    """Rewrite the file without the rows of `step` and later, and without lines that are none: one was cut short."""
    if not path.exists():
        return
    kept = [line for line in path.read_bytes().splitlines() if _step_of(line) < step]
    whole = path.with_suffix(".tmp")
    whole.write_bytes(b"".join(line + b"\n" for line in kept))
    os.replace(whole, path)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, LookupError, TypeError):  # torn by a crash in the middle of a write, or no row of a run
        return math.inf


def _scalars(row: Mapping[str, Any]) -> list[tuple[str, float]]:
    nested = [(f"{k}/{inner}", v) for k, value in row.items() if isinstance(value, dict) for inner, v in value.items()]
    flat = [(k, v) for k, v in row.items() if k != "step"]
    return [(k, v) for k, v in (*flat, *nested) if isinstance(v, int | float)]


def _board(folder: Path, first_step: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter  # imported when used: it takes a second

    return SummaryWriter(str(folder), purge_step=first_step)
