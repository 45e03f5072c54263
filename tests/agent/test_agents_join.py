"""Agents and the coordinator over real connections in this process; training is a fake."""

import gc
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from operator import le
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from dpipe.agent import control_stream, inquiry, process
from dpipe.agent.process import AgentProcess
from dpipe.agent.rows import RunRows
from dpipe.agent.server import ElasticServer
from dpipe.agent.serving import Serving
from dpipe.config.run import NodeConfig
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.elastic.messages import METHOD
from dpipe.epoch.assignment import AssignedRun, Assignment
from dpipe.epoch.control import EpochControl
from dpipe.epoch.epoch import EpochEnd
from dpipe.errors import JoinError
from dpipe.keeper.client import KeeperClient
from dpipe.keeper.copies import PieceCopy
from dpipe.keeper.keeper import Keeper
from dpipe.report.metrics import read_rows
from dpipe.wire.rpc import Security, open_channel, token_metadata

TOKEN = Security("secret")
RUN = AssignedRun(id="0123456789abcdef", folder="run", host="here")
WAIT_S = 30.0
FIRST_ROUNDS = 4


def fake_job(world_size: int = 2, num_steps: int = 1_000_000) -> Any:
    rows = SimpleNamespace(
        begin=lambda step: None,
        take=lambda row: None,
        hear=lambda step, loss: None,
        fill=lambda end: None,
        first_missing=0,
        newest={},
    )
    return SimpleNamespace(
        run=RUN,
        servers=(),
        num_pieces=4,
        group_size=1,
        world_size=world_size,
        num_steps=num_steps,
        rows=rows,
        config=lambda ranks: {},
        layer_costs=lambda ranks: "",
        memory_bytes=lambda ranks: 1000,
        fewer=lambda num_agents: None,
        pays=lambda ranks, more, steps_left: False,
        checkpoint=lambda: None,
        take_upload=lambda rank, kind, payload: None,
    )


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.01)


def train(
    assignment: Assignment,
    keeper: Keeper,
    *,
    control: EpochControl,
    committed: Callable[[int, float | None], None],
    **_: Any,
) -> EpochEnd:
    """Steps without a model, until it is asked to stop."""
    aborted = threading.Event()
    step = assignment.resume_step or 0
    control.on_abort("train", lambda error: aborted.set())
    while not control.wants_stop():
        step += 1
        committed(step, None)
        if aborted.wait(0.02):
            return EpochEnd("aborted", "asked to", step)
    return EpochEnd("left", "", step)


def train_guarded(
    assignment: Assignment,
    keeper: Keeper,
    *,
    control: EpochControl,
    committed: Callable[[int, float | None], None],
    **_: Any,
) -> EpochEnd:
    """One rank, which sends the copies of its two guarded layers before each step, until it is
    told to end. The first epoch, which has no spares, only waits for its end.
    """
    aborted = threading.Event()
    control.on_abort("train", lambda error: aborted.set())
    step = assignment.resume_step or 0
    if assignment.epoch == 1:
        aborted.wait(WAIT_S)
        return EpochEnd("aborted", "spares have come", step)
    while not aborted.wait(0.002):
        copies = [PieceCopy(step, layer, bytes(1000)) for layer in range(2)]
        keeper.hold(copies)
        for address in assignment.guards:
            with KeeperClient(address, TOKEN) as client:
                for copy in copies:
                    client.put(assignment.epoch, copy, kept=[max(0, step - 1)])
        keeper.agree(assignment.epoch, step)
        step += 1
        committed(step, None)
    return EpochEnd("aborted", "asked to", step)


class Place:
    """A coordinator, and agents in threads."""

    def __init__(self, folder: Path, job: Any = None) -> None:
        self.journal = RunJournal(folder / NAME)
        serving = Serving(security=TOKEN, heartbeat_s=20.0, patience_s=60.0)
        self.server = ElasticServer(job or fake_job(), self.journal, serving)
        self.address = f"127.0.0.1:{self.server.port}"
        self.ends: dict[str, BaseException | None] = {}
        self.agents: dict[str, AgentProcess] = {}
        self._threads: list[threading.Thread] = []

    def agent(self, name: str, **changes: Any) -> AgentProcess:
        settings: dict[str, Any] = {
            "name": name,
            "memory_bytes": 1 << 30,
            "silence_s": 20.0,
            "wait_s": 5.0,
        }
        security = changes.pop("security", TOKEN)
        keeper = changes.pop("keeper", None) or Keeper(security=TOKEN)
        settings |= {"train": train} | changes
        agent = AgentProcess(self.address, keeper, NodeConfig(), security, **settings)
        self.agents[name] = agent

        def run() -> None:
            try:
                agent.run()
                self.ends[name] = None
            except Exception as error:
                self.ends[name] = error
            finally:
                keeper.close()

        thread = threading.Thread(target=run, name=name)
        self._threads.append(thread)
        thread.start()
        return agent

    def end_of(self, name: str) -> BaseException | None:
        until(lambda: name in self.ends, f"{name} to end")
        return self.ends[name]

    def ranks(self) -> dict[str, int | None]:
        status = inquiry.status(self.address, TOKEN)
        return {agent.name: agent.rank for agent in status.agents}

    def close(self) -> None:
        for agent in self.agents.values():
            agent.leave(0.0)
        for thread in self._threads:
            thread.join(WAIT_S)
        self.server.close()
        self.journal.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.close()


