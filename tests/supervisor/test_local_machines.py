"""`dpipe launch --spares`: the machines of a run as processes of this one."""

import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread

import pytest
from agent.forks import Forks
from click.testing import CliRunner
from support.small_job import TEXT, small_toml

from dpipe.agent.coordinate import coordinate
from dpipe.cli.main import main
from dpipe.config.load import Config, load
from dpipe.errors import RunError
from dpipe.report.metrics import read_rows
from dpipe.supervisor.local_machines import LocalMachines
from dpipe.supervisor.machine_process import MachineProcess

STEPS = 80  # that a run on a fast machine has not ended when it is told to stop


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT)
    changes = {"train": {"steps": STEPS, "learning_rate": 1e-2}, "guard": {"every": 5}}
    text = small_toml(pipeline={"stages": 2}, timeouts={"heartbeat": 30}, **changes)
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


def local(config: Config, spares: int, say: Callable[[str], None] = print) -> LocalMachines:
    process = MachineProcess(config.node, "secret", wait_s=10.0, leave_s=10.0)
    return LocalMachines(process, config.world_size + spares, say=say)


@pytest.mark.usefixtures("warm_ranks")
def test_rank_that_is_killed_is_replaced_and_no_loss_changes(
    job: str, undisturbed: list[float], forks: Forks
) -> None:
    said: list[str] = []
    machines = local(load(job), 1, said.append)
    run = Thread(
        target=coordinate,
        args=(job, (), "127.0.0.1:0"),
        kwargs={"patience_s": 60.0, "say": said.append, "token": "secret", "machines": machines},
    )
    run.start()
    try:
        forks.wait_until(lambda: len(rows()) >= 6, "some steps")
        machines._machines[0].process.send_signal(signal.SIGKILL)
        run.join(100)
    finally:
        machines.close()
    assert not run.is_alive()
    assert "machine-0 has ended (SIGKILL); machine-3 takes its place" in said
    assert said[-1].endswith("/runs/run has finished")
    assert rows() == list(enumerate(undisturbed))


@pytest.mark.slow
def test_run_that_is_stopped_goes_on_where_it_was(
    job: str, undisturbed: list[float], forks: Forks
) -> None:
    forks.start("launch", "launch", job, "--spares", "0")
    forks.wait_until(lambda: len(rows()) >= 6, "some steps")
    forks.kill("launch", signal.SIGTERM)
    assert forks.exit_code("launch") == 0
    said = forks.log("launch")
    step = len(rows())
    assert step < STEPS
    assert f"the same command goes on from the checkpoint of step {step}" in said
    forks.start("again", "launch", job, "--spares", "0")
    assert forks.exit_code("again") == 0
    assert rows() == list(enumerate(undisturbed))


def test_machines_that_end_as_fast_as_they_are_started_end_the_run(
    job: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    why = [sys.executable, "-c", "import sys; sys.exit('no such device')"]
    monkeypatch.setattr(MachineProcess, "argv", lambda self, address, name, slot: why)
    machines = local(load(job), 0)
    machines.start(7000, tmp_path)

    def look_for_ever() -> None:
        while True:
            machines.look(newest_step=0)

    with pytest.raises(RunError, match=r"(?s)6 machines have ended without a step.*no such device"):
        look_for_ever()
    machines.close()


def test_node_of_the_job_is_told_to_machines_but_no_secret(job: str) -> None:
    config = load(job, ("node.threads=3", "node.token=secret"))
    process = MachineProcess(config.node, "secret", wait_s=10.0, leave_s=10.0)
    argv = process.argv("127.0.0.1:7000", "machine-0", 0)
    assert "node.threads=3" in argv
    assert not [word for word in argv if "secret" in word]


@pytest.mark.parametrize(
    ("options", "words"), [(("--resume", "runs/run"), "without --resume"), (("-n", "3"), "CONFIG")]
)
def test_options_that_spares_leave_no_room_for_are_refused(
    options: tuple[str, ...], words: str, job: str
) -> None:
    result = CliRunner().invoke(main, ["launch", job, "--spares", "1", *options])
    assert result.exit_code == 2
    assert words in result.output
