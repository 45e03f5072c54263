"""A parameter server that is killed between any two writes resumes the last committed step."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from dpipe.errors import CheckpointError, RunError
from dpipe.paramserver import journal as journal_module
from dpipe.paramserver.journal import Journal, recover
from dpipe.paramserver.spec import FlatSpec, ParameterSpec, StepRule
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision

SPEC = FlatSpec(
    (ParameterSpec("layers.0.w", 0, 30, True), ParameterSpec("layers.0.b", 0, 3, False)),
    chunk_values=16,
)


class Memory:
    """Snapshots in memory; `limit` of them can be written."""

    def __init__(self) -> None:
        self.kept: (
            tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, Any]] | None
        ) = None
        self.steps: list[int] = []

    def save(
        self, folder: Path, step: int, tensors: Any, moments: Any, state: Mapping[str, Any]
    ) -> None:
        copies = (
            {name: tensor.clone() for name, tensor in kind.items()} for kind in (tensors, moments)
        )
        self.kept = (step, *copies, dict(state))
        self.steps.append(step)

    def load(self, folder: Path) -> Any:
        return self.kept


def begun(folder: Path, wire: str = "none") -> tuple[StageState, Journal, Memory]:
    rule = StepRule(ranks=(0,), weight_decay=0.1, betas=(0.9, 0.95), wire=wire)
    state = StageState(
        SPEC,
        rule,
        StageTensors.zeros(SPEC.length, lossy=rule.lossy_parameters),
        step=0,
        num_updates=0,
    )
    snapshots = Memory()
    journal = Journal(folder, snapshots, "run 1")
    journal.begin(state)
    return state, journal, snapshots


def step(state: StageState, journal: Journal | None, factor: float | None = 1.0) -> None:
    number = state.step
    values = torch.randn(SPEC.length, generator=torch.Generator().manual_seed(number))
    for chunk in range(SPEC.num_chunks):
        state.add(number, 0, chunk, values[SPEC.chunk(chunk)])
    state.decide(number, 0, StepDecision(1e-2, factor))
    for chunk in range(SPEC.num_chunks if factor is not None else 0):
        state.give(number, 0, chunk)
    if journal:
        journal.wait_for_snapshot()
        journal.write(number, *state.completed_step())
        state.commit()
        journal.committed(state)


def same(a: StageState, b: StageState) -> bool:
    vectors = zip(a.now.by_name().values(), b.now.by_name().values(), strict=True)
    return all(torch.equal(x, y) for x, y in vectors) and (a.step, a.num_updates) == (
        b.step,
        b.num_updates,
    )


@pytest.mark.parametrize("wire", ["none", "int8"])
@pytest.mark.parametrize("steps", [0, 1, 3, 20])
def test_recovered_row_is_that_of_the_last_committed_step(
    steps: int, wire: str, tmp_path: Path
) -> None:
    state, journal, snapshots = begun(tmp_path, wire)
    for number in range(steps):
        step(state, journal, None if number == 2 else 0.5)
    journal.wait_for_snapshot()
    recovered = recover(tmp_path, snapshots)
    assert recovered is not None
    assert same(recovered[0], state)
    assert recovered[1].session == "run 1"


def test_step_that_was_not_written_down_is_not_there_again(tmp_path: Path) -> None:
    state, journal, snapshots = begun(tmp_path)
    step(state, journal)
    step(state, None)
    recovered = recover(tmp_path, snapshots)
    assert recovered is not None
    assert same(recovered[0], state)
    assert state.step == 1


def test_half_written_step_is_not_there_again(tmp_path: Path) -> None:
    state, journal, snapshots = begun(tmp_path)
    step(state, journal)
    (tmp_path / "average-00000001.tmp").write_bytes(b"half")
    recovered = recover(tmp_path, snapshots)
    assert recovered is not None
    assert recovered[0].step == 1


def test_snapshots_come_now_and_then_and_take_the_steps_before_them_away(tmp_path: Path) -> None:
    state, journal, snapshots = begun(tmp_path)
    for _ in range(9):
        step(state, journal)
    journal.wait_for_snapshot()
    assert snapshots.steps == [0, 8]
    assert [path.name for path in tmp_path.iterdir()] == ["average-00000008.safetensors"]


def test_new_run_takes_the_folder_over(tmp_path: Path) -> None:
    state, journal, _ = begun(tmp_path)
    step(state, journal)
    second, _, snapshots = begun(tmp_path)
    recovered = recover(tmp_path, snapshots)
    assert recovered is not None
    assert same(recovered[0], second)


def test_empty_folder_holds_nothing(tmp_path: Path) -> None:
    assert recover(tmp_path, Memory()) is None


def test_damaged_step_is_named(tmp_path: Path) -> None:
    state, journal, snapshots = begun(tmp_path)
    step(state, journal)
    (tmp_path / "average-00000000.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=r"average-00000000\.safetensors is damaged"):
        recover(tmp_path, snapshots)


def test_step_of_another_run_is_refused(tmp_path: Path) -> None:
    state, journal, snapshots = begun(tmp_path)
    step(state, journal)
    journal.session = "run 2"
    journal.write(1, *two_steps_on(state))
    with pytest.raises(CheckpointError, match="another run"):
        recover(tmp_path, snapshots)


def two_steps_on(state: StageState) -> tuple[StepDecision, torch.Tensor]:
    step(state, None)
    return state.completed_step()


def test_step_without_room_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When it is started again, the server continues after the last step on disk."""
    state, kept, snapshots = begun(tmp_path)
    step(state, kept)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(journal_module, "save_file", full)
    with pytest.raises(
        RunError, match=r"cannot write .*average-00000001\S+: .*No space left .*server's machine"
    ):
        step(state, kept)
    recovered = recover(tmp_path, snapshots)
    assert recovered is not None
    assert recovered[0].step == 1
