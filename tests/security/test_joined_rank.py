"""What a rank that has joined can do to the others. It has the token, and can send anything; each
test tries an attack on a real server.
"""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from support.coordinator_stranger import Stranger

from dpipe.config.load import Config
from dpipe.coordinator import frame
from dpipe.coordinator.base import Gathered
from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.membership import Membership
from dpipe.coordinator.server import CoordinatorServer, _Guest
from dpipe.errors import JoinError, RunAborted, TransferError
from dpipe.plan.run_plan import draft
from dpipe.run.build import adopt_plan_of_rank_0
from dpipe.run.parameter_servers import _beside
from dpipe.session import greeting, grpc_stream
from dpipe.session.frames import MessageFrames, MessageStream
from dpipe.store.run_folder import keep_upload
from dpipe.wire.message import Header
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1 import coordinator_pb2 as pb
from dpipe.wire.v1.transport_pb2 import Hello

PUT_OUT = r"rank 1 \(127\.0\.0\.1\) was put out: it sent what dpipe does not send \("


class EvilRank(Stranger):
    """Rank 1, which sends what a test wants. It reads nothing."""

    def __init__(self, port: int, *, shared: str = "{}") -> None:
        super().__init__(port, rank=1)
        self.send(join=pb.Join(protocol=frame.PROTOCOL, rank=1, world_size=2, shared=shared))


class Attack:
    """A coordinator, an honest rank 0 in `folder`, and an evil rank 1."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.server = CoordinatorServer(2, on_upload=partial(keep_upload, folder))
        stack.callback(self.server.close, wait_s=0.0)
        with ThreadPoolExecutor() as pool:
            joining = pool.submit(
                Coordinator.join, f"127.0.0.1:{self.server.port}", 0, 2, shared={}, join_s=20.0
            )
            self.evil = EvilRank(self.server.port)
            stack.callback(self.evil.close)
            self.honest = joining.result(30)
        stack.callback(self.honest.close)

    def outcome(self) -> str:
        """The reason for which the run ended, as the honest rank receives it."""
        with pytest.raises(RunAborted) as raised:
            self.honest.gather("never complete", b"").wait(20)
        return str(raised.value)


@pytest.fixture
def attack(tmp_path: Path) -> Iterator[Attack]:
    with ExitStack() as stack:
        folder = tmp_path / "home" / "run"
        folder.mkdir(parents=True)
        yield Attack(folder, stack)


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


# Uploads


@pytest.mark.parametrize(
    "kind", ["../../evil", "{tmp_path}/evil", "", ".", "checkpoints", "trace/../..", "trace\0"]
)
def test_upload_chooses_no_path(attack: Attack, tmp_path: Path, kind: str) -> None:
    attack.evil.send(upload=pb.Upload(kind=kind.format(tmp_path=tmp_path), payload=b"evil"))
    reason = attack.outcome()
    assert "was put out" in reason
    assert "an upload named" in reason
    assert files_in(tmp_path) == []


def test_upload_that_dpipe_has_is_kept_in_the_folder(attack: Attack, tmp_path: Path) -> None:
    attack.evil.send(upload=pb.Upload(kind="trace", payload=b"spans"))
    attack.evil.send(leave=pb.Leave())
    attack.honest.leave()
    attack.server.close()
    assert files_in(tmp_path) == ["home/run/trace/rank-1.json"]


# Texts

ESCAPES = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202ekcatta\r"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202ekcatta\r"


def test_reason_of_a_failure_cannot_control_the_terminal(attack: Attack) -> None:
    forged = "2026-01-01 00:00:00,000 rank 0 step 7 loss 0.0001, 1.00 ms a sample"
    attack.evil.send(failure=pb.Failure(reason=f"{ESCAPES}\n{forged}"))
    assert attack.outcome() == f"rank 1 failed: {SHOWN}\n  {forged}"


def test_names_of_uploads_cannot_control_the_terminal(attack: Attack) -> None:
    attack.evil.send(upload=pb.Upload(kind=ESCAPES))
    reason = attack.outcome()
    assert reason.isprintable()
    assert "owned" in reason


@pytest.mark.parametrize("shared", [{ESCAPES: 1}, {"train.steps": ESCAPES}])
def test_configuration_cannot_control_the_terminal(shared: dict[str, object]) -> None:
    with ExitStack() as stack:
        server = CoordinatorServer(2)
        stack.callback(server.close, wait_s=0.0)
        evil = EvilRank(server.port, shared=json.dumps(shared))
        stack.callback(evil.close)
        with pytest.raises(JoinError, match="the configuration of rank 1 .* differs") as raised:
            Coordinator.join(f"127.0.0.1:{server.port}", 0, 2, shared={}, join_s=20.0)
    assert str(raised.value).isprintable()
    assert "owned" in str(raised.value)


def test_address_cannot_control_the_terminal() -> None:
    """Each rank's address is sent to all ranks, and is in their messages about that rank."""
    join = pb.Join(advertised=f"{ESCAPES}:1", rank=1)
    (heard,) = frame.assemble(
        frame.cut(pb.ToCoordinator(join=join)), pb.ToCoordinator, lambda kind: 1000
    )
    assert heard.join.advertised == f"{SHOWN}:1"
    welcome = pb.Welcome(addresses=[pb.Address(), pb.Address(advertised=ESCAPES)])
    (answer,) = frame.assemble(
        frame.cut(pb.FromCoordinator(welcome=welcome)), pb.FromCoordinator, lambda kind: 1000
    )
    assert answer.welcome.addresses[1].advertised == SHOWN


