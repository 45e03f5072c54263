"""`RunRows`: the rows of metrics.jsonl of a run whose rank 0 moves from machine to machine.

epoch 1, rank 0 on a     0 1 2 3 4 5         a row may be lost with a connection: its machine
epoch 2, rank 0 on b           3 4 5 6 7     remembers it, and sends it again when asked
"""

import json
import os
from bisect import insort
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dpipe.report.metrics import Metrics, keep_rows_before, read_rows

_MOST_KEPT = 5000  # rows in memory, for who watches from elsewhere
_MOST_TOLD, _MOST_TOLD_BYTES = 200, 1 << 20  # in one answer
Show = Callable[[Mapping[str, Any]], None]


class RunRows:
    """Written to FOLDER/metrics.jsonl in order of steps. Raises `RunError` where it cannot be."""

    def __init__(self, folder: Path, *, tensorboard: bool, show: Show) -> None:
        self._path = folder / "metrics.jsonl"
        self._folder = folder
        self._tensorboard = tensorboard
        self._show = show
        self._written: set[tuple[int, bool]] = set()  # by step, and whether it has a loss
        self._recent: list[tuple[int, str]] = []  # by step, as JSON
        self.newest: Mapping[str, Any] = {}  # of this process's, with a loss
        if self._path.exists():
            rows = read_rows(folder)
            self._written = {_key(row) for row in rows}
            self._recent = [(row["step"], json.dumps(row)) for row in rows[-_MOST_KEPT:]]
        self._metrics = self._open(self._next_step)

    @property
    def _next_step(self) -> int:
        return max((step + 1 for step, _ in self._written), default=0)

    @property
    def first_missing(self) -> int:
        """The first step without a row."""
        step = 0
        while (step, True) in self._written:
            step += 1
        return step

    def begin(self, resume_step: int) -> None:
        """An epoch begins, which makes `resume_step` and later steps again."""
        self.newest = {}
        self._metrics.close()
        if self._path.exists():
            keep_rows_before(self._path, resume_step)
        self._written = {key for key in self._written if key[0] < resume_step}
        self._recent = [each for each in self._recent if each[0] < resume_step]
        self._metrics = self._open(resume_step)

    def take(self, row: Mapping[str, Any]) -> None:
        """A row, which may come late or twice."""
        step = row.get("step")
        if not isinstance(step, int) or step < 0 or _key(row) in self._written:
            return
        insort(self._recent, (step, json.dumps(row)))
        del self._recent[:-_MOST_KEPT]
        is_late = step < self._next_step - 1
        if "loss" in row and not is_late:
            self.newest = row
        self._written.add(_key(row))
        if is_late:
            self._insert(row)
        else:
            self._metrics.write(row)

    def since(self, step: int) -> list[str]:
        """The first rows of `step` and later as JSON, as many as an answer takes."""
        told: list[str] = []
        num_bytes = 0
        for at, line in self._recent:
            if at < step:
                continue
            num_bytes += len(line)
            if len(told) == _MOST_TOLD or num_bytes > _MOST_TOLD_BYTES:
                break
            told.append(line)
        return told

    def close(self) -> None:
        self._metrics.close()

    def _open(self, first_step: int) -> Metrics:
        return Metrics(
            self._folder, first_step=first_step, tensorboard=self._tensorboard, show=self._show
        )

    def _insert(self, row: Mapping[str, Any]) -> None:
        self._metrics.close()
        rows = [*read_rows(self._folder), row]
        rows.sort(key=lambda each: each["step"])
        # Renamed into place: others read it while the run goes on.
        temporary = self._path.with_suffix(".tmp")
        lines = [json.dumps(each) + "\n" for each in rows]
        temporary.write_text("".join(lines), encoding="utf-8")
        os.replace(temporary, self._path)
        self._metrics = self._open(self._next_step)


def _key(row: Mapping[str, Any]) -> tuple[int, bool]:
    return int(row["step"]), "loss" in row