def test_machine_that_leaves_hands_over_to_the_spare(place: Place) -> None:
    for name in ("a", "b", "c"):
        place.agent(name)
        until(lambda name=name: name in place.ranks(), f"{name} to join")
    until(lambda: inquiry.status(place.address, TOKEN).step > 2, "steps")
    assert place.ranks() == {"a": 0, "b": 1, "c": None}
    assert inquiry.leave(place.address, TOKEN, "a", 20.0) == 1
    assert place.end_of("a") is None
    until(lambda: place.ranks() == {"b": 1, "c": 0}, "the spare to take the rank")
    status = inquiry.status(place.address, TOKEN)
    shown = inquiry.as_text(status)
    assert "running, epoch 2" in shown
    assert "rank 0   c (" in shown
    assert "a (" + socket.gethostname() + ") left" in shown
    assert status.goodput is not None
    until(lambda: inquiry.status(place.address, TOKEN).step > status.step, "a new step")
    status = inquiry.status(place.address, TOKEN)
    assert 0 <= status.lost_s < status.run_s
    assert "lost to changes of machines" in inquiry.as_text(status)


def test_what_an_epoch_was_coordinated_with_is_gone_with_it(place: Place) -> None:
    """Its connections hold threads and descriptors, and a long run has many epochs."""
    for name in ("a", "b", "c"):
        place.agent(name)
        until(lambda name=name: name in place.ranks(), f"{name} to join")
    until(lambda: inquiry.status(place.address, TOKEN).step > 2, "steps")
    coordinator = weakref.ref(place.server._epoch_server)
    gc.disable()
    try:
        inquiry.leave(place.address, TOKEN, "a", 20.0)
        until(lambda: coordinator() is None, "the first epoch's coordinator to be gone")
    finally:
        gc.enable()


@pytest.mark.parametrize("spares", [1, 2])
def test_copies_take_no_more_memory_however_long_a_run_is(tmp_path: Path, spares: int) -> None:
    """A second spare is sent nothing, and holds what it was sent as the only one, until it is told
    that nobody needs that.
    """
    place = Place(tmp_path, fake_job(world_size=1))
    keepers = {f"spare {number}": Keeper(security=TOKEN) for number in range(spares)}
    for keeper in keepers.values():
        # Of layers that nobody sends it any more.
        keeper.hold([PieceCopy(0, layer, bytes(1000)) for layer in (2, 3)])
    try:
        rank = place.agent("rank", train=train_guarded)
        until(lambda: "rank" in place.ranks(), "the first agent")
        for name, keeper in keepers.items():
            place.agent(name, keeper=keeper)
        until(lambda: len(place.ranks()) == 1 + spares, "the spares")
        # It has its rank before it begins with it.
        until(lambda: rank._control is not None, "the epoch to have begun")
        rank._control.abort("spares have come")
        most = dict.fromkeys(keepers, 0)
        until(
            lambda: all(0 not in keeper.held() for keeper in keepers.values()), "old copies to go"
        )
        first = inquiry.status(place.address, TOKEN).step
        deadline = time.monotonic() + 2 * WAIT_S
        while inquiry.status(place.address, TOKEN).step < first + 50:
            assert time.monotonic() < deadline
            for name, keeper in keepers.items():
                most[name] = max(most[name], keeper.num_bytes)
            time.sleep(0.001)
        # Two steps of two layers, and one more layer as it is taken.
        assert max(most.values()) <= 5 * 1000
    finally:
        place.close()


def test_losses_fill_the_rows_that_were_lost_with_their_machine(tmp_path: Path) -> None:
    rows = RunRows(tmp_path, num_steps=3, tensorboard=False, show=lambda row: None)
    job = fake_job(world_size=1, num_steps=3)
    job.rows = rows
    place = Place(tmp_path, job)

    def lose_a_row(
        assignment: Assignment,
        keeper: Keeper,
        *,
        committed: Callable[[int, float | None], None],
        on_row: Callable[[dict[str, Any]], None],
        **_: Any,
    ) -> EpochEnd:
        for step in range(3):
            if step != 1:
                on_row({"step": step, "loss": float(step), "step_s": 1.0})
            committed(step + 1, float(step))
        return EpochEnd("finished", "", 3)

    try:
        place.agent("rank", train=lose_a_row)
        assert place.end_of("rank") is None
        told = [dict(row) for row in read_rows(tmp_path)]
        for row in told:
            # Known once a step counts: rank 0 may say its row before that.
            row.pop("goodput", None)
            row.pop("lost_s", None)
        assert told == [
            {"step": 0, "loss": 0.0, "step_s": 1.0},
            {"step": 1, "loss": 1.0},
            {"step": 2, "loss": 2.0, "step_s": 1.0},
        ]
    finally:
        place.close()
        rows.close()


