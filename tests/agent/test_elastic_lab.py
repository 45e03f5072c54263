"""Elastic runs over the kernel's network: a partition, and links full of data. As root."""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent.forks import Forks
from agent.journals import epochs, losses_of, step
from support.small_job import TEXT, small_toml

from dpipe.elastic.journal import NAME, read_events
from netem import lab as labs
from netem.lab import Lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.usefixtures("possible"),
    pytest.mark.timeout(300),
]

PORT = 7100
SLOW = "delay_ms = 5\nbandwidth_gbps = 0.01\n"


@pytest.fixture
def forks(tmp_path: Path, warm_python: str) -> Iterator[Forks]:
    forks = Forks(tmp_path, warm_python)
    yield forks
    forks.close()


@pytest.fixture
def lab(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    """A coordinator's host and three others, with links of `request.param`, if any."""
    name = f"e{os.getpid()}"
    profile = None
    if request.param:
        profile = tmp_path / "profile.toml"
        profile.write_text(request.param)
    # What its router carries is measured as a lab comes up: far more than these links ask for.
    monkeypatch.setattr(labs, "measured", lambda lab: lab)
    yield labs.up(name, 4, profile)
    labs.down(name)


def start(forks: Forks, lab: Lab, job: str) -> None:
    (forks.folder / "text.txt").write_text(TEXT)
    (forks.folder / "job.toml").write_text(job)
    argv = ("coordinate", "job.toml", "--bind", f"{lab.addresses[0]}:{PORT}")
    forks.start("coordinator", *argv, host=lab.hosts[0])


def join(forks: Forks, lab: Lab, number: int) -> None:
    argv = ("join", f"{lab.addresses[0]}:{PORT}", "--name", f"m{number}", "--wait", "8")
    forks.start(f"m{number}", *argv, host=lab.hosts[1 + number])


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize("lab", [""], indirect=True)
def test_one_side_of_a_partition_goes_on_and_the_other_stops(forks: Forks, lab: Lab) -> None:
    """The one rank of a run, whose steps need nobody else's vote, is parted from the coordinator
    and a spare: it has stopped by itself before the spare has its rank.
    """
    job = small_toml(
        train={"steps": 100_000},
        pipeline={"stages": 1},
        run={"checkpoint_every": 20, "checkpoint_url": f"{forks.folder}/shared"},
        timeouts={"heartbeat": 6},
    )
    start(forks, lab, job)
    join(forks, lab, 0)
    forks.wait_until(lambda: step(forks) >= 0, "a step of the first machine")
    join(forks, lab, 1)
    journal = forks.folder / "runs" / "run" / NAME
    forks.wait_until(lambda: len(read_events(journal, 10)) == 3, "a spare, behind rank and epoch")
    labs.part(lab, [1])
    stopped_at: list[float] = []
    begun_at: list[float] = []

    def both() -> bool:
        if "epoch 1 ends: " in forks.log("m0") and not stopped_at:
            stopped_at.append(time.monotonic())
        if len(epochs(forks)) == 2 and not begun_at:
            begun_at.append(time.monotonic())
        return bool(stopped_at and begun_at)

    forks.wait_until(both, "one side to stop, and the other to go on")
    assert stopped_at < begun_at
    (_, (resumed_at, _)) = epochs(forks)
    assert resumed_at > 0
    assert forks.exit_code("m0") == 1
    assert "the coordinator has not come back for 8 s" in forks.log("m0")
    forks.wait_until(lambda: step(forks) > resumed_at + 20, "steps of the other side")
    assert len(epochs(forks)) == 2
    # Rows of what the parted rank still made, and its checkpoint has, may be lost with it.
    steps = [number for number, _ in losses_of(forks)]
    assert steps == sorted(set(steps))


@pytest.mark.slow
@pytest.mark.waits
@pytest.mark.parametrize("lab", [SLOW], indirect=True)
def test_links_full_of_data_lose_nobody(forks: Forks, lab: Lab) -> None:
    """An activation takes 3.4 s, longer than a connection may be silent (2.5 s), and both links are
    full of them, and of copies, all the time.
    """
    job = small_toml(
        model={"width": 256, "context": 128},
        train={"steps": 1, "batch_size": 64, "num_microbatches": 2},
        pipeline={"stages": 2},
        guard={"every": 1},
        timeouts={"heartbeat": 20, "transfer": 120},
    )
    start(forks, lab, job)
    for number in range(3):
        join(forks, lab, number)
    assert forks.exit_code("coordinator", 120.0) == 0
    assert [ranks for _, ranks in epochs(forks)] == [2]
    assert [forks.exit_code(f"m{number}") for number in range(3)] == [0, 0, 0]
