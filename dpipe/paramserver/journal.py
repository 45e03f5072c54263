"""What a parameter server keeps on disk, so that it can be killed at any moment and go on without
losing a step.

    step         7         8         9         10        11
    written   snapshot  average   average   average   average ...   every `_STEPS_A_SNAPSHOT`: again
                 |_________|_________|_________|                    a snapshot
    a restart: the snapshot, then the steps behind it again, from their mean gradients, to the same
    bits

A step is written down and synced before any worker hears that it is committed, and workers keep
their gradients until they hear it: what the server has lost they send again. A file has its name
only when it is whole. Snapshots are checkpoints as `store/checkpoint.py` writes them.

    stage-0/average-00000008.safetensors   a step: its mean gradient, its decision as metadata
    stage-0/left-1                         replica 1 is done
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
from pydantic import BaseModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dpipe.disk import sync
from dpipe.errors import CheckpointError, RunError
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision
from dpipe.wire.schema import Count, Schema, Text

REMEDY = "make room there, on the parameter server's machine"
_STEPS_A_SNAPSHOT = 8  # a restart replays as many at most
_AVERAGE = re.compile(r"average-(\d{8,})\.safetensors")
_LEFT = "left-"
_NO_GRADIENT = torch.zeros(0)

Tensors = Mapping[str, torch.Tensor]


class _State(BaseModel):
    """What a snapshot holds besides tensors."""

    session: Text
    num_updates: Count
    row: FlatSpec
    rule: StepRule


_STATE = Schema[_State](_State)


class Snapshots(Protocol):
    """Checkpoints of one stage in a folder. Room store writes them; this one may not import it."""

    def save(
        self,
        folder: Path,
        step: int,
        tensors: Tensors,
        moments: Tensors,
        state: Mapping[str, Any],
    ) -> None: ...
    def load(self, folder: Path) -> tuple[int, Tensors, Tensors, Mapping[str, Any]] | None:
        """The newest, or None where there is none."""


class Journal:
    """The folder of one stage, of one run (`session`)."""

    def __init__(self, folder: Path, snapshots: Snapshots, session: str) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self.session = session
        self._thread = ThreadPoolExecutor(1, "dpipe-snapshot")
        self._writing: Future[None] = Future()
        self._writing.set_result(None)
        self._num_written = 0  # steps behind the newest snapshot

    def begin(self, stage: StageState) -> None:
        """A run begins, or goes on from elsewhere: what another left in the folder is removed."""
        for pattern in ("average-*", f"{_LEFT}*"):
            for path in self._folder.glob(pattern):
                path.unlink()
        # Here, not in the thread: a step is replayed upon a snapshot, so one is there first.
        self._save(
            stage.spec,
            stage.rule,
            stage.now,
            stage.step,
            stage.num_updates,
        )

    def who_left(self) -> set[int]:
        """The replicas that are done: they will not say so again."""
        names = [path.name for path in self._folder.glob(f"{_LEFT}*")]
        return {int(name.removeprefix(_LEFT)) for name in names}

    def leave(self, replica: int) -> None:
        """It is on the disk when this returns."""
        with _needing_room(self._folder):
            (self._folder / f"{_LEFT}{replica}").touch()
            sync(self._folder)

    def forget_who_left(self) -> None:
        """All have: who comes now goes on with another run."""
        for path in self._folder.glob(f"{_LEFT}*"):
            path.unlink()

    def write(self, step: int, decision: StepDecision, average: torch.Tensor) -> None:
        """Keep what `StageState.replay` needs of a step; it is on the disk when this returns.

        Raises `RunError` where there is no room for it.
        """
        path = self._folder / f"average-{step:08d}.safetensors"
        temporary = path.with_suffix(".tmp")  # no name that a restart looks for
        metadata = {
            "session": self.session,
            "verdict": json.dumps([decision.learning_rate, decision.factor]),
        }
        # A skipped step changes nothing, but it is a step: the next one has its number.
        gradient = _NO_GRADIENT if decision.factor is None else average
        with _needing_room(path):
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file({"average": gradient}, temporary, metadata)
            sync(temporary)
            os.replace(temporary, path)
            # The new name is on the disk when the folder is.
            sync(self._folder)
        self._num_written += 1

    def committed(self, stage: StageState) -> None:
        """Begin a snapshot if one is due. `wait_for_snapshot` comes before the next commit."""
        if self._num_written < _STEPS_A_SNAPSHOT:
            return
        self._num_written = 0
        # The next step is made beside these tensors; the one after it overwrites them.
        self._writing = self._thread.submit(
            self._save,
            stage.spec,
            stage.rule,
            stage.now,
            stage.step,
            stage.num_updates,
        )

    def wait_for_snapshot(self) -> None:
        """Until the tensors of one in progress may change; raises what went wrong with it."""
        self._writing.result()

    def close(self) -> None:
        self._thread.shutdown()

    def recover(self, stage: StageState) -> None:
        """Take the steps behind the snapshot. Raises `CheckpointError` naming what is damaged."""
        for path, step in _averages(self._folder):
            # Older ones are in the snapshot: the server was killed before it removed them.
            if step == stage.step:
                decision, average = _read(path, self.session)
                stage.replay(decision, average)
                self._num_written += 1

    def _save(
        self,
        spec: FlatSpec,
        rule: StepRule,
        stage: StageTensors,
        step: int,
        num_updates: int,
    ) -> None:
        tensors = _split(spec, "", stage.on_workers)
        moments = _split(spec, ".exp_avg", stage.exp_avg)
        moments |= _split(spec, ".exp_avg_sq", stage.exp_avg_sq)
        if stage.held is not None:
            moments |= _split(spec, ".master", stage.values)
        state = {
            "session": self.session,
            "num_updates": num_updates,
            "row": asdict(spec),
            "rule": asdict(rule),
        }
        self._snapshots.save(self._folder, step, tensors, moments, state)
        # Only now: until the snapshot is whole, a restart needs them.
        for path, written in _averages(self._folder):
            if written < step:
                path.unlink()


def recover(folder: Path, snapshots: Snapshots) -> tuple[StageState, Journal] | None:
    """The stage as it was after the last committed step; None where nothing was kept.

    Raises `CheckpointError` naming what is damaged.
    """
    snapshot = snapshots.load(folder)
    if snapshot is None:
        return None
    step, tensors, moments, kept = snapshot
    try:
        state = _STATE.read(json.dumps(kept).encode())
        spec = state.row
        vectors = StageTensors(
            _joined(spec, "", tensors),
            _joined(spec, ".exp_avg", moments),
            _joined(spec, ".exp_avg_sq", moments),
        )
        if state.rule.lossy_parameters:
            vectors.held = vectors.values
            vectors.values = _joined(spec, ".master", moments)
    except ValueError as error:
        raise CheckpointError(
            f"the snapshot in {folder} is damaged: {error}; remove {folder} and resume the run"
        ) from None
    stage = StageState(spec, state.rule, vectors, step=step, num_updates=state.num_updates)
    journal = Journal(folder, snapshots, state.session)
    journal.recover(stage)
    return stage, journal


def _averages(folder: Path) -> list[tuple[Path, int]]:
    """The steps in a folder, oldest first."""
    averages = []
    for path in folder.glob("average-*.safetensors"):
        match = _AVERAGE.fullmatch(path.name)
        if match:
            averages.append((path, int(match[1])))
    return sorted(averages, key=lambda average: average[1])


def _read(path: Path, session: str) -> tuple[StepDecision, torch.Tensor]:
    try:
        with safe_open(path, "pt") as content:
            metadata = content.metadata()
            average = content.get_tensor("average")
        decision = StepDecision(*json.loads(metadata["verdict"]))
    # The library raises several kinds.
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged: {error}; remove {path.parent} and resume the run"
        ) from None
    if metadata["session"] != session:
        raise CheckpointError(
            f"{path} is of another run than its snapshot; remove {path.parent} and resume the run"
        )
    return decision, average


def _split(spec: FlatSpec, suffix: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """The parts of a flat vector, by the parameter's name and `suffix`."""
    parts = {}
    for start, parameter in zip(spec.starts, spec.parameters, strict=True):
        stop = start + parameter.num_values
        parts[f"{parameter.name}{suffix}"] = values[start:stop]
    return parts


def _joined(spec: FlatSpec, suffix: str, tensors: Tensors) -> torch.Tensor:
    parts = [tensors[f"{parameter.name}{suffix}"].reshape(-1) for parameter in spec.parameters]
    if [part.numel() for part in parts] != [each.num_values for each in spec.parameters]:
        raise ValueError("its tensors are not of the sizes that it says")
    return torch.cat(parts) if parts else torch.zeros(0)


@contextmanager
def _needing_room(path: Path) -> Iterator[None]:
    """Raises `RunError` naming what is written within, where that fails."""
    try:
        yield
    # On a full disk safetensors raises an error of its own.
    except (OSError, SafetensorError) as error:
        raise RunError(f"cannot write {path}: {error}; {REMEDY}") from error
