"""Whole runs in processes, as a user starts them: stopped, killed, resumed, and under torchrun."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from support.small_job import TEXT, small_toml
from support.warm_python import program_of

from dpipe.processes.launch import free_port
from dpipe.store import checkpoint

Process = subprocess.Popen[str]
Command = tuple[str, ...]


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Path]:
    """`job(steps=.., stages=..)` writes a configuration and its text; runs go to `tmp_path /
    "run"`.
    """
    (tmp_path / "text.txt").write_text(TEXT)

    def write(steps: int = 100_000, stages: int = 2) -> Path:
        text = small_toml(
            train={"steps": steps},
            pipeline={"stages": stages},
            run={"checkpoint_every": 5},
            timeouts={"transfer": 30},
        )
        (tmp_path / "job.toml").write_text(text)
        return tmp_path / "job.toml"

    return write


@pytest.fixture
def dpipe(warm_python: str) -> Command:
    return (warm_python, "-m", "dpipe")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Process]]:
    """Starts commands in `tmp_path`, and kills those that still run at the end."""
    started: list[Process] = []

    def popen(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            words, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=_environment()
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        for child in _children(process.pid):
            child.kill()
        process.kill()
        process.communicate(timeout=10)


def _environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "OMP_NUM_THREADS": "1",
    }


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def rows(tmp_path: Path, run: str = "runs/run") -> list[dict[str, float]]:
    path = tmp_path / run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_until(condition: Callable[[], bool], process: Process, timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not get far enough"
        time.sleep(0.05)


def checkpoints(tmp_path: Path) -> list[Path]:
    return sorted(
        index.parent for index in (tmp_path / "runs/run/checkpoints").glob("step-*/index.json")
    )


def test_killed_rank_stops_the_others_and_is_named(
    job, start, dpipe: Command, warm_python: str, tmp_path: Path
) -> None:
    launcher = start(*dpipe, "launch", str(job()), "-n", "3")
    wait_until(lambda: len(checkpoints(tmp_path)) > 0, launcher)
    clients = _children(program_of(warm_python, launcher.pid))
    ranks = [psutil.Process(program_of(warm_python, client.pid)) for client in clients]
    (killed,) = [client for client in clients if client.environ().get("DPIPE_RANK") == "1"]
    os.kill(program_of(warm_python, killed.pid), signal.SIGKILL)
    killed_at = time.monotonic()
    _, err = launcher.communicate(timeout=20)
    assert time.monotonic() - killed_at < 10
    assert launcher.returncode != 0
    assert "rank 1" in err
    assert not [p for p in ranks if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    last = checkpoint.load(str(tmp_path / "runs/run/checkpoints"), lambda name: True)
    assert last.step % 5 == 0
    assert {name.split(".")[1] for name in last.tensors} == {"0", "1", "2", "3"}


def replicas(
    kind: str, job, start, dpipe: Command, *settings: str, stages: int = 1, last: Command = ()
) -> list[Process]:
    """Start all ranks of two replicas; the last rank runs the program `last`, if any."""
    place = ("--world-size", str(2 * stages), "--coordinator", f"127.0.0.1:{free_port()}")
    given = (
        "data_parallel.replicas=2",
        f"data_parallel.kind={kind}",
        "run.checkpoint_every=1",
        *settings,
    )
    train = (
        "train",
        str(job(stages=stages)),
        *place,
        *(word for text in given for word in ("-o", text)),
    )
    programs = [dpipe] * (2 * stages - 1) + [last or dpipe]
    return [start(*program, *train, "--rank", str(rank)) for rank, program in enumerate(programs)]


def assert_stopped_by_the_loss_of(
    last: int, others: Sequence[Process], killed_at: float, tmp_path: Path
) -> int:
    """They stop within 10 s and name the lost rank; returns the step of the newest checkpoint,
    which must be whole.
    """
    errors = [other.communicate(timeout=20)[1] for other in others]
    assert time.monotonic() - killed_at < 10
    assert [other.returncode for other in others] == [1] * len(others)
    assert all(f"lost rank {last}" in err for err in errors), errors
    kept = checkpoint.load(str(tmp_path / "runs/run/checkpoints"), lambda name: True)
    assert {name.split(".")[1] for name in kept.tensors} == {"0", "1", "2", "3"}
    assert set(kept.optimizer) == {
        f"{name}.{moment}" for name in kept.tensors for moment in ("exp_avg", "exp_avg_sq")
    }
    return kept.step


@pytest.mark.parametrize(("kind", "stages"), [("all-reduce", 2), ("sharded", 1)])
def test_replica_killed_in_an_exchange_stops_the_others_and_is_named(
    kind: str, stages: int, job, start, dpipe: Command, tmp_path: Path
) -> None:
    """Over links so slow that a step is mostly exchange."""
    (tmp_path / "slow.toml").write_text("delay_ms = 1\nbandwidth_gbps = 0.004\n")
    *others, last = replicas(kind, job, start, dpipe, "transport.shape=slow.toml", stages=stages)
    wait_until(lambda: len(checkpoints(tmp_path)) > 0, last)
    last.kill()
    assert assert_stopped_by_the_loss_of(len(others), others, time.monotonic(), tmp_path) > 0


DIES_PUSHING = """
import os, signal
from dpipe.cli.main import main
from dpipe.paramworker.client import StageClient

