"""A run whose files are elsewhere, and a run in a terminal."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from run_folders import append, row, write_config

from dpipe.agent.inquiry import RunStatus
from dpipe.agent.rows import RunRows
from dpipe.errors import JoinError
from dpipe.watch.command import source_of
from dpipe.watch.coordinated import CoordinatedRun
from dpipe.watch.folder import RunFolder
from dpipe.watch.terminal import curve, show_in_terminal
from dpipe.wire.rpc import Security


class FakeCoordinator:
    """What `dpipe coordinate` would answer."""

    def __init__(self, folder: Path) -> None:
        self.rows = RunRows(folder, num_steps=1000, tensorboard=False, show=lambda row: None)
        self.epoch = 1
        self.away = False
        self.asked: list[int] = []

    def __call__(self, rows_from: int) -> RunStatus:
        if self.away:
            raise JoinError("no answer from a coordinator")
        self.asked.append(rows_from)
        agent = {"host": "h", "for_s": 1.0, "silent_s": 0.0, "leaving": True}
        agents = [{"name": "a", "rank": 0, **agent}, {"name": "b", "rank": None, **agent}]
        answer = {
            **{"run": "runs/job", "phase": "running", "epoch": self.epoch, "step": 3, "steps": 10},
            **{"ranks": 1, "wanted": 1, "agents": agents, "goodput": 0.5, "events": [[0.0, "hi"]]},
            **{"lost_s": 1.0, "run_s": 2.0},
            "rows": self.rows.since(rows_from),
        }
        return RunStatus.model_validate_json(json.dumps(answer), strict=True)


def test_coordinators_rows_are_each_taken_once(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(tmp_path)
    source = CoordinatedRun("10.0.0.1:7000", Security(), coordinator)
    for step in range(450):  # more than one answer takes
        coordinator.rows.take(row(step))
    coordinator.rows.take({"step": 450, "held_out_loss": 2.0})
    picture = source.poll()
    assert [point.step for point in source.points.points] == list(range(451))
    assert (picture.goodput, picture.held_out_loss, picture.state) == (0.5, 2.0, "training")
    assert [(seat.machine, seat.note) for seat in picture.seats] == [("a", "leaving")]
    assert picture.notes == ("Spares: b",)
    coordinator.rows.take(row(450))  # of the same step as the held-out loss
    source.poll()
    source.poll()
    assert len(source.points.points) == 452
    coordinator.rows.close()


def test_epoch_that_makes_steps_again_begins_the_points_anew(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(tmp_path)
    source = CoordinatedRun("10.0.0.1:7000", Security(), coordinator)
    for step in range(5):
        coordinator.rows.take(row(step))
    source.poll()
    coordinator.rows.begin(3)
    coordinator.epoch = 2
    coordinator.rows.take(row(3, loss=9.0))
    source.poll()
    assert [point.step for point in source.points.points] == [0, 1, 2, 3]
    assert source.points.points[-1].loss == 9.0
    coordinator.rows.close()


def test_coordinator_that_is_away_leaves_the_last_picture(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(tmp_path)
    source = CoordinatedRun("10.0.0.1:7000", Security(), coordinator)
    coordinator.rows.take(row(0))
    source.poll()
    coordinator.away = True
    picture = source.poll()
    assert (picture.state, picture.loss) == ("unreachable", 4.0)
    assert "no answer" in picture.detail
    coordinator.away = False
    assert source.poll().state == "training"
    coordinator.rows.close()


def test_row_that_comes_late_is_told_in_its_place(tmp_path: Path) -> None:
    rows = RunRows(tmp_path, num_steps=1000, tensorboard=False, show=lambda row: None)
    for step in (0, 1, 3, 4, 2):
        rows.take(row(step))
    assert [json.loads(line)["step"] for line in rows.since(1)] == [1, 2, 3, 4]
    rows.close()
    again = RunRows(tmp_path, num_steps=1000, tensorboard=False, show=lambda row: None)
    assert len(again.since(0)) == 5
    again.close()


def test_target_is_a_folder_where_there_is_one(tmp_path: Path) -> None:
    folder = tmp_path / "run:7000"
    folder.mkdir()
    assert isinstance(source_of(str(folder), (), trust_code=False), RunFolder)
    assert isinstance(source_of("10.0.0.1:7000", (), trust_code=False), CoordinatedRun)


def test_picture_in_a_terminal_is_plain_text(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    write_config(folder)
    (folder / "logs" / "rank-0.log").write_text(
        "2026-11-23 18:00:22,679 rank 0 lost [bold]rank 3[/bold]\n"
    )
    append(folder, row(0), row(1, loss=3.5))
    shown = io.StringIO()
    show_in_terminal(RunFolder(folder), Console(file=shown, width=100))
    text = shown.getvalue()
    assert "step 2 of 10   loss 3.5000" in text
    assert re.search(r"1 +porto +layers 3–5", text)
    assert re.search(r"0 → 1 +10 +0\.1 +20 +80%", text)
    assert "[bold]rank 3[/bold]" in text  # not read as markup


def test_terminal_marks_a_relayed_link_and_a_machine_that_leaves(tmp_path: Path) -> None:
    coordinator = FakeCoordinator(tmp_path)
    coordinator.rows.take(row(0, relayed=["0->1"]))
    source = CoordinatedRun("10.0.0.1:7000", Security(), coordinator)
    shown = io.StringIO()
    show_in_terminal(source, Console(file=shown, width=100))
    coordinator.rows.close()
    assert re.search(r"0 → 1 .*relayed *\n", shown.getvalue())
    assert not re.search(r"1 → 0 .*relayed", shown.getvalue())
    assert re.search(r"0 +a .*leaving *\n", shown.getvalue())


@pytest.mark.parametrize(
    ("values", "blocks"), [([1.0], "▁"), ([0, 7], "▁█"), ([0, 1, 6, 7], "▁▂▇█"), ([3, 3], "▁▁")]
)
def test_curve_goes_from_the_lowest_to_the_highest(values: list[float], blocks: str) -> None:
    assert curve(values, 10) == blocks


def test_long_curve_is_as_wide_as_it_may_be() -> None:
    assert curve([float(value) for value in range(1000)], 8) == "▁▂▃▄▅▆▇█"