def test_tag_of_a_tensor_cannot_control_the_terminal() -> None:
    header = Header(0, ESCAPES, TensorSpec((2,), torch.float32))
    assert Header.decode(header.encode()).tag == SHOWN


def test_refusal_of_a_greeting_cannot_control_the_terminal() -> None:
    here, there = socket.socketpair()
    deadline = time.monotonic() + 10

    def answer() -> None:
        with contextlib.suppress(TransferError):
            greeting.answer(there, lambda _: (b"another token",), deadline)

    with here, there, pytest.MonkeyPatch.context() as patch:
        patch.setattr(greeting, "_REFUSED", ESCAPES)
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(JoinError) as raised:
            greeting.call(here, Hello(), b"token", deadline)
        thread.join(10)
    assert str(raised.value) == SHOWN


def test_details_of_a_broken_stream_cannot_control_the_terminal() -> None:
    """As a peer's gRPC server may write them."""

    class Broken(grpc.RpcError, grpc.Call):
        code = staticmethod(lambda: grpc.StatusCode.INTERNAL)
        details = staticmethod(lambda: ESCAPES)

    Broken.__abstractmethods__ = frozenset()
    assert grpc_stream.why_ended(Broken()) == SHOWN


# Sizes and counts


def part(key: str, payload: bytes = b"") -> pb.Part:
    return pb.Part(key=key, payload=payload)


@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (
            [{"part": part("step/1", bytes(2 << 20))}],
            "part of 'step/1' of 2097152 bytes; the most is 1048576",
        ),
        (
            [{"part": part("barrier/end", b"x")}],
            "part of 'barrier/end' of 1 bytes; the most is 0",
        ),
        ([{"part": part("plan", bytes(17 << 20))}], r"part of \d+ bytes; the most is"),
        ([{"part": part("k" * 201)}], "a key of 201 characters; the most is 200"),
        ([{"ask": pb.Ask(key="k" * 201)}], "a key of 201 characters"),
        ([{"part": part("a")}, {"part": part("a")}], "a second part of 'a'"),
        (
            [{"part": part(f"plan/{i}", bytes(15 << 20))} for i in range(3)],
            r"parts of 3 gathers, 4718\d+ bytes, that others have not given",
        ),
        ([{"part": part(f"{i}")} for i in range(5000)], "parts of 4097 gathers"),
        ([{"failure": pb.Failure(reason="x" * 100_000)}], r"failure of \d+ bytes; the most is"),
        ([{"upload": pb.Upload(kind="trace")}] * 2, "a second upload named 'trace'"),
        ([{}], "a message of no kind"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_rank_that_sends_too_much_is_put_out(
    attack: Attack, messages: list[dict[str, object]], why: str
) -> None:
    for message in messages:
        attack.evil.send(**message)
    assert re.fullmatch(f"{PUT_OUT}{why}.*", attack.outcome())


def test_announced_4_gib_are_refused_at_the_first_frame(attack: Attack) -> None:
    upload_of_4_gib = b"\x2a\x84\x80\x80\x80\x10"
    content = upload_of_4_gib + bytes(frame.FRAME_BYTES - len(upload_of_4_gib))
    attack.evil.send_frames(b"\1" + content)
    assert re.fullmatch(rf"{PUT_OUT}upload of 42949\d+ bytes; the most is \d+\)", attack.outcome())


@pytest.mark.parametrize(
    "shared",
    ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 100_000 + "}", '{"a": 1', "nan", '"a"'],
    ids=["lists", "objects", "a number", "cut off", "no JSON", "a string"],
)
def test_configuration_is_a_flat_object_or_refused_in_words(shared: str) -> None:
    with ExitStack() as stack:
        server = CoordinatorServer(2)
        stack.callback(server.close, wait_s=0.0)
        stack.callback(EvilRank(server.port, shared=shared).close)
        with pytest.raises(JoinError, match=r"rank 1 at 127.0.0.1 could not join|differs") as said:
            Coordinator.join(f"127.0.0.1:{server.port}", 0, 2, shared={}, join_s=20.0)
    assert len(str(said.value)) < 1000


