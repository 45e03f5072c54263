"""`dpipe train --spares`: the processes that a scheduler has started are the machines of an elastic
run. Each trains in another process, which may be killed.
"""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import psutil
import pytest
from agent.forks import Forks
from click.testing import CliRunner
from support.small_job import TEXT, small_toml

from dpipe.cli.main import main
from dpipe.config.load import Config
from dpipe.errors import ConfigError, RunError
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.supervisor import given_processes
from dpipe.supervisor.given_processes import train_elastic
from dpipe.supervisor.machine_process import MachineProcess

STEPS = 50  # that a run on a fast machine has not ended when it is told to stop


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    changes = {"train": {"steps": STEPS, "learning_rate": 1e-2}, "guard": {"every": 5}}
    run = {"checkpoint_url": f"file://{tmp_path}/shared", "tensorboard": False}
    text = small_toml(pipeline={"stages": 2}, timeouts={"heartbeat": 30}, run=run, **changes)
    (tmp_path / "job.toml").write_text(text)
    return "job.toml"


@pytest.fixture
def undisturbed(tiny: Callable[..., Config], losses: Callable[..., list[float]]) -> list[float]:
    """The same job on one rank, in this process."""
    return losses(tiny(train__steps=STEPS, pipeline__stages=1, run__folder="undisturbed"))


@pytest.fixture
def forks(tmp_path: Path, warm_python: str) -> Iterator[Forks]:
    forks = Forks(tmp_path, warm_python)
    yield forks
    forks.close()


def rows() -> list[tuple[int, float]]:
    folder = Path("runs/run")
    if not (folder / "metrics.jsonl").exists():
        return []
    return [(row["step"], row["loss"]) for row in read_rows(folder)]


def program_named(name: str) -> psutil.Process:
    """What stands for the machine that has joined under this name."""
    children = psutil.Process().children()
    (found,) = [child for child in children if {"join", name} <= set(child.cmdline())]
    return found


def given(rank: int, job: str, at: str, said: list[str]) -> Thread:
    process = {"rank": rank, "world_size": 3, "coordinator": at}
    thread = Thread(
        target=train_elastic,
        args=(job, (), 1),
        kwargs={**process, "trust_code": False, "say": said.append},
    )
    thread.start()
    return thread


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_machine_that_is_killed_is_started_again_by_its_process(
    job: str, undisturbed: list[float], forks: Forks
) -> None:
    said: list[str] = []
    at = f"127.0.0.1:{free_port()}"
    threads = [given(rank, job, at, said) for rank in range(3)]
    forks.wait_until(lambda: len(rows()) >= 6, "some steps")
    program_named("process-1-0").kill()
    for thread in threads:
        thread.join(100)
    assert not any(thread.is_alive() for thread in threads)
    assert "process-1-0 has ended (SIGKILL); another takes its place" in said
    assert rows() == list(enumerate(undisturbed))


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_torchrun_that_is_stopped_goes_on_from_a_checkpoint(
    job: str, undisturbed: list[float], forks: Forks
) -> None:
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "3")
    words = ("-m", *torchrun, "-m", "dpipe", "train", job, "--spares", "1")
    forks.start_python("torchrun", *words)
    forks.wait_until(lambda: len(rows()) >= 3, "some steps", timeout_s=100)
    forks.kill("torchrun", signal.SIGTERM)
    forks.exit_code("torchrun")
    step = len(rows())
    assert step < STEPS
    assert f"goes on from the checkpoint of step {step}" in forks.log("torchrun")
    # Nobody of before is waited for: all were told to go.
    Path(job).write_text(Path(job).read_text().replace("heartbeat = 30", "heartbeat = 300"))
    at = f"127.0.0.1:{free_port()}"
    for thread in [given(rank, job, at, []) for rank in range(3)]:
        thread.join(60)
    assert rows() == list(enumerate(undisturbed))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--world-size", "5"), "start 3, or set --spares to 3"),
        (("--world-size", "3", "--resume", "runs/run"), "without --resume"),
        (("--world-size", "3", "--timeout", "9"), "timeouts.join"),
        (("--world-size", "3", "--name", "x"), "--spares moves them"),
    ],
)
def test_what_spares_cannot_do_is_refused(options: tuple[str, ...], words: str, job: str) -> None:
    place = ("--rank", "1", "--coordinator", "127.0.0.1:7000", "--spares", "1")
    result = CliRunner().invoke(main, ["train", job, *place, *options])
    assert result.exit_code == 2
    assert words in result.output


def test_job_whose_checkpoints_no_other_machine_finds_is_refused(job: str) -> None:
    lines = Path(job).read_text().splitlines(keepends=True)
    Path(job).write_text("".join(line for line in lines if "checkpoint_url" not in line))
    place = {"rank": 1, "world_size": 3, "coordinator": "127.0.0.1:7000"}
    with pytest.raises(ConfigError, match=r"set run\.checkpoint_url"):
        train_elastic(job, (), 1, **place, trust_code=False, say=print)


def test_only_process_is_told_to_launch(job: str) -> None:
    place = ("--rank", "0", "--world-size", "1", "--spares", "0", "-o", "pipeline.stages=1")
    result = CliRunner().invoke(main, ["train", job, *place])
    assert result.exit_code == 2
    assert "dpipe launch --spares" in result.output


@pytest.mark.parametrize(
    ("program", "words"),
    [("sys.exit(3)", r"cannot go on \(exit code 3\)"), ("os.kill(os.getpid(), 9)", "killed")],
)
def test_machine_that_does_not_stay_ends_its_process(
    program: str, words: str, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = [sys.executable, "-S", "-c", f"import os, sys; {program}"]
    monkeypatch.setattr(MachineProcess, "argv", lambda self, address, name, slot: argv)
    monkeypatch.setattr(given_processes, "_MOST_STARTS", 2)
    place = {"rank": 1, "world_size": 3, "coordinator": "127.0.0.1:7000"}
    with pytest.raises(RunError, match=words):
        train_elastic(job, (), 1, **place, trust_code=False, say=print)