plain = StageClient._chunks

def chunks(line, step, connection):
    for number, message in enumerate(plain(line, step, connection)):
        if (step, number) == (2, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        yield message

StageClient._chunks = chunks
main()
"""


def test_worker_killed_in_the_middle_of_a_push_stops_the_other_and_is_named(
    job, start, dpipe: Command, tmp_path: Path
) -> None:
    python, *_ = dpipe
    dying = (python, "-c", DIES_PUSHING)
    small = "transport.chunk_bytes=4096"
    other, last = replicas("parameter-server", job, start, dpipe, small, last=dying)
    assert last.wait(60) == -signal.SIGKILL
    assert assert_stopped_by_the_loss_of(1, [other], time.monotonic(), tmp_path) <= 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopped_run_writes_a_checkpoint_first(
    number: signal.Signals, job, start, dpipe: Command, tmp_path: Path
) -> None:
    launcher = start(*dpipe, "launch", str(job()))
    wait_until(lambda: len(rows(tmp_path)) > 2, launcher)
    launcher.send_signal(number)
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 0, err
    assert "go on with --resume runs/run" in out
    assert "loss" in (tmp_path / "runs/run/logs/rank-1.log").read_text()
    last = int(rows(tmp_path)[-1]["step"])
    assert checkpoints(tmp_path)[-1].name == f"step-{last + 1:08d}"


def test_resumed_run_goes_on_as_if_it_had_never_stopped_on_other_stages(
    job, start, dpipe: Command, tmp_path: Path
) -> None:
    whole = start(*dpipe, "launch", str(job(steps=9)))
    _, err = whole.communicate(timeout=90)
    assert whole.returncode == 0, err
    shutil.copytree(tmp_path / "runs/run", tmp_path / "part")
    shutil.rmtree(tmp_path / "part/checkpoints/step-00000009")
    resumed = start(*dpipe, "train", str(job(steps=9, stages=1)), "--resume", "part")
    _, err = resumed.communicate(timeout=90)
    assert resumed.returncode == 0, err
    assert [r["loss"] for r in rows(tmp_path, "part")] == [r["loss"] for r in rows(tmp_path)]
    assert len(rows(tmp_path)) == 9


def test_torchrun_runs_the_same_program(job, start, warm_python: str, tmp_path: Path) -> None:
    torchrun = (
        warm_python,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    )
    run = start(*torchrun, "-m", "dpipe", "train", str(job(steps=3)))
    _, err = run.communicate(timeout=110)
    assert run.returncode == 0, err
    assert [row["step"] for row in rows(tmp_path)] == [0, 1, 2]


def test_mistake_writes_nothing_and_is_exit_code_2(
    job, start, dpipe: Command, tmp_path: Path
) -> None:
    run = start(*dpipe, "launch", str(job()), "-o", "data.files=['nothing-*.txt']")
    _, err = run.communicate(timeout=60)
    assert run.returncode == 2
    assert "nothing-*.txt" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["job.toml", "text.txt"]