@pytest.mark.parametrize(
    "advertised", ["", "host", "host:port", "unix:/run/x.sock:1", "a b:1", "\x1b[2J:1", "x\0:1"]
)
def test_address_is_host_and_port_or_refused(advertised: str) -> None:
    heard: list[pb.FromCoordinator | None] = []
    membership = Membership(2, heartbeat_s=8.0, join_s=120.0, now=0.0)
    join = pb.Join(protocol=frame.PROTOCOL, rank=1, world_size=2, shared="{}")
    join.advertised = advertised
    assert membership.join(join, "ipv4:10.0.0.1:5", heard.append, 0.0) is None
    assert heard[0] is not None
    assert re.search("its address '.*' is not host:port", heard[0].abort.reason)


NAMES = st.one_of(st.text(max_size=20), st.sampled_from(["step/1", "barrier/x", "trace"]))
MESSAGES = st.one_of(
    st.builds(lambda k, p: pb.ToCoordinator(part=part(k, p)), NAMES, st.binary(max_size=50)),
    st.builds(lambda k: pb.ToCoordinator(ask=pb.Ask(key=k)), NAMES),
    st.builds(lambda k: pb.ToCoordinator(upload=pb.Upload(kind=k)), NAMES),
    st.builds(
        lambda r, s: pb.ToCoordinator(failure=pb.Failure(reason=r, symptom=s)), NAMES, st.booleans()
    ),
    st.builds(
        lambda r, w, a, s: pb.ToCoordinator(
            join=pb.Join(protocol=frame.PROTOCOL, rank=r, world_size=w, advertised=a, shared=s)
        ),
        st.integers(-2, 3),
        st.integers(1, 3),
        st.one_of(st.just("host:1"), NAMES),
        st.one_of(st.just("{}"), NAMES),
    ),
    st.just(pb.ToCoordinator(leave=pb.Leave())),
    st.just(pb.ToCoordinator(ping=pb.Ping(sent_ns=1))),
    st.just(pb.ToCoordinator()),
)


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[CoordinatorServer]:
    server = CoordinatorServer(2)
    yield server
    server.close(wait_s=0.0)


class _Says(_Guest):
    """A guest whose session has brought `frames`, and takes what it is told."""

    def __init__(self, peer: str, frames: list[bytes]) -> None:
        super().__init__(1, peer, 40.0)
        self.line.frames = lambda: iter(frames)  # type: ignore[method-assign]


def test_rank_that_never_reads_answers_is_put_out(fuzzed: CoordinatorServer) -> None:
    """Without a network, because its buffers would take the first answers."""
    fuzzed._membership = Membership(2, heartbeat_s=1e9, join_s=1e9, now=0.0)
    honest: list[pb.FromCoordinator | None] = []
    first, second = (
        pb.Join(protocol=frame.PROTOCOL, rank=rank, world_size=2, shared="{}") for rank in (0, 1)
    )
    fuzzed._membership.join(first, "ipv4:10.0.0.7:1", honest.append, 0.0)
    words = [pb.ToCoordinator(join=second), *[pb.ToCoordinator(ping=pb.Ping())] * 11_000]
    frames = [piece for message in words for piece in frame.cut(message)]
    fuzzed._read(_Says("ipv4:127.0.0.1:5", frames))
    (reason,) = [heard.abort.reason for heard in honest if heard and heard.HasField("abort")]
    assert re.fullmatch(f"{PUT_OUT}more, with 10001 answers that it has not read.*", reason)


class _Swallows(MessageStream):
    """Takes all bytes, and acknowledges none."""

    def write(self, *parts: bytes | memoryview) -> None:
        pass


