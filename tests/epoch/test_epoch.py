"""Epochs in one process: begun, ended at any moment, begun again, with the losses of one run."""

import ctypes
import gc
import json
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from epoch.cluster import RUN, Cluster, Epoch

from dpipe.config.load import Config
from dpipe.dataparallel.optimizer import Optimizer
from dpipe.dataparallel.torch_group import TorchGroup
from dpipe.engine.update import Update
from dpipe.epoch.assignment import ASSIGNMENT
from dpipe.paramserver.server import ParameterServer
from dpipe.report.metrics import read_rows
from dpipe.serve.standalone import FolderSnapshots
from dpipe.stage.stage import Stage
from dpipe.stage.tensor_group import TensorGroup
from dpipe.store import checkpoint
from dpipe.store.run_folder import checkpoint_url
from dpipe.store.storage import Storage
from dpipe.transport.sessions import SessionMesh
from dpipe.wire.rpc import Security

FIRST_EPOCHS = 3
NUM_LAYERS = 4  # with the embedding and the head
TORCH = {
    "data_parallel__kind": "all-reduce",
    "data_parallel__replicas": 2,
    "data_parallel__group": "torch",
}
# What a rank has of its layers
HELD: list[dict[str, Any]] = [
    {},
    {"tensor_parallel__size": 2},
    {"tensor_parallel__size": 2, "tensor_parallel__sequence_parallel": True},
    {"data_parallel__kind": "all-reduce", "data_parallel__replicas": 2},
    TORCH,
    {
        "data_parallel__kind": "local-sgd",
        "data_parallel__replicas": 2,
        "data_parallel__inner_steps": 3,
    },
    {"data_parallel__kind": "sharded", "data_parallel__replicas": 2},
    {"data_parallel__kind": "sharded", "data_parallel__replicas": 2, "data_parallel__delay": 1},
    {"data_parallel__kind": "all-reduce", "data_parallel__replicas": 2, "data_parallel__delay": 1},
    {"data_parallel__kind": "parameter-server", "data_parallel__replicas": 2},
    {
        "data_parallel__kind": "parameter-server",
        "data_parallel__replicas": 2,
        "data_parallel__servers": "per-stage",
    },
    {
        "pipeline__stages": 1,
        "tensor_parallel__size": 2,
        "data_parallel__kind": "sharded",
        "data_parallel__replicas": 2,
    },
]
Make = Callable[..., Config]
Losses = Callable[..., list[float]]