def assert_refused(place: Place, words: str, **changes: Any) -> None:
    """And whoever has joined works on."""
    for name in ("a", "b"):
        place.agent(name)
    until(lambda: inquiry.status(place.address, TOKEN).step > 0, "the first step")
    place.agent("other", **changes)
    assert words in str(place.end_of("other"))
    assert isinstance(place.ends["other"], JoinError)
    before = inquiry.status(place.address, TOKEN)
    until(lambda: inquiry.status(place.address, TOKEN).step > before.step, "another step")
    after = inquiry.status(place.address, TOKEN)
    assert (after.epoch, len(after.agents)) == (1, 2)


def test_agent_without_the_token_is_refused(place: Place) -> None:
    assert_refused(place, "wrong token", security=Security("guessed"))


def test_agent_with_too_little_memory_is_refused(place: Place) -> None:
    assert_refused(place, "a rank needs", memory_bytes=10)


def test_agent_of_another_version_is_refused(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = process.__version__

    def say_enlist(self: AgentProcess, enlistment: Any) -> None:
        is_other = enlistment.name == "other"
        monkeypatch.setattr(process, "__version__", "0.0.9" if is_other else plain)
        say(self, enlistment)
        monkeypatch.setattr(process, "__version__", plain)

    say = AgentProcess.say_enlist
    monkeypatch.setattr(AgentProcess, "say_enlist", say_enlist)
    assert_refused(place, f"it runs dpipe 0.0.9, the coordinator {plain}")


def test_agent_of_another_run_is_refused(place: Place) -> None:
    agent = place.agent("other")
    until(lambda: agent._run == RUN.id, "the agent to join")
    agent._run = "fedcba9876543210"
    (agent_id,) = place.server._connections
    place.server.hang_up(agent_id)
    assert "it was in run fedcba9876543210" in str(place.end_of("other"))


def test_coordinator_that_stays_away_is_given_up(place: Place) -> None:
    place.agent("a", wait_s=0.5)
    until(lambda: "a" in place.ranks(), "the agent to join")
    place.server.close()
    assert "the coordinator has not come back for 0.5 s" in str(place.end_of("a"))


@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b'{"kind": "beat", "sent_at": 1.0}', b'{"kind": "enlist"}', b"\xff" * 100],
)
def test_stranger_is_told_that_it_is_no_agent(place: Place, content: bytes) -> None:
    with open_channel(place.address, TOKEN) as channel:
        call = channel.stream_stream(METHOD)(iter([content]), metadata=token_metadata(TOKEN))
        with pytest.raises(grpc.RpcError) as raised:
            next(call)
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_agent_that_sends_what_no_agent_sends_is_hung_up(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    agent = place.agent("a")
    until(lambda: "a" in place.ranks(), "the agent to join")
    agent._connection._outbox.put(b'{"kind": "committed", "epoch": -1, "step": 1}')
    until(lambda: "it sent what no agent sends" in caplog.text, "it to be put out")
    until(lambda: "a" in place.ranks(), "it to be back")


def test_inquiry_says_what_is_wrong(place: Place) -> None:
    with pytest.raises(JoinError, match="no agent at .* is called 'nobody'"):
        inquiry.leave(place.address, TOKEN, "nobody", 1.0)
    with pytest.raises(JoinError, match="wrong token"):
        inquiry.status(place.address, Security("guessed"))


def test_answer_that_is_no_status_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inquiry, "ask_once", lambda *_: b"[]")
    with pytest.raises(JoinError, match="does not answer as dpipe's coordinator does"):
        inquiry.status("10.0.0.1:7000", TOKEN)


def test_control_stream_refuses_a_foreign_server(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_stream.TO_AGENT, "read", _no_message)
    place.agent("a")
    assert "is not dpipe's coordinator" in str(place.end_of("a"))


def _no_message(content: bytes) -> None:
    raise ValueError("of another shape")


@pytest.mark.slow
def test_machines_that_come_and_go_leave_no_thread_and_no_descriptor(place: Place) -> None:
    """One that stays; each other has a rank, and leaves once there is a spare."""
    place.agent("stays")
    until(lambda: "stays" in place.ranks(), "the first to join")
    place.agent("m0")
    counts: list[tuple[int, int]] = []
    for number in range(10):
        name = f"m{number}"
        until(lambda name=name: place.ranks().get(name) == 1, f"{name} to have a rank")
        place.agent(f"m{number + 1}")
        until(lambda number=number: f"m{number + 1}" in place.ranks(), "a spare")
        place.agents[name].leave(20.0)
        assert place.end_of(name) is None
        # The first rounds open what stays, such as gRPC's own threads.
        if number < FIRST_ROUNDS:
            counts.append(open_here())
            continue
        most = tuple(max(kind) for kind in zip(*counts, strict=True))
        until(
            lambda most=most: all(map(le, open_here(), most)),
            f"no more threads and descriptors than {most} after {number} machines",
        )


def open_here() -> tuple[int, int]:
    """Threads and descriptors of this process."""
    return threading.active_count(), len(os.listdir("/proc/self/fd"))
