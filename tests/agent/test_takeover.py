"""A standby takes over a run whose coordinator's machine is gone, or only seems to be."""

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from agent.forks import STEP_S, Forks
from agent.journals import step
from support.object_store import bucket
from support.small_job import TEXT, small_toml

from dpipe.config.load import Config
from dpipe.processes.launch import free_port
from dpipe.report.metrics import read_rows
from dpipe.store import checkpoint

STEPS = 50
HEARTBEAT_S = 12  # so that a standby waits for 3 s


@pytest.fixture
def shared(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """run.checkpoint_url."""
    if getattr(request, "param", "folder") == "folder":
        yield f"{tmp_path}/shared"
        return
    with bucket("shared") as url:
        yield f"{url}/run"


@pytest.fixture
def forks(tmp_path: Path, warm_python: str, shared: str) -> Iterator[Forks]:
    (tmp_path / "text.txt").write_text(TEXT)
    text = small_toml(
        train={"steps": STEPS, "learning_rate": 1e-2},
        pipeline={"stages": 2},
        guard={"every": 5},
        timeouts={"transfer": 60, "heartbeat": HEARTBEAT_S},
        run={"checkpoint_url": shared},
    )
    (tmp_path / "job.toml").write_text(text)
    forks = Forks(tmp_path, warm_python, STEP_S)
    yield forks
    forks.close()


def begin(forks: Forks) -> None:
    """A coordinator with a standby, and two machines, in the midst of a run."""
    port = free_port()
    other = free_port()
    coordinate = ("coordinate", "job.toml", "--bind")
    forks.start("first", *coordinate, f"127.0.0.1:{port}")
    for number in range(2):
        forks.start(f"m{number}", "join", f"127.0.0.1:{port}", "--name", f"m{number}")
    folder = 'run.folder="runs/standby"'
    forks.start("standby", *coordinate, f"127.0.0.1:{other}", "--standby", "-o", folder)
    forks.wait_until(lambda: step(forks) >= 12, "some steps")
    forks.wait_until(lambda: "standing by" in forks.log("standby"), "the standby")


def assert_undisturbed(forks: Forks, shared: str, config: Config, losses: list[float]) -> None:
    """What the standby has of the run is what one rank makes of the job."""
    rows = read_rows(forks.folder / "runs" / "standby")
    assert [(row["step"], row["loss"]) for row in rows if "loss" in row] == [*enumerate(losses)]
    ours = checkpoint.load(shared, lambda name: True)
    theirs = checkpoint.load(f"{config.run.folder}/checkpoints", lambda name: True)
    assert ours.step == theirs.step
    for named, others in ((ours.tensors, theirs.tensors), (ours.optimizer, theirs.optimizer)):
        assert named.keys() == others.keys()
        assert all(torch.equal(named[name], others[name]) for name in named)


@pytest.mark.slow
def test_coordinator_that_was_stopped_is_no_second_truth(
    forks: Forks, shared: str, tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    """SIGSTOP until another has taken over; then it answers nobody, and says who has the run."""
    begin(forks)
    forks.stop("first")
    forks.wait_until(lambda: "taking over, as term 2" in forks.log("standby"), "the standby")
    forks.wake("first")
    assert forks.exit_code("first") == 1
    assert "has taken this run over, in term 2: this one has stopped" in forks.log("first")
    # Nor does it where it is started again.
    stale = len(read_rows(forks.folder / "runs" / "run"))
    forks.start("again", "coordinate", "job.toml", "--bind", f"127.0.0.1:{free_port()}")
    assert forks.exit_code("again") == 2
    assert "has taken this run over (term 2): with --standby" in forks.log("again")
    assert forks.exit_code("standby") == 0
    assert [forks.exit_code(f"m{number}") for number in range(2)] == [0, 0]
    assert len(read_rows(forks.folder / "runs" / "run")) == stale
    config = tiny(train__steps=STEPS, pipeline__stages=1)
    assert_undisturbed(forks, shared, config, losses(config))


@pytest.mark.slow
def test_standby_goes_on_at_once_where_the_coordinator_is_asked_to_stop(
    forks: Forks, shared: str
) -> None:
    """And one that waits to the end of the run says how it ended, and leaves nothing behind."""
    begin(forks)
    forks.kill("first", signal.SIGINT)
    assert forks.exit_code("first") == 0
    forks.wait_until(lambda: "has left; taking over" in forks.log("standby"), "the standby", 3.0)
    options = ("--standby", "-o", 'run.folder="runs/third"')
    forks.start("third", "coordinate", "job.toml", "--bind", f"127.0.0.1:{free_port()}", *options)
    assert forks.exit_code("standby") == 0
    assert forks.exit_code("third") == 0
    assert f"the run at {shared} has finished" in forks.log("third")
    assert not (forks.folder / "runs" / "third").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "shared", ["folder", pytest.param("s3", marks=pytest.mark.daemon)], indirect=True
)
def test_run_outlives_its_coordinators_machine(
    forks: Forks, shared: str, tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    """SIGKILL, and its folder is gone with it."""
    begin(forks)
    forks.kill("first")
    shutil.rmtree(forks.folder / "runs" / "run")
    assert forks.exit_code("standby") == 0
    assert [forks.exit_code(f"m{number}") for number in range(2)] == [0, 0]
    config = tiny(train__steps=STEPS, pipeline__stages=1)
    assert_undisturbed(forks, shared, config, losses(config))
    assert (forks.folder / "runs" / "standby" / "report.html").exists()