@pytest.fixture
def cluster(tiny: Make, tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    """`cluster(num_agents, **keys of the configuration)`."""
    made: list[Cluster] = []

    def make(num_agents: int = 2, **keys: Any) -> Cluster:
        url = str(tmp_path / "elastic")
        config = tiny(
            pipeline__stages=2, train__steps=8, guard__every=2, run__checkpoint_url=url
        ).with_(**keys)
        made.append(Cluster(config, num_agents))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def undisturbed(losses: Losses, tiny: Make, tmp_path: Path) -> Callable[[Config], dict[int, float]]:
    """The losses of the same job in one piece, by step; then parameters are compared."""

    def run(config: Config) -> dict[int, float]:
        own = {"run__checkpoint_url": None, "data_parallel__address": ()}
        whole = config.with_(run__folder=str(tmp_path / "whole"), **own)
        losses(whole)
        rows = read_rows(Path(whole.run.folder))
        ours = checkpoint.load(checkpoint_url(whole), lambda name: True)
        theirs = checkpoint.load(checkpoint_url(config), lambda name: True)
        assert (ours.step, ours.state["num_updates"]) == (theirs.step, theirs.state["num_updates"])
        for named, others in ((ours.tensors, theirs.tensors), (ours.optimizer, theirs.optimizer)):
            assert named.keys() == others.keys()
            assert all(torch.equal(named[name], others[name]) for name in named)
        return {row["step"]: row["loss"] for row in rows if "loss" in row}

    return run


def test_epoch_is_a_run(cluster: Callable[..., Cluster], undisturbed: Any) -> None:
    one = cluster()
    ends = one.begin([0, 1]).join()
    assert [(end.outcome, end.reason, end.last_committed) for end in ends] == [
        ("finished", "", 8)
    ] * 2
    assert one.losses == undisturbed(one.config)


def test_aborted_epoch_goes_on_from_its_own_last_step(
    cluster: Callable[..., Cluster], undisturbed: Any
) -> None:
    one = cluster()
    epoch = one.begin([0, 1])

    def on_step(agent: int, step: int) -> None:
        if step == 5:
            epoch.abort()
            return
        # A copy is taken once the last one has arrived everywhere.
        deadline = time.monotonic() + 20
        while (one.newest_held() or 0) < step - 1 and time.monotonic() < deadline:
            time.sleep(0.001)

    one.on_step = on_step
    ends = epoch.join()
    assert {end.outcome for end in ends} == {"aborted"}
    # The other may see the end of this one before its own.
    assert ends[0].reason == "a machine is gone"
    assert one.newest_held() in (4, 5)
    one.on_step = lambda agent, step: None
    assert {end.outcome for end in one.begin([1, 0]).join()} == {"finished"}
    assert one.losses == undisturbed(one.config)


class Strike:
    """Aborts the epoch under way at a call of `owner.name`, the `count`-th from now on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
        self.count = 0
        self.at: float | None = None
        self.epoch: Epoch | None = None
        inner = getattr(owner, name)

        def struck(*args: Any, **options: Any) -> Any:
            self.count -= 1
            if self.count == 0:
                # Not by this thread: it may be the one that is to be woken.
                threading.Thread(target=self._strike).start()
            return inner(*args, **options)

        monkeypatch.setattr(owner, name, struck)

    def _strike(self) -> None:
        self.at = time.monotonic()
        assert self.epoch is not None
        self.epoch.abort()


def test_run_aborted_in_every_phase_is_that_of_nobody(
    cluster: Callable[..., Cluster], undisturbed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One phase an epoch, each a little later in the run; the seed says how far into the phase."""
    draw = random.Random(1)
    one = cluster(
        train__steps=12, train__eval_every=3, train__eval_batches=1, run__checkpoint_every=4
    )
    strikes = {
        "joining": (Strike(monkeypatch, SessionMesh, "prepare"), 2),
        "first step": (Strike(monkeypatch, Stage, "forward"), 4),
        "mid-step": (Strike(monkeypatch, Stage, "backward"), 20),
        "vote": (Strike(monkeypatch, Update, "vote"), 6),
        "optimizer": (Strike(monkeypatch, Optimizer, "step"), 6),
        "evaluation": (Strike(monkeypatch, Stage, "evaluate"), 3),
        "checkpoint": (Strike(monkeypatch, Storage, "write"), 3),
    }
    ended_s = {}
    for phase, (strike, most) in strikes.items():
        strike.count = draw.randint(1, most)
        epoch = one.begin([0, 1])
        strike.epoch = epoch
        ends = epoch.join()
        assert {end.outcome for end in ends} == {"aborted"}, (phase, ends)
        assert strike.at is not None
        ended_s[phase] = time.monotonic() - strike.at
        held = one.newest_held()
    assert held is not None
    # Where the copies that the last epoch began with arrived late, none was taken before step 4.
    assert held >= 2, "it has come so far by itself"
    assert {end.outcome for end in one.begin([0, 1]).join()} == {"finished"}
    assert one.losses == undisturbed(one.config)
    # Long before any deadline; a second on a machine that does nothing else.
    assert max(ended_s.values()) < 30, ended_s


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("keys", HELD)
def test_rank_whose_machine_is_gone_is_taken_from_its_guard(
    keys: dict[str, Any], cluster: Callable[..., Cluster], undisturbed: Any
) -> None:
    spare = cluster(**keys).config.world_size
    one = cluster(num_agents=spare + 1, **keys)
    has_equal = keys.get("data_parallel__kind") == "all-reduce" and "delay" not in str(keys)
    # A replica has the last step of its equal once both have committed it.
    awaited = threading.Semaphore(spare - 1 if has_equal else 0)
    epoch = one.begin(range(spare))

    def on_step(agent: int, step: int) -> None:
        if step == 7 and not awaited.acquire(blocking=False):
            epoch.abort()

    one.on_step = on_step
    assert {end.outcome for end in epoch.join()} == {"aborted"}
    one.on_step = lambda agent, step: None
    one.keepers[1].close()
    held = one.newest_held()
    assert held in ((7,) if has_equal else (2, 4, 6)), (
        "the last step of a replica, or a guarded one"
    )
    epoch = one.begin([0, spare, *range(2, spare)])
    assert {end.outcome for end in epoch.join()} == {"finished"}
    whole = undisturbed(one.config)
    # A row comes a step late: that of the last one may have ended with the epoch.
    assert whole.keys() - one.losses.keys() <= {6}
    assert one.losses.items() <= whole.items()


@pytest.fixture
def standalone(tmp_path: Path) -> Iterator[Callable[..., ParameterServer]]:
    """`standalone(port, folder)`: a server by itself, with the token of the run."""
    servers: list[ParameterServer] = []

    def start(port: int = 0, folder: str = "server") -> ParameterServer:
        kept = {"folder": tmp_path / folder, "snapshots": FolderSnapshots()}
        servers.append(ParameterServer(port=port, security=Security("run"), **kept))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def served_by(server: ParameterServer) -> dict[str, Any]:
    return {
        "pipeline__stages": 1,
        "data_parallel__kind": "parameter-server",
        "data_parallel__replicas": 2,
        "data_parallel__address": (f"127.0.0.1:{server.port}",),
    }


@pytest.mark.slow
def test_epoch_waits_for_a_server_that_is_started_again(
    cluster: Callable[..., Cluster], undisturbed: Any, standalone: Callable[..., ParameterServer]
) -> None:
    first = standalone()
    one = cluster(num_agents=2, **served_by(first))

    def start_again(agent: int, step: int) -> None:
        if (agent, step) == (0, 3):
            first.close()
            standalone(first.port)

    one.on_step = start_again
    assert {end.outcome for end in one.begin([0, 1]).join()} == {"finished"}
    assert one.losses == undisturbed(one.config)


@pytest.mark.slow
def test_epoch_goes_on_with_a_server_elsewhere_and_without_a_machine(
    cluster: Callable[..., Cluster], undisturbed: Any, standalone: Callable[..., ParameterServer]
) -> None:
    """The new one has nothing of the run: replica 0 brings what copies were kept of."""
    first = standalone()
    one = cluster(num_agents=3, **served_by(first))
    epoch = one.begin([0, 1])

    def lose(agent: int, step: int) -> None:
        if step == 7:
            first.close()
            epoch.abort()

    one.on_step = lose
    assert {end.outcome for end in epoch.join()} == {"aborted"}
    one.on_step = lambda agent, step: None
    one.keepers[0].close()
    assert one.newest_held() in (2, 4, 6)
    config = one.config.with_(**served_by(standalone(folder="elsewhere")))
    assert {end.outcome for end in one.begin([2, 1], config=config).join()} == {"finished"}
    assert one.losses == undisturbed(one.config)


def test_server_outlives_an_epoch_that_ends_before_the_run(
    cluster: Callable[..., Cluster], standalone: Callable[..., ParameterServer]
) -> None:
    """What it has is kept by its workers; and it ends with the run."""
    server = standalone()
    one = cluster(num_agents=2, **served_by(server))
    epoch = one.begin([0, 1])
    one.on_step = lambda agent, step: epoch.controls[0].stop() if step == 3 else None
    ends = epoch.join()
    assert {end.outcome for end in ends} == {"left"}
    assert one.newest_held() == ends[0].last_committed
    assert not server.wait_until_left(0.1)
    one.on_step = lambda agent, step: None
    assert {end.outcome for end in one.begin([0, 1]).join()} == {"finished"}
    assert server.wait_until_left(10)


def test_rank_that_waits_for_its_server_can_be_aborted(
    cluster: Callable[..., Cluster], standalone: Callable[..., ParameterServer]
) -> None:
    server = standalone()
    one = cluster(num_agents=2, timeouts__connect=20, **served_by(server))
    server.close()
    epoch = one.begin([0, 1])
    time.sleep(1.0)
    began_at = time.monotonic()
    epoch.abort("it is gone")
    assert {end.outcome for end in epoch.join()} == {"aborted"}
    assert time.monotonic() - began_at < 10, "not after timeouts.connect"


def test_second_loss_goes_back_no_further_than_the_first(cluster: Callable[..., Cluster]) -> None:
    """Before the next copies are due, the guards of the new epoch have those that it began with."""
    one = cluster(num_agents=3, train__steps=1000)
    first = one.begin([0, 1])
    one.on_step = lambda agent, step: first.abort() if step == 5 else None
    assert {end.outcome for end in first.join()} == {"aborted"}
    one.keepers[1].close()
    resumed = one.newest_held()
    assert resumed is not None
    second = one.begin([0, 2], config=one.config.with_(guard__every=1000))

    def end_once_copied(agent: int, step: int) -> None:
        if all(len(one.keepers[other].held().get(resumed, ())) == NUM_LAYERS for other in (0, 2)):
            second.abort()

    one.on_step = end_once_copied
    assert {end.outcome for end in second.join()} == {"aborted"}
    one.keepers[2].close()
    assert one.newest_held() == resumed


def test_all_leave_after_the_same_step_and_others_go_on(
    cluster: Callable[..., Cluster], undisturbed: Any
) -> None:
    one = cluster(num_agents=4)
    epoch = one.begin([0, 1])
    one.on_step = lambda agent, step: (
        epoch.controls[agent].stop() if (agent, step) == (1, 3) else None
    )
    ends = epoch.join()
    assert [end.outcome for end in ends] == ["left", "left"]
    assert ends[0].last_committed == ends[1].last_committed == one.newest_held()
    one.on_step = lambda agent, step: None
    assert {end.outcome for end in one.begin([3, 2]).join()} == {"finished"}
    assert one.losses == undisturbed(one.config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [{}, {"pipeline__stages": 1, "tensor_parallel__size": 2}, {"pipeline__stages": 1, **TORCH}],
)
def test_epochs_leave_nothing_behind(keys: dict[str, Any], cluster: Callable[..., Cluster]) -> None:
    """One more of anything an epoch would show: all later ones have at most what the first had."""
    one = cluster(train__steps=1000, **keys)
    left: list[tuple[list[str], list[str]]] = []
    memory = []
    for number in range(FIRST_EPOCHS + 5):
        epoch = one.begin([0, 1])
        start = one.newest_held() or 0
        one.on_step = lambda agent, step, epoch=epoch, start=start: (
            epoch.abort() if step == start + 1 else None
        )
        assert {end.outcome for end in epoch.join()} == {"aborted"}
        # The first ones import modules and open what stays.
        firsts = zip(*left[:FIRST_EPOCHS], strict=True)
        most = [max(kind, key=len) for kind in firsts] if number >= FIRST_EPOCHS else []
        left.append(_left_behind([len(kind) for kind in most]))
        memory.append(_memory())
        assert all(len(keeper.held()) <= 5 for keeper in one.keepers)
        for now, then in zip(left[-1], most, strict=False):
            assert len(now) <= len(then), Counter(now) - Counter(then)
    assert memory[-1] - memory[FIRST_EPOCHS] < 8 << 20


def _memory() -> int:
    """Of this process, without what its allocator keeps for later: that comes and goes by ten
    megabytes and more, and over a hundred epochs it does not grow.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's
        libc.malloc_trim(0)
    return psutil.Process().memory_info().rss


def _left_behind(most: list[int]) -> tuple[list[str], list[str]]:
    """Threads and files, once they are no more than `most`: a thread that was told to end may wait
    for a core first.
    """
    deadline = time.monotonic() + 10
    while True:
        threads = [thread.name for thread in threading.enumerate()]
        files = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # the listing's own
                files.append(os.readlink(f"/proc/self/fd/{number}"))
        sizes = (len(threads), len(files))
        settled = all(now <= then for now, then in zip(sizes, most, strict=False))
        if settled or time.monotonic() > deadline:
            return threads, files
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {
                "data_parallel__kind": "parameter-server",
                "data_parallel__replicas": 2,
                "data_parallel__staleness": 1,
                "train__clip_norm": 0.0,
                "pipeline__stages": 1,
            },
            "goes on from whichever gradients have arrived",
        ),
        ({"pipeline__plan": "auto"}, "the cut that its job says"),
        ({"pipeline__split": "measured"}, "cut before anything is measured"),
        ({"pipeline__wire": "int4+feedback"}, "does not send the same twice"),
        (
            {
                "data_parallel__kind": "all-reduce",
                "data_parallel__replicas": 2,
                "data_parallel__wire": "int8",
                "pipeline__stages": 1,
            },
            "not send the same twice: set pipeline.wire or data_parallel.wire",
        ),
        ({"pipeline__schedule": "2bw"}, "where steps overlap there are two"),
    ],
)
def test_job_that_no_epoch_can_run_is_refused(
    keys: dict[str, Any], message: str, cluster: Callable[..., Cluster]
) -> None:
    one = cluster()
    config = one.config.with_(**keys)
    agents = [0] if "pipeline__split" in keys else [0, 1]
    if config.world_size != len(agents):
        config = config.with_(pipeline__stages=1)
    (end, *_) = one.begin(agents, config=config).join()
    assert end.outcome == "failed"
    assert message in end.reason


def test_assigned_ranks_must_be_those_of_the_job(cluster: Callable[..., Cluster]) -> None:
    (end,) = cluster().begin([0]).join()
    assert (end.outcome, end.last_committed) == ("failed", None)
    assert end.reason == "the job needs 2 ranks, and 1 were assigned"


def test_epoch_that_was_aborted_before_it_began_meets_nobody(
    cluster: Callable[..., Cluster],
) -> None:
    one = cluster()
    epoch = one.begin([0, 1], prepare=lambda control: control.abort("too late"))
    assert [(end.outcome, end.reason) for end in epoch.join()] == [("aborted", "too late")] * 2


def test_rank_that_waits_for_others_to_join_can_be_aborted(
    cluster: Callable[..., Cluster],
) -> None:
    one = cluster()
    epoch = one.begin([0, 1], absent=[1])
    time.sleep(1.0)
    began_at = time.monotonic()
    epoch.abort("they never came")
    (end,) = epoch.join()
    assert (end.outcome, "they never came" in end.reason) == ("aborted", True)
    assert time.monotonic() - began_at < 10, "not after timeouts.join"


def test_rank_that_looks_for_its_coordinator_can_be_aborted(
    cluster: Callable[..., Cluster],
) -> None:
    one = cluster()
    epoch = one.begin([0, 1], absent=[1], coordinator="127.0.0.1:1")
    time.sleep(1.0)
    epoch.abort("it is gone")
    (end,) = epoch.join()
    assert (end.outcome, end.reason) == ("aborted", "it is gone")


GROUPS = [
    (
        "dpipe.run.tensor_groups.TensorGroup",
        TensorGroup,
        {"pipeline__stages": 1, "tensor_parallel__size": 2},
    ),
    (
        "dpipe.run.agreement.TorchGroup",
        TorchGroup,
        {"pipeline__stages": 1, **TORCH},
    ),
]


@pytest.mark.parametrize(("place", "kind", "keys"), GROUPS)
def test_rank_that_waits_for_its_group_can_be_aborted(
    place: str,
    kind: Any,
    keys: dict[str, Any],
    cluster: Callable[..., Cluster],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of which the other rank is gone: torch would wait for it until its timeout."""
    opening = threading.Event()
    over = threading.Event()
    is_second = iter([False, True])

    def opened(*args: Any, **options: Any) -> Any:
        if next(is_second):
            opening.set()
            over.wait(20)
        return kind(*args, **options)

    monkeypatch.setattr(place, opened)
    one = cluster(timeouts__transfer=20, **keys)
    epoch = one.begin([0, 1])
    assert opening.wait(20)
    began_at = time.monotonic()
    epoch.abort("it is gone")
    ends = epoch.join()
    assert time.monotonic() - began_at < 10, "not after timeouts.transfer"
    assert {end.outcome for end in ends} == {"aborted"}
    over.set()


def test_layer_that_nobody_holds_aborts_the_epoch_of_its_rank(
    cluster: Callable[..., Cluster],
) -> None:
    one = cluster()
    (end,) = one.begin([0, 1], absent=[1], resume_step=4).join()
    assert end.outcome == "aborted"
    assert end.reason == "layer 0 before step 4 cannot be fetched: nobody holds it"


def test_epoch_goes_on_from_a_checkpoint(cluster: Callable[..., Cluster], undisturbed: Any) -> None:
    one = cluster(run__checkpoint_every=2)
    epoch = one.begin([0, 1])
    one.on_step = lambda agent, step: epoch.abort() if step == 5 else None
    epoch.join()
    one.on_step = lambda agent, step: None
    for keeper in one.keepers:
        keeper.fence(1, newest=-1)
    epoch = one.begin([0, 1], checkpoint=True)
    assert {end.outcome for end in epoch.join()} == {"finished"}
    assert one.losses == undisturbed(one.config)


def test_gradient_that_is_not_finite_would_come_again(cluster: Callable[..., Cluster]) -> None:
    one = cluster(train__learning_rate=1e30, train__clip_norm=1e30)
    ends = one.begin([0, 1]).join()
    assert "failed" in {end.outcome for end in ends}
    assert any("is not finite" in end.reason for end in ends)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2}, "rank 2 of 2"),
        ({"resume_step": 3, "checkpoint": True}, "not from both"),
        ({"token": ""}, "token"),
        ({"guards": ["here"]}, "guards"),
        ({"start": "1"}, "start"),
    ],
)
def test_assignment_of_another_shape_is_refused(change: dict[str, Any], message: str) -> None:
    table = {
        "epoch": 1,
        "rank": 0,
        "world_size": 2,
        "config": {},
        "coordinator": "127.0.0.1:7000",
        "token": "secret",
        "run": RUN,
        "start": "0" * 16,
    }
    assert ASSIGNMENT.read(json.dumps(table).encode()).resume_step is None
    with pytest.raises(ValueError, match=message):
        ASSIGNMENT.read(json.dumps(table | change).encode())
