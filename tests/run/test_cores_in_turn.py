"""Which cores the ranks of a launch compute on, and where they are left to the scheduler."""

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.small_job import TEXT, small_toml

from dpipe.processes.cores import cores_in_turn
from dpipe.processes.launch import launch
from dpipe.run import start
from dpipe.run.start import launch_ranks


@pytest.fixture
def usable(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`usable(0, 1)`: the cores of this process."""
    return lambda *cores: monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(cores))


@pytest.mark.parametrize(
    ("cores", "num_ranks", "group_size", "threads", "of_ranks"),
    [
        ((0, 1), 4, 2, 1, [[0], [1], [0], [1]]),
        ((2, 5), 4, 2, 1, [[2], [5], [2], [5]]),
        ((0, 1, 2, 3), 4, 2, 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ((0, 1, 2, 3, 4), 4, 2, 2, [[0, 1], [2, 3], [0, 1], [2, 3]]),
        ((0, 1), 4, 1, 1, []),
        ((0, 1, 2, 3), 4, 2, 1, []),
        ((0, 1), 2, 2, 1, []),
        ((0,), 4, 2, 1, []),
        ((0, 1, 2, 3), 6, 2, 1, []),
        ((0, 1), 4, 2, 4, []),
    ],
    ids=[
        "two groups on two cores",
        "cores that taskset has left",
        "two threads a rank",
        "a core too many",
        "no groups",
        "a core for each rank",
        "one group",
        "a group on one core",
        "more ranks on some cores than on others",
        "more threads than cores",
    ],
)
def test_ranks_of_a_group_have_cores_of_their_own(
    usable: Callable[..., None],
    cores: tuple[int, ...],
    num_ranks: int,
    group_size: int,
    threads: int,
    of_ranks: list[list[int]],
) -> None:
    usable(*cores)
    assert cores_in_turn(num_ranks, group_size, threads) == of_ranks


def test_rank_and_what_it_starts_stay_on_its_cores(tmp_path: Path) -> None:
    last = max(os.sched_getaffinity(0))
    show = (
        "import os, subprocess, sys; print(os.sched_getaffinity(0), flush=True); subprocess.run("
        "[sys.executable, '-S', '-c', 'import os; print(os.sched_getaffinity(0))'])"
    )
    argv = [sys.executable, "-S", "-c", show]
    assert launch(lambda rank: argv, 2, logs=tmp_path, cores=[[last], [last]]) == 0
    assert (tmp_path / "rank-1.log").read_text() == f"{{{last}}}\n" * 2


def test_rank_that_may_not_be_pinned_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    said: list[str] = []
    argv = [sys.executable, "-S", "-c", ""]
    assert launch(lambda rank: argv, 1, logs=tmp_path, cores=[[0]], on_line=said.append) == 0
    assert said == [
        "a rank cannot be pinned to its cores, and may be slower: Operation not permitted"
    ]


@pytest.mark.parametrize(
    ("changes", "are_pinned"),
    [({}, True), ({"model": {"layers": "replay"}, "replay": {"message_bytes": 4}}, False)],
    ids=["computing", "stages that sleep"],
)
def test_launch_pins_groups_that_compute(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    usable: Callable[..., None],
    changes: dict[str, dict[str, Any]],
    are_pinned: bool,
) -> None:
    usable(0, 1)
    given: dict[str, Any] = {}
    monkeypatch.setattr(start, "launch", lambda *_, **options: given.update(options) or 0)
    (tmp_path / "text.txt").write_text(TEXT)
    table: dict[str, dict[str, Any]] = {
        "data": {"files": [str(tmp_path / "text.txt")], "cache": str(tmp_path / "cache")},
        "pipeline": {"stages": 2},
        "tensor_parallel": {"size": 2},
        "run": {"folder": str(tmp_path / "run")},
    }
    (tmp_path / "job.toml").write_text(small_toml(**table | changes))
    launch_ranks(
        str(tmp_path / "job.toml"), (), num_ranks=None, resume=None, fallback=False, say=print
    )
    assert given["cores"] == ([[0], [1], [0], [1]] if are_pinned else [])
