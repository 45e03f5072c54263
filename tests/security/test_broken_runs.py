"""Runs with broken links and stopped processes: losses are equal to the last bit, or an error names
the lost rank.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fakes.broken_path import BrokenPath
from support.small_job import small_toml
from support.warm_python import program_of

from dpipe.config.load import Config, load
from dpipe.coordinator.client import Coordinator
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.transport.sessions import SessionMesh

Make = Callable[..., Config]
Losses = Callable[..., list[float]]


@pytest.fixture
def break_paths(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[float], list[BrokenPath]]]:
    """From then on every rank dials every other, and the coordinator, through a path that resets
    connections.
    """
    made: list[BrokenPath] = []
    reset_after = 0.0  # bytes, on average
    connect = SessionMesh.connect
    with ExitStack() as stack:

        def connect_through_paths(
            end: SessionMesh,
            addresses: Mapping[int, str | None],
            peers: Collection[int],
            *routes: Mapping[int, str | None],
        ) -> None:
            through: dict[int, str | None] = {}
            for rank, address in addresses.items():
                assert address is not None
                port = int(address.rpartition(":")[2])
                path = BrokenPath(port, reset_after=reset_after, seed=len(made))
                made.append(stack.enter_context(path))
                through[rank] = path.address
            connect(end, through, peers, *routes)

        join = Coordinator.join

        def join_through_a_path(address: str, *others: Any, **settings: Any) -> Coordinator:
            path = BrokenPath(int(address.rpartition(":")[2]), reset_after=5_000, seed=len(made))
            made.append(stack.enter_context(path))
            return join(path.address, *others, **settings)

        def begin(mean: float) -> list[BrokenPath]:
            nonlocal reset_after
            reset_after = mean
            monkeypatch.setattr(SessionMesh, "connect", connect_through_paths)
            monkeypatch.setattr(Coordinator, "join", join_through_a_path)
            return made

        yield begin


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("cut", "reset_after"),
    [
        ({"pipeline__stages": 4}, 20_000),
        ({"pipeline__stages": 4, "transport__kind": "grpc"}, 20_000),
        # Of few bytes: each connection carries a third.
        ({"pipeline__stages": 2, "transport__connections": 3}, 4_000),
        (
            {
                "pipeline__stages": 2,
                "data_parallel__replicas": 2,
                "data_parallel__kind": "all-reduce",
            },
            20_000,
        ),
    ],
    ids=["four stages", "four stages over grpc", "three connections", "replicas"],
)
def test_losses_are_the_same_bit_for_bit_through_resets(
    cut: dict[str, object],
    reset_after: float,
    tiny: Make,
    losses: Losses,
    break_paths: Callable[[float], list[BrokenPath]],
    tmp_path: Path,
) -> None:
    changes = {"train__steps": 10, "transport__kind": "tcp", **cut}
    undisturbed = losses(tiny(run__folder=str(tmp_path / "one"), **changes))
    paths = break_paths(reset_after)
    reset = losses(tiny(run__folder=str(tmp_path / "cut"), **changes))
    assert reset == undisturbed
    assert sum(path.num_resets for path in paths) > 3


Start = Callable[..., list[subprocess.Popen[str]]]


@pytest.fixture
def start(tmp_path: Path, warm_python: str) -> Iterator[Start]:
    """Starts both ranks of a run in `tmp_path`, as processes."""
    (tmp_path / "text.txt").write_text("All that is known of the fox is that it is quick. " * 100)
    started: list[subprocess.Popen[str]] = []

    def run(kind: str, folder: str, *, steps: int, heartbeat: float) -> list[subprocess.Popen[str]]:
        job = tmp_path / f"{folder}.toml"
        text = small_toml(
            train={"steps": steps},
            pipeline={"stages": 2},
            transport={"kind": kind},
            run={"folder": folder},
            timeouts={"transfer": 60, "heartbeat": heartbeat},
        )
        job.write_text(text)
        where = f"127.0.0.1:{free_port()}"
        for rank in range(2):
            words = [warm_python, "-m", "dpipe", "train", job.name, "--rank", str(rank)]
            words += ["--world-size", "2", "--coordinator", where]
            started.append(
                subprocess.Popen(
                    words,
                    cwd=tmp_path,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    env={**os.environ, "DPIPE_TOKEN": "secret"},
                )
            )
        return started[-2:]

    yield run
    for process in started:
        process.kill()
        process.communicate()


def await_steps(folder: Path, count: int) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if (folder / "metrics.jsonl").exists() and len(read_rows(folder)) > count:
            return
        time.sleep(0.02)
    raise AssertionError(f"{folder} has no {count} steps")


def finish(ranks: list[subprocess.Popen[str]]) -> None:
    for process in ranks:
        said, _ = process.communicate(timeout=90)
        assert process.returncode == 0, said


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tcp", "grpc"])
def test_process_that_is_stopped_for_a_while_is_waited_for(
    kind: str,
    start: Start,
    losses: Losses,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: str,
) -> None:
    """A live migration stops a virtual machine for as long as 30 s; 8 s ended the run."""
    ranks = start(kind, "run", steps=40, heartbeat=16.0)
    await_steps(tmp_path / "run", 5)
    stopped_pid = program_of(warm_python, ranks[1].pid)
    os.kill(stopped_pid, signal.SIGSTOP)
    time.sleep(5.0)
    assert all(process.poll() is None for process in ranks)
    os.kill(stopped_pid, signal.SIGCONT)
    finish(ranks)
    stopped = [row["loss"] for row in read_rows(tmp_path / "run") if "loss" in row]
    monkeypatch.chdir(tmp_path)
    assert stopped == losses(load("run.toml", ("run.folder=undisturbed",)))


@pytest.mark.parametrize("killed", [0, 1])
def test_dead_process_is_noticed_at_once(killed: int, start: Start, tmp_path: Path) -> None:
    """Independent of timeouts.heartbeat, because its kernel closes its connections."""
    ranks = start("tcp", "run", steps=100_000, heartbeat=40.0)
    await_steps(tmp_path / "run", 5)
    os.kill(ranks[killed].pid, signal.SIGKILL)
    start_s = time.monotonic()
    other = ranks[1 - killed]
    said, _ = other.communicate(timeout=30)
    assert time.monotonic() - start_s < 10  # to save and exit; not 40
    assert other.returncode == 1
    assert ["lost the coordinator", "lost rank 1"][killed] in " ".join(said.split())
