"""`RunRows`: the rows of metrics.jsonl of a run whose rank 0 moves from machine to machine.

epoch 1, rank 0 on a     0 1 2 3 4 5         a row may be lost with a connection: its machine
epoch 2, rank 0 on b           3 4 5 6 7     remembers it, and sends it again when asked
"""

import json
from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dpipe.report.metrics import Metrics, insert_rows, read_rows

_MOST_KEPT = 5000  # rows in memory, for who watches from elsewhere
_MOST_TOLD, _MOST_TOLD_BYTES = 200, 1 << 20  # in one answer
Show = Callable[[Mapping[str, Any]], None]


class RunRows:
    """Written to FOLDER/metrics.jsonl in order of steps. Every `every`-th of `num_steps` steps has
    a row, and the last; others may. Raises `RunError` where it cannot be.
    """

    def __init__(
        self, folder: Path, *, num_steps: int, every: int = 1, tensorboard: bool, show: Show
    ) -> None:
        self._path = folder / "metrics.jsonl"
        self._folder = folder
        self._num_steps = num_steps
        self._every = every
        self._tensorboard = tensorboard
        self._show = show
        self._trained = bytearray()  # by step, whether its row is written: a byte each
        self._others: set[int] = set()  # steps of rows without a loss, which are few
        self._next_step = 0
        self._losses: dict[int, float] = {}  # of steps whose row has not come
        self._recent: list[tuple[int, str]] = []  # by step, as JSON
        self.newest: Mapping[str, Any] = {}  # of this process's, with a loss
        if self._path.exists():
            rows = [row for row in read_rows(folder) if self._is_of_run(row)]
            for row in rows:
                self._note(row)
            self._recent = [(row["step"], json.dumps(row)) for row in rows[-_MOST_KEPT:]]
        self._metrics = self._open(self._next_step)

    @property
    def first_missing(self) -> int:
        """The first step without a row that should have one; or behind all rows."""
        gap = self._trained[:: self._every].find(0)
        return len(self._trained) if gap < 0 else gap * self._every

    def begin(self, resume_step: int) -> None:
        """An epoch begins, which makes `resume_step` and later steps again."""
        self.newest = {}
        del self._trained[resume_step:]
        self._others = {step for step in self._others if step < resume_step}
        self._next_step = max(len(self._trained), *(step + 1 for step in self._others), 0)
        self._losses = {step: loss for step, loss in self._losses.items() if step < resume_step}
        self._recent = [each for each in self._recent if each[0] < resume_step]
        self._metrics.close()
        self._metrics = self._open(resume_step)

    def take(self, row: Mapping[str, Any]) -> None:
        """A row, which may come late or twice."""
        if not self._is_of_run(row) or self._is_written(row):
            return
        is_late = self._is_late(row)
        if "loss" in row and not is_late:
            self.newest = row
        self._keep(row)
        if is_late:
            self._insert([row])
        else:
            self._metrics.write(row)

    def hear(self, step: int, loss: float | None) -> None:
        """Any rank tells the loss of a step: all that is known of it where its row is lost with the
        machine of rank 0.
        """
        due = step % self._every == 0 or step == self._num_steps - 1
        if loss is not None and due and not self._is_trained(step):
            self._losses[step] = loss

    def fill(self, end: int) -> None:
        """Rows with a loss alone, of steps before `end` whose row was lost: when no other comes."""
        lost = sorted(step for step in self._losses if step < end)
        rows = [{"step": step, "loss": self._losses[step]} for step in lost]
        late = [row for row in rows if self._is_late(row)]
        for row in late:
            self._keep(row)
        if late:
            self._insert(late)
        for row in rows:
            self.take(row)

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

    def _insert(self, late: Sequence[Mapping[str, Any]]) -> None:
        self._metrics.close()
        insert_rows(self._path, late)
        self._metrics = self._open(self._next_step)

    def _is_of_run(self, row: Mapping[str, Any]) -> bool:
        step = row.get("step")
        return isinstance(step, int) and 0 <= step < self._num_steps

    def _is_late(self, row: Mapping[str, Any]) -> bool:
        return bool(row["step"] < self._next_step - 1)

    def _is_trained(self, step: int) -> bool:
        return step < len(self._trained) and bool(self._trained[step])

    def _is_written(self, row: Mapping[str, Any]) -> bool:
        return self._is_trained(row["step"]) if "loss" in row else row["step"] in self._others

    def _keep(self, row: Mapping[str, Any]) -> None:
        insort(self._recent, (row["step"], json.dumps(row)))
        del self._recent[:-_MOST_KEPT]
        self._note(row)

    def _note(self, row: Mapping[str, Any]) -> None:
        step = row["step"]
        self._next_step = max(self._next_step, step + 1)
        if "loss" not in row:
            self._others.add(step)
            return
        self._losses.pop(step, None)
        self._trained.extend(bytes(max(0, step + 1 - len(self._trained))))
        self._trained[step] = True
