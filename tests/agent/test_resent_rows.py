import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpipe.agent.rows import RunRows
from dpipe.report.metrics import read_rows

NUM_STEPS = 20


@pytest.fixture
def rows(tmp_path: Path) -> Iterator[RunRows]:
    rows = RunRows(tmp_path, num_steps=NUM_STEPS, tensorboard=False, show=lambda row: None)
    for step in (0, 1, 3, 4):
        rows.take({"step": step, "loss": float(step)})
    yield rows
    rows.close()


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in read_rows(folder)]


def test_row_that_comes_late_or_twice_is_written_once_in_its_place(
    rows: RunRows, tmp_path: Path
) -> None:
    assert rows.first_missing == 2
    for _ in range(2):
        rows.take({"step": 2, "loss": 2.0})
        rows.take({"step": 4, "loss": 4.0})
    assert steps(tmp_path) == [0, 1, 2, 3, 4]
    rows.take({"step": 5, "loss": 5.0})
    rows.take({"step": 5, "held_out_loss": 5.5})
    assert steps(tmp_path) == [0, 1, 2, 3, 4, 5, 5]
    assert rows.first_missing == 6


def test_epoch_that_resumes_drops_the_rows_of_steps_that_are_made_again(
    rows: RunRows, tmp_path: Path
) -> None:
    rows.begin(3)
    assert steps(tmp_path) == [0, 1]
    rows.take({"step": 3, "loss": 3.5})
    rows.take({"step": 2, "loss": 2.0})
    assert steps(tmp_path) == [0, 1, 2, 3]


def test_rows_go_on_in_another_process(rows: RunRows, tmp_path: Path) -> None:
    rows.close()
    others = RunRows(tmp_path, num_steps=NUM_STEPS, tensorboard=False, show=lambda row: None)
    assert others.first_missing == 2
    others.take({"step": 4, "loss": 9.0})
    others.take({"step": 5, "loss": 5.0})
    others.close()
    assert [row["loss"] for row in read_rows(tmp_path)] == [0.0, 1.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize("row", [{}, {"step": -1}, {"step": "3"}, {"loss": 1.0}])
def test_row_of_no_step_is_left_out(rows: RunRows, tmp_path: Path, row: dict) -> None:
    rows.take(row)
    assert steps(tmp_path) == [0, 1, 3, 4]


def test_row_of_a_step_that_the_run_does_not_have_is_left_out(
    rows: RunRows, tmp_path: Path
) -> None:
    rows.take({"step": NUM_STEPS, "loss": 1.0})
    assert steps(tmp_path) == [0, 1, 3, 4]


def test_rows_of_every_tenth_step_and_the_last_are_those_that_are_missed(tmp_path: Path) -> None:
    shown: list[int] = []
    rows = RunRows(
        tmp_path,
        num_steps=36,
        every=10,
        tensorboard=False,
        show=lambda row: shown.append(row["step"]),
    )
    for step in range(36):
        rows.hear(step, float(step))
    for step in (0, 10, 30):
        rows.take({"step": step, "loss": float(step)})
    assert rows.first_missing == 20
    rows.fill(36)
    rows.close()
    assert steps(tmp_path) == [0, 10, 20, 30, 35]
    assert shown == [0, 10, 30, 35]
    assert rows.first_missing == 36


def test_losses_of_steps_that_are_made_again_are_forgotten(rows: RunRows, tmp_path: Path) -> None:
    rows.hear(2, 2.0)
    rows.hear(5, 5.0)
    rows.begin(3)
    rows.fill(NUM_STEPS)
    assert steps(tmp_path) == [0, 1, 2]


def test_long_run_holds_a_byte_or_two_a_step(tmp_path: Path) -> None:
    first, last = 6000, 9000  # behind the rows that are kept for who watches
    rows = RunRows(tmp_path, num_steps=last, tensorboard=False, show=lambda row: None)
    held = 0
    tracemalloc.start()
    for step in range(last):
        if step == first:
            held = tracemalloc.get_traced_memory()[0]
        rows.hear(step, 1.0)
        rows.take({"step": step, "loss": 1.0})
    grown = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    rows.close()
    assert grown < 4 * (last - first)
