"""Elastic runs in real processes: whatever is killed, the losses are those of a run that nothing
happened to, in every bit.
"""

import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from agent.forks import STEP_S, Forks
from agent.journals import epochs, losses_of, step
from support.small_job import TEXT, small_toml

from dpipe.agent import inquiry
from dpipe.config.load import Config
from dpipe.processes.launch import free_port
from dpipe.store import checkpoint
from dpipe.wire.rpc import Security

STEPS = 60  # that a run on a fast machine has not ended before the last of its faults
STARTING_S = 1.0  # of a step, while a machine starts
PARTS_STEPS = 40
PHASES_STEPS = 50  # where the last machine joins once all others have gone


@pytest.fixture
def forks(tmp_path: Path, warm_python: str) -> Iterator[Forks]:
    (tmp_path / "text.txt").write_text(TEXT)
    text = small_toml(
        train={"steps": STEPS, "learning_rate": 1e-2},
        pipeline={"stages": 4},
        guard={"every": 5},
        timeouts={"transfer": 60, "heartbeat": 30},
    )
    (tmp_path / "job.toml").write_text(text)
    forks = Forks(tmp_path, warm_python, STEP_S)
    yield forks
    forks.close()


def seats(port: int) -> list[str]:
    """By rank, who has it."""
    status = inquiry.status(f"127.0.0.1:{port}", Security("secret"))
    by_rank = {agent.rank: agent.name for agent in status.agents}
    by_rank.pop(None, None)
    return [by_rank[rank] for rank in sorted(by_rank)]


@dataclass(frozen=True)
class Undisturbed:
    losses: list[float]
    end: checkpoint.Loaded


@pytest.fixture(scope="module")
def kept() -> list[Undisturbed]:
    return []


