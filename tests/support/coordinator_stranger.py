"""A client of the coordinator that says whatever a test wants."""

import itertools
import queue
import struct
from collections.abc import Iterator
from typing import Any

import grpc

from dpipe.coordinator import frame, limits
from dpipe.wire.rpc import Security, open_channel, token_metadata
from dpipe.wire.v1 import coordinator_pb2 as pb
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

_PREFIX = struct.Struct(">IQ")


class Stranger:
    def __init__(self, port: int, *frames: bytes, rank: int = 0, **hello: Any) -> None:
        """`hello` changes what it says of itself as it opens the stream."""
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self.send_frames(*frames)
        self._channel = open_channel(f"127.0.0.1:{port}", Security(), own_connection=True)
        secret = hello.pop("secret", b"")
        said = Hello(**{"protocol": frame.PROTOCOL, "from_rank": rank, **hello})
        metadata: Any = (
            *token_metadata(Security()),
            ("dpipe-hello-bin", said.SerializeToString()),
            ("dpipe-secret-bin", secret),
        )
        self._call = self._channel.stream_stream(frame.METHOD)(
            iter(self._messages.get, None), metadata=metadata
        )

    def send(self, **message: Any) -> None:
        self.send_frames(*frame.cut(pb.ToCoordinator(**message)))

    def send_frames(self, *frames: bytes) -> None:
        for piece in frames:
            payload = len(piece).to_bytes(4, "big") + piece
            self.send_raw(_PREFIX.pack(len(payload), 0) + payload)

    def send_raw(self, message: bytes) -> None:
        self._messages.put(message)

    def greeting(self) -> Greeting:
        """Raises gRPC's error where it is refused."""
        return Greeting.FromString(next(self._call))

    def hears(self) -> list[str]:
        """The kinds of what the server says until it has said all."""
        try:
            self.greeting()
            messages = frame.assemble(
                _frames(self._call), pb.FromCoordinator, limits.FROM_COORDINATOR.__getitem__
            )
            kinds = [message.WhichOneof("kind") for message in messages]
            return [kind for kind in kinds if kind is not None]
        except grpc.RpcError as error:
            return [str(error.code())]
        finally:
            self.close()

    def close(self) -> None:
        self._messages.put(None)
        self._call.cancel()
        self._channel.close()


def _frames(messages: Iterator[bytes]) -> Iterator[bytes]:
    """The coordinator's frames in what its session writes."""
    data = _payload(messages)
    while size := int.from_bytes(bytes(itertools.islice(data, 4)), "big"):
        yield bytes(itertools.islice(data, size))


def _payload(messages: Iterator[bytes]) -> Iterator[int]:
    data = itertools.chain.from_iterable(messages)
    while prefix := bytes(itertools.islice(data, _PREFIX.size)):
        size, _ = _PREFIX.unpack(prefix)
        if size < 1 << 31:  # else a farewell
            yield from itertools.islice(data, size)
