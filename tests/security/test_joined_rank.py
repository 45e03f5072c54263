"""What a rank that has joined can do to the others. It has the token, and speaks the protocol as
it likes; each test does to a real server what must not work.
"""

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest

from dpipe.coordinator import frame
from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.errors import RunAborted
from dpipe.store.run_folder import keep_upload
from dpipe.wire.rpc import Security, open_channel, token_metadata
from dpipe.wire.v1 import coordinator_pb2 as pb


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