@pytest.fixture
def undisturbed(
    kept: list[Undisturbed], tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> Undisturbed:
    """The same job on one rank, in this process; run for the first test that asks."""
    if not kept:
        config = tiny(train__steps=STEPS, pipeline__stages=1)
        kept.append(Undisturbed(losses(config), end_of(Path(config.run.folder))))
    return kept[0]


def end_of(folder: Path) -> checkpoint.Loaded:
    """The newest checkpoint of a run, whole."""
    return checkpoint.load(str(folder / "checkpoints"), lambda name: True)


def assert_same_bits(ours: checkpoint.Loaded, theirs: checkpoint.Loaded) -> None:
    """Parameters, and the optimizer's state."""
    assert ours.step == theirs.step
    for named, others in ((ours.tensors, theirs.tensors), (ours.optimizer, theirs.optimizer)):
        assert named.keys() == others.keys()
        assert all(torch.equal(named[name], others[name]) for name in named)


@pytest.mark.slow
def test_run_outlives_its_machines_and_its_coordinator(
    forks: Forks, undisturbed: Undisturbed
) -> None:
    """Four ranks and a spare. A rank is killed, then the coordinator; a rank is asked to leave
    while another machine joins; a rank is killed for which there is no other.
    """
    port = free_port()
    coordinate = ("coordinate", "job.toml", "--bind", f"127.0.0.1:{port}", "--patience", "1")
    forks.start("coordinator", *coordinate)
    for number in range(5):
        forks.start(f"m{number}", "join", f"127.0.0.1:{port}", "--name", f"m{number}")
    forks.wait_until(lambda: step(forks) >= 7, "some steps")

    seated = seats(port)
    forks.kill(seated[1])
    killed_at = step(forks)
    forks.wait_until(lambda: step(forks) >= killed_at + 5, "steps without the one that was killed")

    forks.kill("coordinator")
    forks.start("coordinator", *coordinate)
    killed_at = step(forks)
    forks.wait_until(lambda: step(forks) >= killed_at + 5, "steps with another coordinator")

    forks.pace(STARTING_S)
    forks.start("m5", "join", f"127.0.0.1:{port}", "--name", "m5")
    forks.kill(seated[2], signal.SIGTERM)
    assert forks.exit_code(seated[2]) == 0
    forks.wait_until(lambda: epochs(forks)[-1][1] == 4, "the newcomer to have a rank")
    forks.pace(STEP_S)

    last = seats(port)[3]
    forks.kill(last)
    forks.wait_until(lambda: epochs(forks)[-1][1] == 3, "a run of three ranks")
    assert forks.exit_code("coordinator") == 0
    for number in range(6):
        name = f"m{number}"
        if name not in (seated[1], last):
            assert forks.exit_code(name) == 0
    assert [ranks for _, ranks in epochs(forks)] == [4, 4, 4, 4, 3]
    assert (forks.folder / "runs" / "run" / "report.html").exists()
    assert losses_of(forks) == list(enumerate(undisturbed.losses))
    assert_same_bits(end_of(forks.folder / "runs" / "run"), undisturbed.end)


@pytest.mark.slow
def test_second_loss_comes_while_two_neighbours_are_being_replaced(
    forks: Forks, undisturbed: Undisturbed
) -> None:
    """And a rank that is stopped for a while is waited for."""
    port = free_port()
    forks.start("coordinator", "coordinate", "job.toml", "--bind", f"127.0.0.1:{port}")
    for number in range(7):
        forks.start(f"m{number}", "join", f"127.0.0.1:{port}", "--name", f"m{number}")
    forks.wait_until(lambda: step(forks) >= 7, "some steps")
    first = seats(port)
    for neighbour in first[1:3]:
        forks.kill(neighbour)
    forks.wait_until(lambda: len(epochs(forks)) == 2, "another epoch")
    (newcomer, *_) = set(seats(port)) - set(first)
    forks.kill(newcomer)
    forks.wait_until(lambda: len(epochs(forks)) == 3, "a third epoch")

    begun_at = epochs(forks)[-1][0]
    forks.wait_until(lambda: step(forks) >= begun_at + 3, "steps after both losses")
    paused = seats(port)[0]
    forks.stop(paused)
    time.sleep(2.0)
    forks.wake(paused)
    assert forks.exit_code("coordinator") == 0
    assert [ranks for _, ranks in epochs(forks)] == [4, 4, 4]
    assert losses_of(forks) == list(enumerate(undisturbed.losses))
    assert_same_bits(end_of(forks.folder / "runs" / "run"), undisturbed.end)


PARTS = {
    "tensor parallelism": {"tensor_parallel.size": 2},
    "all-reduce": {"data_parallel.kind": "all-reduce", "data_parallel.replicas": 2},
    "sharded": {"data_parallel.kind": "sharded", "data_parallel.replicas": 2},
    "local-sgd": {
        "data_parallel.kind": "local-sgd",
        "data_parallel.replicas": 2,
        "data_parallel.inner_steps": 7,
    },
    "parameter server": {"data_parallel.kind": "parameter-server", "data_parallel.replicas": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", PARTS)
def test_ranks_that_have_layers_together_are_replaced(
    parts: str, forks: Forks, tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    """Two stages of two ranks and a spare. One rank is killed, then one for which there is no
    other.
    """
    keys = {"train.steps": PARTS_STEPS, **PARTS[parts]}
    options = [word for key, value in keys.items() for word in ("-o", f"{key}={value}")]
    port = free_port()
    bind = ("--bind", f"127.0.0.1:{port}", "--patience", "1")
    forks.start("coordinator", "coordinate", "job.toml", "-o", "pipeline.stages=2", *options, *bind)
    for number in range(5):
        forks.start(f"m{number}", "join", f"127.0.0.1:{port}", "--name", f"m{number}")
    forks.wait_until(lambda: step(forks) >= 7, "some steps")
    forks.kill(seats(port)[1])
    forks.wait_until(lambda: len(epochs(forks)) == 2, "another epoch")
    begun_at = epochs(forks)[-1][0]
    forks.wait_until(lambda: step(forks) >= begun_at + 7, "steps without the one that was killed")
    forks.kill(seats(port)[2])
    assert forks.exit_code("coordinator") == 0
    assert [ranks for _, ranks in epochs(forks)] == [4, 4, 2]
    changes = {key.replace(".", "__"): value for key, value in keys.items()}
    whole = tiny(pipeline__stages=1, **changes)
    assert losses_of(forks) == list(enumerate(losses(whole)))
    assert_same_bits(end_of(forks.folder / "runs" / "run"), end_of(Path(whole.run.folder)))


@pytest.mark.slow
def test_clocks_that_jump_end_nothing(forks: Forks, undisturbed: Undisturbed) -> None:
    """Neither the coordinator's nor a machine's: all deadlines are those of clocks that do not."""
    port = free_port()
    coordinate = ("coordinate", "job.toml", "-o", "pipeline.stages=2")
    forks.start_jumping("coordinator", *coordinate, "--bind", f"127.0.0.1:{port}")
    forks.start_jumping("m0", "join", f"127.0.0.1:{port}", "--name", "m0")
    forks.start("m1", "join", f"127.0.0.1:{port}", "--name", "m1")
    assert forks.exit_code("coordinator") == 0
    assert [forks.exit_code(name) for name in ("m0", "m1")] == [0, 0]
    assert epochs(forks) == [(0, 2)], "nobody was taken for lost"
    assert losses_of(forks) == list(enumerate(undisturbed.losses))


PHASES = {
    "joining": ("dpipe.transport.sessions.SessionMesh.prepare", 1),
    "first step": ("dpipe.stage.stage.Stage.forward", 3),
    "mid-step": ("dpipe.stage.stage.Stage.backward", 10),
    "vote": ("dpipe.engine.update.Update.vote", 3),
    "optimizer": ("dpipe.dataparallel.optimizer.Optimizer.step", 3),
    "evaluation": ("dpipe.stage.stage.Stage.evaluate", 1),
    "checkpoint": ("dpipe.store.storage.Storage.write", 1),
}


def start_with_one_that_stays(forks: Forks, keys: Sequence[str]) -> tuple[str, ...]:
    """A coordinator, and the first machine. Returns the command of another, up to its name."""
    options = [word for key in keys for word in ("-o", key)]
    port = free_port()
    forks.start("coordinator", "coordinate", "job.toml", *options, "--bind", f"127.0.0.1:{port}")
    join = ("join", f"127.0.0.1:{port}", "--name")
    forks.start("stays", *join, "stays")
    return join


def test_machine_is_killed_in_every_phase(
    forks: Forks, tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    """Two ranks; one machine stays, all others kill themselves, each in a phase of its own."""
    steps = f"train.steps={PHASES_STEPS}"
    keys = (steps, "train.eval_every=3", "train.eval_batches=1", "run.checkpoint_every=4")
    url = f'run.checkpoint_url="{forks.folder}/elastic"'
    join = start_with_one_that_stays(forks, (*keys, "pipeline.stages=2", url))
    for phase, (where, count) in PHASES.items():
        forks.start_doomed(phase, where, count, *join, phase)
    forks.wait_until(lambda: all(map(forks.has_ended, PHASES)), "all to be killed", 120)
    forks.start("last", *join, "last")
    assert forks.exit_code("coordinator") == 0
    assert [forks.exit_code(phase) for phase in PHASES] == [-signal.SIGKILL] * len(PHASES)
    whole = tiny(
        train__steps=PHASES_STEPS,
        train__eval_every=3,
        train__eval_batches=1,
        run__checkpoint_every=4,
    )
    assert losses_of(forks) == list(enumerate(losses(whole)))


GROUPS = {
    "tensor-parallel": (
        {"tensor_parallel.size": 2},
        {
            "forming its group": ("dpipe.stage.tensor_group.TensorGroup.__init__", 1),
            "in a collective": ("dpipe.stage.tensor_group.TensorGroup.all_reduce", 20),
        },
    ),
    "torch's, of replicas": (
        {
            "data_parallel.kind": "all-reduce",
            "data_parallel.replicas": 2,
            "data_parallel.group": "torch",
        },
        {
            "forming its group": ("dpipe.dataparallel.torch_group.TorchGroup.__init__", 1),
            "in a collective": ("dpipe.dataparallel.torch_group.TorchGroup._end", 20),
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GROUPS)
def test_rank_of_a_group_is_killed_in_its_phases(
    kind: str, forks: Forks, tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    """Long before timeouts.transfer the other one goes on with the next."""
    keys, phases = GROUPS[kind]
    options = [f"{key}={value}" for key, value in keys.items()]
    job = (f"train.steps={PHASES_STEPS}", "pipeline.stages=1", *options)
    join = start_with_one_that_stays(forks, job)
    for phase, (where, count) in phases.items():
        forks.start_doomed(phase, where, count, *join, phase)
        forks.wait_until(lambda phase=phase: forks.has_ended(phase), f"{phase} to be killed", 40)
    forks.start("last", *join, "last")
    assert forks.exit_code("coordinator") == 0
    assert [forks.exit_code(phase) for phase in phases] == [-signal.SIGKILL] * 2
    changes = {key.replace(".", "__"): value for key, value in keys.items()}
    whole = tiny(train__steps=PHASES_STEPS, **changes)
    assert losses_of(forks) == list(enumerate(losses(whole)))
