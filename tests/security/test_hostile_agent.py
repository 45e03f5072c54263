"""A machine that joins with `dpipe join` and sends what it likes: the coordinator goes on, and the
others lose nothing by it.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from dpipe import __version__
from dpipe.agent.rows import RunRows
from dpipe.agent.server import ElasticServer
from dpipe.agent.serving import Serving
from dpipe.elastic.journal import NAME, RunJournal
from dpipe.elastic.messages import METHOD, PROTOCOL, RELEASE_METHOD, STATUS_METHOD
from dpipe.elastic.servers import SERVER_METHOD
from dpipe.epoch.assignment import AssignedRun
from dpipe.report.metrics import read_rows
from dpipe.wire.rpc import Security, token_metadata

TOKEN = Security("token")
STEPS = 30
HONEST = "00000000000000aa"
HOSTILE = "00000000000000bb"


class Job:
    """What is trained: nothing. Two ranks, of which nobody begins to work."""

    run = AssignedRun(id="0" * 16, folder="runs/run", host="here")
    num_pieces = 4
    group_size = 1
    world_size = 2
    num_steps = STEPS
    servers = ("10.0.0.5:7100",)

    def __init__(self, folder: Path) -> None:
        self.rows = RunRows(folder, num_steps=STEPS, tensorboard=False, show=lambda row: None)

    def move_servers(self, addresses: tuple[str, ...]) -> None:
        self.servers = addresses

    def config(self, ranks: int) -> dict[str, dict[str, Any]]:
        return {}

    def layer_costs(self, ranks: int) -> str:
        return ""

    def pieces(self, ranks: int) -> list[list[int]]:
        return [[0, 1], [2, 3]]

    def memory_bytes(self, ranks: int) -> int:
        return 1

    def fewer(self, num_agents: int) -> int | None:
        return None

    def pays(self, ranks: int, more: int, steps_left: int) -> bool:
        return False

    def checkpoint(self) -> int | None:
        return None

    def take_upload(self, rank: int, kind: str, payload: bytes) -> None:
        pass


class Machine:
    """A stream to the coordinator that anything can be said on."""

    def __init__(self, server: ElasticServer, security: Security = TOKEN) -> None:
        self.channel = grpc.insecure_channel(
            f"127.0.0.1:{server.port}", [("grpc.use_local_subchannel_pool", 1)]
        )
        self.metadata = token_metadata(security)
        self.said: SimpleQueue[bytes | None] = SimpleQueue()
        attend: Any = self.channel.stream_stream(METHOD)
        self.answers = attend(iter(self.said.get, None), metadata=self.metadata, timeout=20)

    def say(self, *messages: bytes | dict[str, Any]) -> None:
        for message in messages:
            is_bytes = isinstance(message, bytes)
            self.said.put(message if is_bytes else json.dumps(message).encode())

    def hears(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(next(self.answers))
        return answer

    def is_put_out(self) -> bool:
        """Whether the coordinator ends the stream, whatever it says before."""
        try:
            for _ in self.answers:
                continue
        except grpc.RpcError as error:
            return "Deadline" not in str(error)
        return True

    def ask(self, method: str, request: bytes) -> Any:
        stub: Any = self.channel.unary_unary(method)
        return json.loads(stub(request, metadata=self.metadata, timeout=10))

    def close(self) -> None:
        self.said.put(None)
        self.channel.close()


def enlist(agent: str, **changes: Any) -> dict[str, Any]:
    return {
        "kind": "enlist",
        "protocol": PROTOCOL,
        "version": __version__,
        "run": "",
        "agent": agent,
        "name": agent[-2:],
        "host": "h",
        "keeper": "127.0.0.1:9",
        "memory_bytes": 1 << 40,
        "epoch": 0,
        "working": False,
        "held": {},
        "last": None,
        **changes,
    }


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ElasticServer]:
    journal = RunJournal(tmp_path / NAME)
    job = Job(tmp_path)
    server = ElasticServer(job, journal, Serving(security=TOKEN))
    yield server
    server.close()
    job.rows.close()
    journal.close()


@pytest.fixture
def pair(server: ElasticServer) -> Iterator[tuple[Machine, Machine]]:
    """An honest machine and a hostile one, which are the ranks of epoch 1."""
    machines = Machine(server), Machine(server)
    for machine, agent in zip(machines, (HONEST, HOSTILE), strict=True):
        machine.say(enlist(agent))
        assert machine.hears()["kind"] == "enlisted"
    for machine in machines:
        assert machine.hears()["kind"] == "assigned"
    yield machines
    for machine in machines:
        machine.close()


def still_answers(honest: Machine) -> None:
    honest.say({"kind": "beat", "sent_at": 7.0})
    while (answer := honest.hears())["kind"] != "answered":
        continue
    assert answer["sent_at"] == 7.0


NONSENSE = [
    b"",
    b"\xff\xfe",
    b"[" * 100_000,
    b'{"kind":' * 50_000,
    b"9" * 100_000,
    b"x" * (3 << 20),
    {"kind": "release"},
    {"kind": "committed", "epoch": 1},
    {"kind": "committed", "epoch": True, "step": "1"},
    {"kind": "committed", "epoch": 1, "step": -1},
    {"kind": "committed", "epoch": 1, "step": STEPS + 1},
    {"kind": "committed", "epoch": 1, "step": 1, "loss": float("nan")},
    {"kind": "agreed", "epoch": 1, "step": 10**15},
    {"kind": "holds", "epoch": 1, "held": {"1000000": [0, 1, 2, 3]}},
    {"kind": "holds", "epoch": 1, "held": {str(step): [] for step in range(2000)}},
    {"kind": "row", "epoch": 1, "row": [1]},
    {"kind": "leave", "within_s": -1.0},
    {"kind": "leave", "within_s": 1.0, "name": "aa"},
    enlist(HOSTILE),
]


@pytest.mark.some_cases(7)
@pytest.mark.parametrize("message", NONSENSE, ids=lambda value: repr(value)[:40])
def test_machine_that_sends_nonsense_is_put_out_and_the_others_go_on(
    pair: tuple[Machine, Machine], server: ElasticServer, message: bytes | dict[str, Any]
) -> None:
    honest, hostile = pair
    hostile.say(message)
    assert hostile.is_put_out()
    still_answers(honest)
    assert not server.over.is_set()
    assert server._rendezvous.newest_step == 0


@pytest.mark.parametrize("message", [b"", b"[" * 100_000, {"kind": "beat", "sent_at": 1.0}])
def test_stranger_that_does_not_enlist_is_refused(server: ElasticServer, message: Any) -> None:
    stranger = Machine(server)
    stranger.say(message)
    assert stranger.is_put_out()
    stranger.close()
    assert server._rendezvous.agents == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"agent": "../../x"},
        {"keeper": "http://evil/?:9"},
        {"held": {"1000000": [0, 1, 2, 3]}},
        {"memory_bytes": 10**400},
        {"name": "x" * 100_000},
        {"last": {"epoch": 1, "outcome": "won", "reason": ""}},
    ],
)
def test_machine_that_enlists_with_nonsense_is_refused(
    server: ElasticServer, changes: dict[str, Any]
) -> None:
    stranger = Machine(server)
    stranger.say({**enlist(HOSTILE), **changes})
    assert stranger.is_put_out()
    stranger.close()
    assert server._rendezvous.agents == {}


def test_name_that_commands_a_terminal_is_shown_escaped(server: ElasticServer) -> None:
    stranger = Machine(server)
    stranger.say(enlist(HOSTILE, name="\x1b[2Jx", host="\x1b]0;y\x07"))
    assert stranger.hears()["kind"] == "enlisted"
    shown = json.dumps(stranger.ask(STATUS_METHOD, b""))
    assert "\\\\x1b[2Jx" in shown
    assert "\\u001b" not in shown
    stranger.close()


def test_machine_without_the_token_learns_and_changes_nothing(
    pair: tuple[Machine, Machine], server: ElasticServer
) -> None:
    stranger = Machine(server, Security("guess"))
    stranger.say(enlist("00000000000000cc"))
    for method in (STATUS_METHOD, RELEASE_METHOD, SERVER_METHOD):
        with pytest.raises(grpc.RpcError) as refused:
            stranger.ask(method, json.dumps({"name": "aa", "within_s": 1.0}).encode())
        assert isinstance(refused.value, grpc.Call)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert stranger.is_put_out()
    stranger.close()
    assert set(server._rendezvous.agents) == {HONEST, HOSTILE}
    still_answers(pair[0])


def test_leave_is_of_who_says_it(pair: tuple[Machine, Machine], server: ElasticServer) -> None:
    honest, hostile = pair
    hostile.say({"kind": "leave", "within_s": 1e6})
    still_answers(hostile)
    leaving = {agent.id for agent in server._rendezvous.agents.values() if agent.leave_by}
    assert leaving == {HOSTILE}
    still_answers(honest)


@pytest.mark.parametrize("method", [RELEASE_METHOD, SERVER_METHOD])
@pytest.mark.parametrize("request_", [b"", b"[]", b'{"name": 1}', b"[" * 100_000])
def test_nonsense_in_the_place_of_a_name_lets_nobody_go(
    pair: tuple[Machine, Machine], server: ElasticServer, request_: bytes, method: str
) -> None:
    """Nor does it move a parameter server."""
    with pytest.raises(grpc.RpcError) as refused:
        pair[1].ask(method, request_)
    assert isinstance(refused.value, grpc.Call)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert pair[1].ask(STATUS_METHOD, b"")["servers"] == ["10.0.0.5:7100"]
    assert not any(agent.leave_by for agent in server._rendezvous.agents.values())


def test_what_is_said_of_another_epoch_changes_nothing(
    pair: tuple[Machine, Machine], server: ElasticServer
) -> None:
    """Replayed from an epoch before, or made up of one to come."""
    honest, hostile = pair
    for epoch in (0, 2, 1000):
        hostile.say(
            {"kind": "agreed", "epoch": epoch, "step": 5},
            {"kind": "ended", "report": {"epoch": epoch, "outcome": "finished"}, "held": {}},
        )
    still_answers(hostile)
    assert (server._rendezvous.epoch, server._rendezvous.newest_step) == (1, 0)
    assert not server.over.is_set()
    still_answers(honest)


def test_spare_cannot_have_copies_dropped(
    pair: tuple[Machine, Machine], server: ElasticServer
) -> None:
    """It said that all ranks have a later step, and the others dropped what they had."""
    spares = Machine(server), Machine(server)
    for spare, agent in zip(spares, ("00000000000000cc", "00000000000000dd"), strict=True):
        spare.say(enlist(agent, epoch=1))
        assert spare.hears()["kind"] == "enlisted"
    spares[0].say({"kind": "agreed", "epoch": 1, "step": 20})
    still_answers(spares[0])
    spares[1].say({"kind": "beat", "sent_at": 7.0})
    assert spares[1].hears()["kind"] == "answered"  # and nothing about copies before it
    for spare in spares:
        spare.close()


def test_row_beyond_the_run_is_not_written(pair: tuple[Machine, Machine], tmp_path: Path) -> None:
    rows = [{"step": STEPS + 1, "loss": 1.0}, {"step": 10**12}, {"step": -1}, {"step": 0}]
    pair[1].say(*({"kind": "row", "epoch": 1, "row": row} for row in rows))
    still_answers(pair[1])
    assert [row["step"] for row in read_rows(tmp_path)] == [0]


def test_digest_of_a_layer_is_what_the_rank_that_trains_it_says(
    pair: tuple[Machine, Machine],
) -> None:
    """Each rank has half of the four layers; the hostile one speaks for all."""
    ours = {str(layer): str(layer) * 64 for layer in (0, 1)}
    theirs = {str(layer): "f" * 64 for layer in range(4)}
    report = {"epoch": 1, "outcome": "aborted", "reason": ""}
    for machine, digests in zip(pair, (ours, theirs), strict=True):
        for step in (4, 6):
            machine.say({"kind": "vouched", "epoch": 1, "step": step, "digests": digests})
        machine.say({"kind": "committed", "epoch": 1, "step": 6})
        machine.say({"kind": "ended", "report": report, "held": {"4": [0, 1, 2, 3]}})
    while (answer := pair[0].hears())["kind"] != "assigned":
        continue
    believed = {"0": ["0" * 64], "1": ["1" * 64], "2": ["f" * 64], "3": ["f" * 64]}
    assert answer["assignment"]["resume_step"] == 4
    assert answer["assignment"]["digests"] == believed
