"""What a parameter server keeps on disk, so that it can be killed at any moment and go on without
losing a step.

    step         7         8         9         10        11
    written   snapshot  average   average   average   average ...      a snapshot again after `_STEPS_A_SNAPSHOT`
                 |_________|_________|_________|
    a restart: the snapshot, then the steps behind it again, from their averaged gradients: the same
    bits

A step is written down and synced before any worker is told that it is committed, and workers keep
their gradients until they are told: what the server has lost they send again. A file has its name
only when it is whole. Snapshots are checkpoints as the engine writes them.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dpipe.errors import CheckpointError, RunError
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision

REMEDY = "make room there, on the parameter server's machine"
_STEPS_A_SNAPSHOT = 8
_AVERAGE = re.compile(r"average-(\d{8,})\.safetensors")
_NO_GRADIENT = torch.zeros(0)

Tensors = Mapping[str, torch.Tensor]


class Snapshots(Protocol):
    """Checkpoints of one stage in a folder: the engine's, which this room cannot import."""

    def save(
        self, folder: Path, step: int, tensors: Tensors, moments: Tensors, state: Mapping[str, Any]
    ) -> None: ...
    def load(self, folder: Path) -> tuple[int, Tensors, Tensors, Mapping[str, Any]] | None:
        """The newest, or None where there is none."""


class Journal:
    """The folder of one stage's row, of one run (`session`)."""

    def __init__(self, folder: Path, snapshots: Snapshots, session: str) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self.session = session
        self._thread = ThreadPoolExecutor(1, "dpipe-snapshot")
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self._num_written = 0

    def begin(self, master: StageState) -> None:
        """A run begins here, or goes on here from elsewhere: what was in the folder is of no use
        any more.
        """
        for path in (*self._folder.glob("average-*"), *self._folder.glob("left-*")):
            path.unlink()
        self._snapshot(master)

    def who_left(self) -> set[int]:
        """The replicas that are done: they will not say so again."""
        return {int(path.name.removeprefix("left-")) for path in self._folder.glob("left-*")}

    def leave(self, replica: int) -> None:
        """It is on the disk when this returns."""
        with _needing_room(self._folder):
            (self._folder / f"left-{replica}").touch()
            _sync(self._folder)

    def forget_who_left(self) -> None:
        """All have: who comes now goes on with another run."""
        for path in self._folder.glob("left-*"):
            path.unlink()

    def write(self, step: int, verdict: StepDecision, average: torch.Tensor) -> None:
        """Keep what `StageState.replay` needs of a step; it is on the disk when this returns.

        Raises `RunError` where there is no room for it.
        """
        path = self._folder / f"average-{step:08d}.safetensors"
        temporary = path.with_suffix(".tmp")
        told = {
            "session": self.session,
            "verdict": json.dumps([verdict.learning_rate, verdict.factor]),
        }
        with _needing_room(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(
                {"average": average if verdict.factor is not None else _NO_GRADIENT},
                temporary,
                told,
            )
            _sync(temporary)
            os.replace(temporary, path)
            _sync(self._folder)
        self._num_written += 1

    def committed(self, master: StageState) -> None:
        """After a commit: a snapshot beside what follows, when one is due. `settle` comes before
        the next commit.
        """
        if self._num_written >= _STEPS_A_SNAPSHOT:
            self._num_written = 0
            step = master.step
            updates = master.num_updates
            state = master.now
            self._writing = self._thread.submit(
                self._save, master.row, master.rule, state, step, updates
            )

    def settle(self) -> None:
        """Until a snapshot under way no longer needs the rows that it is of; raises what went wrong
        with it.
        """
        self._writing.result()

    def close(self) -> None:
        self._thread.shutdown()

    def _snapshot(self, master: StageState) -> None:
        self._save(master.row, master.rule, master.now, master.step, master.num_updates)

    def _save(
        self, row: FlatSpec, rule: StepRule, state: StageTensors, step: int, num_updates: int
    ) -> None:
        rows = state.rows()
        tensors = _named(row, "", rows.get("held", state.values))
        moments = _named(row, ".exp_avg", state.exp_avg) | _named(
            row, ".exp_avg_sq", state.exp_avg_sq
        )
        if state.held is not None:
            moments |= _named(row, ".master", state.values)
        told = {
            "session": self.session,
            "num_updates": num_updates,
            "row": asdict(row),
            "rule": asdict(rule),
        }
        self._snapshots.save(self._folder, step, tensors, moments, told)
        for path, written in _averages(self._folder):
            if written < step:
                path.unlink()


def recover(folder: Path, snapshots: Snapshots) -> tuple[StageState, Journal] | None:
    """The row as it was after the last committed step; None where nothing was kept.

    Raises `CheckpointError` naming what is damaged.
    """
    found = snapshots.load(folder)
    if found is None:
        return None
    step, tensors, moments, told = found
    row = FlatSpec.of(told["row"])
    rule = StepRule.of(told["rule"])
    held = _joined(row, "", tensors)
    lossy = rule.lossy_parameters
    values = _joined(row, ".master", moments) if lossy else held
    exp_avg, exp_avg_sq = (_joined(row, key, moments) for key in (".exp_avg", ".exp_avg_sq"))
    state = StageTensors(values, exp_avg, exp_avg_sq, held if lossy else None)
    master = StageState(row, rule, state, step=step, num_updates=told["num_updates"])
    journal = Journal(folder, snapshots, told["session"])
    for path, written in _averages(folder):
        if written == master.step:
            master.replay(*_read(path, journal.session))
            journal._num_written += 1
    return master, journal


def _averages(folder: Path) -> list[tuple[Path, int]]:
    matches = (
        (path, _AVERAGE.fullmatch(path.name)) for path in folder.glob("average-*.safetensors")
    )
    return sorted(
        ((path, int(match[1])) for path, match in matches if match), key=lambda found: found[1]
    )


def _read(path: Path, session: str) -> tuple[StepDecision, torch.Tensor]:
    try:
        with safe_open(path, "pt") as content:
            told = content.metadata()
            average = content.get_tensor("average")
        verdict = StepDecision(*json.loads(told["verdict"]))
    except Exception as error:  # the library raises several kinds
        raise CheckpointError(
            f"{path} is damaged: {error}; remove {path.parent} and resume the run"
        ) from None
    if told["session"] != session:
        raise CheckpointError(
            f"{path} is of another run than its snapshot; remove {path.parent} and resume the run"
        )
    return verdict, average


def _named(row: FlatSpec, suffix: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    places = zip(row.starts, row.parameters, strict=True)
    return {f"{p.name}{suffix}": values[start : start + p.num_values] for start, p in places}


def _joined(row: FlatSpec, suffix: str, tensors: Tensors) -> torch.Tensor:
    parts = [tensors[f"{parameter.name}{suffix}"].reshape(-1) for parameter in row.parameters]
    return torch.cat(parts) if parts else torch.zeros(0)


@contextmanager
def _needing_room(path: Path) -> Iterator[None]:
    """Raises `RunError` naming what is written within, where that fails."""
    try:
        yield
    except (
        OSError,
        SafetensorError,
    ) as error:  # the second is what safetensors makes of a full disk
        raise RunError(f"cannot write {path}: {error}; {REMEDY}") from error


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
