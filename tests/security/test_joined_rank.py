"""What a rank that has joined can do to the others. It has the token, and speaks the protocol as
it likes; each test does to a real server what must not work.
"""

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import grpc
import pytest
import torch

from dpipe.coordinator import frame
from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.errors import JoinError, RunAborted, TransferError
from dpipe.store.run_folder import keep_upload
from dpipe.transport import greeting
from dpipe.transport import grpc as transport_grpc
from dpipe.wire.message import Header
from dpipe.wire.rpc import Security, open_channel, token_metadata
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1 import coordinator_pb2 as pb
from dpipe.wire.v1.transport_pb2 import Hello


class EvilRank:
    """Rank 1, which sends what a test wants. It reads nothing unless `reads`."""

    def __init__(self, port: int, *, shared: str = "{}") -> None:
        self._frames: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = open_channel(f"127.0.0.1:{port}", Security(), own_connection=True)
        self._call = self._channel.stream_stream(frame.METHOD)(
            iter(self._frames.get, None), metadata=token_metadata(Security())
        )
        self.send(join=pb.Join(protocol=frame.PROTOCOL, rank=1, world_size=2, shared=shared))

    def send(self, **message: object) -> None:
        for piece in frame.cut(pb.ToCoordinator(**message)):
            self._frames.put(piece)

    def send_frames(self, *frames: bytes) -> None:
        for piece in frames:
            self._frames.put(piece)

    def close(self) -> None:
        self._frames.put(None)
        self._call.cancel()
        self._channel.close()


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
        """Why the run ended, as the honest rank hears it."""
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


def test_reason_of_a_failure_commands_no_terminal(attack: Attack) -> None:
    forged = "2026-01-01 00:00:00,000 rank 0 step 7 loss 0.0001, 1.00 ms a sample"
    attack.evil.send(failure=pb.Failure(reason=f"{ESCAPES}\n{forged}"))
    assert attack.outcome() == f"rank 1 failed: {SHOWN}\n  {forged}"


def test_names_of_uploads_command_no_terminal(attack: Attack) -> None:
    attack.evil.send(upload=pb.Upload(kind=ESCAPES))
    reason = attack.outcome()
    assert reason.isprintable()
    assert "owned" in reason


@pytest.mark.parametrize("shared", [{ESCAPES: 1}, {"train.steps": ESCAPES}])
def test_configuration_commands_no_terminal(shared: dict[str, object]) -> None:
    with ExitStack() as stack:
        server = CoordinatorServer(2)
        stack.callback(server.close, wait_s=0.0)
        evil = EvilRank(server.port, shared=json.dumps(shared))
        stack.callback(evil.close)
        with pytest.raises(JoinError, match="the configuration of rank 1 .* differs") as raised:
            Coordinator.join(f"127.0.0.1:{server.port}", 0, 2, shared={}, join_s=20.0)
    assert str(raised.value).isprintable()
    assert "owned" in str(raised.value)


def test_address_commands_no_terminal() -> None:
    """Each rank's address is told to all, and is in what they say of that rank."""
    join = pb.Join(advertised=f"{ESCAPES}:1", rank=1)
    (heard,) = frame.assemble(frame.cut(pb.ToCoordinator(join=join)), pb.ToCoordinator)
    assert heard.join.advertised == f"{SHOWN}:1"
    welcome = pb.Welcome(addresses=[pb.Address(), pb.Address(advertised=ESCAPES)])
    (told,) = frame.assemble(frame.cut(pb.FromCoordinator(welcome=welcome)), pb.FromCoordinator)
    assert told.welcome.addresses[1].advertised == SHOWN


def test_tag_of_a_tensor_commands_no_terminal() -> None:
    header = Header(0, ESCAPES, TensorSpec((2,), torch.float32))
    assert Header.decode(header.encode()).tag == SHOWN


def test_refusal_of_a_greeting_commands_no_terminal() -> None:
    here, there = socket.socketpair()
    deadline = time.monotonic() + 10

    def answer() -> None:
        with contextlib.suppress(TransferError):
            greeting.answer(there, "another token", deadline)

    with here, there, pytest.MonkeyPatch.context() as patch:
        patch.setattr(greeting, "_REFUSED", ESCAPES)
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(JoinError) as raised:
            greeting.call(here, Hello(), "token", deadline)
        thread.join(10)
    assert str(raised.value) == SHOWN


def test_details_of_a_broken_stream_command_no_terminal() -> None:
    """As a peer's gRPC server may write them."""

    class Broken(grpc.RpcError, grpc.Call):
        code = staticmethod(lambda: grpc.StatusCode.INTERNAL)
        details = staticmethod(lambda: ESCAPES)

    Broken.__abstractmethods__ = frozenset()
    assert transport_grpc._reason(Broken(), opened=True) == SHOWN
