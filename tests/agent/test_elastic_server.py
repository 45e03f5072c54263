"""A parameter server by itself in an elastic run of real processes: killed, moved."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from agent.forks import STEP_S, Forks
from agent.journals import epochs, losses_of, step
from support.small_job import TEXT, small_toml

from dpipe.agent import inquiry
from dpipe.config.load import Config
from dpipe.elastic.journal import NAME, read_events
from dpipe.errors import JoinError
from dpipe.processes.launch import free_port
from dpipe.serve.announcing import announce
from dpipe.store import checkpoint
from dpipe.wire.rpc import Security

STEPS = 50  # that a run on a fast machine has not ended before the last of its faults
JOB = {"pipeline.stages": 1, "data_parallel.kind": "parameter-server", "data_parallel.replicas": 2}


@pytest.fixture
def forks(tmp_path: Path, warm_python: str) -> Iterator[Forks]:
    (tmp_path / "text.txt").write_text(TEXT)
    text = small_toml(
        train={"steps": STEPS, "learning_rate": 1e-2},
        guard={"every": 5},
        timeouts={"transfer": 60, "heartbeat": 12},
    )
    (tmp_path / "job.toml").write_text(text)
    forks = Forks(tmp_path, warm_python, STEP_S)
    yield forks
    forks.close()


class Run:
    """Two replicas, a spare, and a server that runs by itself."""

    def __init__(self, forks: Forks) -> None:
        self.forks = forks
        self.port = free_port()
        self.server_port = free_port()
        options = []
        for key, value in JOB.items():
            options += ["-o", f"{key}={value}"]
        options += ["-o", f'data_parallel.address="127.0.0.1:{self.server_port}"']
        self._job = ("job.toml", *options)
        self.serve("server", self.server_port)
        self.coordinate()
        for number in range(3):
            forks.start(f"m{number}", "join", f"127.0.0.1:{self.port}", "--name", f"m{number}")

    def coordinate(self) -> None:
        bind = ("--bind", f"127.0.0.1:{self.port}", "--patience", "1")
        self.forks.start("coordinator", "coordinate", *self._job, *bind)

    def serve(self, name: str, port: int, *options: str) -> None:
        folder = ("-o", f'run.folder="runs/{name}"')
        bind = ("--bind", f"127.0.0.1:{port}")
        self.forks.start(name, "serve", *self._job, *folder, *bind, *options)

    def reach(self, wanted: int) -> None:
        self.forks.wait_until(lambda: step(self.forks) >= wanted, f"step {wanted}")

    def rank(self, number: int) -> str:
        """Who has it."""
        status = inquiry.status(f"127.0.0.1:{self.port}", Security("secret"))
        return next(agent.name for agent in status.agents if agent.rank == number)

    def assert_undisturbed(self, config: Config, losses: list[float]) -> None:
        assert losses_of(self.forks) == list(enumerate(losses))
        ours = self._end_of(self.forks.folder / "runs" / "run")
        theirs = self._end_of(Path(config.run.folder))
        assert ours.step == theirs.step
        for named, others in ((ours.tensors, theirs.tensors), (ours.optimizer, theirs.optimizer)):
            assert named.keys() == others.keys()
            assert all(torch.equal(named[name], others[name]) for name in named)

    @staticmethod
    def _end_of(folder: Path) -> checkpoint.Loaded:
        return checkpoint.load(str(folder / "checkpoints"), lambda name: True)


@pytest.fixture
def undisturbed(tiny: Callable[..., Config]) -> Config:
    """The same job whose server is in rank 0, in this process."""
    changes = {key.replace(".", "__"): value for key, value in JOB.items()}
    return tiny(train__steps=STEPS, **changes)


@pytest.mark.slow
def test_run_waits_for_a_server_that_was_killed_and_outlives_a_rank(
    forks: Forks, undisturbed: Config, losses: Callable[..., list[float]]
) -> None:
    run = Run(forks)
    run.reach(7)
    forks.kill("server")
    run.serve("server", run.server_port)
    run.reach(step(forks) + 3)
    assert len(epochs(forks)) == 1, "the epoch waited for it"
    forks.kill(run.rank(1))
    forks.wait_until(lambda: len(epochs(forks)) == 2, "another epoch")
    assert forks.exit_code("coordinator") == 0
    assert forks.exit_code("server") == 0
    assert "all workers have left" in forks.log("server")
    run.assert_undisturbed(undisturbed, losses(undisturbed))


@pytest.mark.slow
def test_run_goes_on_with_a_server_on_another_machine(
    forks: Forks, undisturbed: Config, losses: Callable[..., list[float]]
) -> None:
    """At another address and without its state; a coordinator that is started again knows. Then it
    moves once more, while it is there: no step is made again.
    """
    run = Run(forks)
    run.reach(7)
    forks.kill("server")
    run.serve("moved", free_port(), "--run", f"127.0.0.1:{run.port}")
    forks.wait_until(lambda: len(epochs(forks)) == 2, "another epoch")
    run.reach(epochs(forks)[-1][0] + 7)
    forks.kill("coordinator")
    run.coordinate()
    run.reach(step(forks) + 3)
    number = len(epochs(forks)) + 1
    run.serve("last", free_port(), "--run", f"127.0.0.1:{run.port}")
    forks.wait_until(lambda: len(epochs(forks)) == number, "another epoch")
    assert forks.exit_code("coordinator") == 0
    assert forks.exit_code("last") == 0
    assert "call it at 127.0.0.1" in forks.log("last")
    events = [text for _, text in read_events(forks.folder / "runs" / "run" / NAME, 1000)]
    (begun,) = [text for text in events if f"epoch {number} begins" in text]
    assert "again" not in begun
    run.assert_undisturbed(undisturbed, losses(undisturbed))


def test_server_of_no_such_run_is_refused_with_words(
    forks: Forks, tiny: Callable[..., Config]
) -> None:
    """And the run goes on."""
    port = free_port()
    forks.start("coordinator", "coordinate", "job.toml", "--bind", f"127.0.0.1:{port}")
    run = f"127.0.0.1:{port}"
    with pytest.raises(JoinError, match="this run has no parameter server by itself"):
        announce(run, tiny(), ("127.0.0.1", 7100), None, Security("secret"))
    with pytest.raises(JoinError, match="wrong token"):
        announce(run, tiny(timeouts__join=10), ("127.0.0.1", 7100), None, Security("other"))
    assert inquiry.status(run, Security("secret")).phase == "waiting"