def test_rank_that_acknowledges_no_answer_is_put_out() -> None:
    """It read them, and each was kept to be sent again."""
    guest = _Guest(1, "ipv4:127.0.0.1:5", 40.0)
    guest.line.session.attach(MessageFrames(_Swallows()), 0, 0)
    for _ in range(10_000):
        guest.line.session.write(b"pong", memoryview(b""))
    guest.refuse_deaf()
    guest.line.session.write(b"pong", memoryview(b""))
    with pytest.raises(DecodeError, match="more, with 10001 answers that it has not read"):
        guest.refuse_deaf()


@settings(max_examples=300)
@given(joins=st.booleans(), messages=st.lists(MESSAGES, max_size=8), garbage=st.binary(max_size=9))
def test_server_answers_any_message_of_a_rank(
    fuzzed: CoordinatorServer, joins: bool, messages: list[pb.ToCoordinator], garbage: bytes
) -> None:
    """Not a traceback; and what it tells the others is text that commands no terminal."""
    fuzzed._membership = Membership(2, heartbeat_s=1e9, join_s=1e9, now=0.0)
    honest: list[pb.FromCoordinator | None] = []
    first = pb.Join(protocol=frame.PROTOCOL, rank=0, world_size=2, shared="{}")
    fuzzed._membership.join(first, "ipv4:10.0.0.7:1", honest.append, 0.0)
    if joins:
        second = pb.Join(protocol=frame.PROTOCOL, rank=1, world_size=2, shared="{}")
        messages = [pb.ToCoordinator(join=second), *messages]
    frames = [piece for message in messages for piece in frame.cut(message)]
    fuzzed._read(_Says("ipv4:10.0.0.1:5", [*frames, garbage]))
    reasons = [heard.abort.reason for heard in honest if heard and heard.HasField("abort")]
    assert all(reason.replace("\n  ", "").isprintable() for reason in reasons)
    assert set(fuzzed._membership.members) <= {0}


# Shapes: a rank that runs dpipe but shares something else


def sends_instead(monkeypatch: pytest.MonkeyPatch, key: str, payload: bytes) -> None:
    """Rank 1 sends `payload` where others give their part of `key`."""
    gather = Coordinator.gather

    def evil_gather(self: Coordinator, name: str, own: bytes) -> Gathered:
        return gather(self, name, payload if self.rank == 1 and name == key else own)

    monkeypatch.setattr(Coordinator, "gather", evil_gather)


@pytest.mark.parametrize(
    ("key", "payload"),
    [
        ("step/1", b"\xff{"),
        ("step/1", b"[" * 50_000),
        ("step/1", b'{"loss": "\\u001b[2J"}'),
        ("step/1", b'{"loss": null, "norms": {}, "bad": null, "stop": false, "report": null}'),
        ("step/1", b'{"loss": null, "norms": {}, "bad": null, "stop": false, "report": {}}'),
        ("held-out/0", b"[]"),
        ("held-out/0", b"[null]"),
        ("held-out/0", b'{"losses": ["1"], "accuracies": []}'),
        ("trained", b'["host"]'),
        ("checkpoint/3", b'{"bad": null}'),
        (
            "checkpoint/3",
            b'{"bad": null, "model": {"names": {"a": "../../x"}, "files": {}}, "layouts": {}}',
        ),
        ("plan", b'{"a": 1}'),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_share_of_another_shape_ends_the_run_in_words(
    tiny: Callable[..., Config],
    run_ranks: Callable[..., list[BaseException | None]],
    monkeypatch: pytest.MonkeyPatch,
    key: str,
    payload: bytes,
) -> None:
    sends_instead(monkeypatch, key, payload)
    config = tiny(
        model__num_layers=4,
        pipeline__stages=2,
        pipeline__split="measured" if key == "plan" else "estimated",
        train__eval_every=2,
    )
    raised = run_ranks(config)
    for error in raised:
        assert isinstance(error, TransferError | RunAborted), repr(error)
        assert re.search(
            r"rank 1 sent \d+ bytes for|0 ranks report a loss|no rank sent a held-out loss",
            str(error),
        )
        assert str(error).replace("\n  ", "").isprintable()


def test_rank_0_without_a_plan_is_named(tiny: Callable[..., Config]) -> None:
    run_plan = draft(tiny(model__num_layers=4, pipeline__stages=2, pipeline__schedule="auto"))
    coordinator: Any = SimpleNamespace(rank=1, share=lambda *asked: [None, None])
    with pytest.raises(TransferError, match="rank 0 sent no plan"):
        adopt_plan_of_rank_0(run_plan, coordinator)


def test_rank_that_embeds_no_server_is_named() -> None:
    with pytest.raises(TransferError, match="rank 2 sent no port of the parameter server"):
        _beside("10.0.0.7:4000", None, 2)
