"""What `dpipe.transport.nccl` uses of `cupy.cuda.nccl`, between threads. Streams are those of
`fake_cuda`.

What it refuses, and how, is what cupy 14.2 with NCCL 2.28 did without a GPU; `ids=tuple` is cupy
13.

As NCCL does, a send of up to BUFFER bytes is over before its receiver is there, and a larger one
waits for it; a peer that is gone is an asynchronous error of its communicator; and what is aborted
comes to an end without having moved.
"""

import ctypes
import secrets
from collections import deque
from functools import partial
from threading import Barrier, Condition

import torch

from dpipe.transport.base import Transport
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Pending
from fakes.fake_cuda import HANG_S, FakeStream

BUFFER = 4 << 20
ID_BYTES = 128


class NcclError(RuntimeError):
    pass


class _Channel:
    """What the two ends of a communicator share."""

    def __init__(self) -> None:
        self.met = Barrier(2)
        self.changed = Condition()
        self.messages: deque[bytes] = deque()
        self.ended: set[int] = set()


class FakeNccl:
    """Stands for the module."""

    NCCL_UINT8 = 1
    available = True

    def __init__(self, ids: type[bytes] | type[tuple] = bytes) -> None:
        self._ids = ids
        self.channels: dict[bytes | tuple[int, ...], _Channel] = {}
        self.communicators: list[FakeCommunicator] = []

    def get_unique_id(self) -> bytes | tuple[int, ...]:
        drawn = secrets.token_bytes(ID_BYTES)
        unique_id = (
            drawn if self._ids is bytes else tuple(memoryview(drawn).cast("b"))
        )  # signed, as C's char
        self.channels[unique_id] = _Channel()
        return unique_id

    def NcclCommunicator(  # noqa: N802 - cupy's name
        self,
        ndev: int,
        commId: bytes | tuple[int, ...],  # noqa: N803 - cupy's name
        rank: int,
    ) -> "FakeCommunicator":
        assert ndev == 2
        if type(commId) is not self._ids:
            raise TypeError(f"Argument 'commId' has incorrect type (expected {self._ids.__name__})")
        if len(commId) != ID_BYTES:
            raise ValueError(f"commId length {len(commId)} != {ID_BYTES}.")
        channel = self.channels[commId]
        channel.met.wait(HANG_S)
        self.communicators.append(FakeCommunicator(channel, rank))
        return self.communicators[-1]


class FakeCommunicator:
    def __init__(self, channel: _Channel, rank: int) -> None:
        self._channel, self._rank = channel, rank

    def send(self, sendbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._check(datatype, peer)
        FakeStream.by_handle[stream].queue(partial(self._send, sendbuf, count))

    def recv(self, recvbuf: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._check(datatype, peer)
        FakeStream.by_handle[stream].queue(partial(self._recv, recvbuf, count))

    def check_async_error(self) -> None:
        self._refuse_if_ended()
        if 1 - self._rank in self._channel.ended:
            raise NcclError(
                "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
            )

    def abort(self) -> None:
        with self._channel.changed:
            self._channel.ended.add(self._rank)
            self._channel.changed.notify_all()

    destroy = abort

    def _check(self, datatype: int, peer: int) -> None:
        self._refuse_if_ended()
        assert (datatype, peer) == (FakeNccl.NCCL_UINT8, 1 - self._rank)

    def _refuse_if_ended(self) -> None:
        if (
            self._rank in self._channel.ended
        ):  # cupy forgets the communicator, and NCCL is called with none
            raise NcclError(
                "NCCL_ERROR_INVALID_ARGUMENT: invalid argument (run with NCCL_DEBUG=WARN for "
                "details)"
            )

    def _send(self, pointer: int, count: int) -> None:
        channel = self._channel
        with channel.changed:
            message = ctypes.string_at(pointer, count) if count else b""
            channel.messages.append(message)
            channel.changed.notify_all()
            self._wait(lambda: count <= BUFFER or message not in channel.messages)

    def _recv(self, pointer: int, count: int) -> None:
        channel = self._channel
        with channel.changed:
            self._wait(lambda: bool(channel.messages))
            if channel.messages and self._rank not in channel.ended:
                message = channel.messages.popleft()
                assert len(message) == count, "NCCL would hang: the two ends disagree on a size"
                if count:
                    ctypes.memmove(pointer, message, count)
                channel.changed.notify_all()

    def _wait(self, settled) -> None:
        """Not for ever: a test that goes wrong must not leave a stream behind that never ends."""
        self._channel.changed.wait_for(
            lambda: self._rank in self._channel.ended or settled(), HANG_S
        )


class Settling:
    """A transport whose `wait` settles as well: for tests that look at tensors, as a host does
    after a step.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner, self.rank, self.port = inner, inner.rank, inner.port
        self.prepare, self.rehearse = inner.prepare, inner.rehearse

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> Pending[None]:
        return self.inner.send(tensor, peer, tag)

    def recv(self, like: TensorSpec, peer: int, tag: str) -> "_Settling":
        return _Settling(self.inner.recv(like, peer, tag))

    def fail(self, error: Exception) -> None:
        self.inner.fail(error)

    def close(self) -> None:
        self.inner.close()


class _Settling:
    def __init__(self, inner: Pending[torch.Tensor]) -> None:
        self._inner = inner
        self.done, self.settle = inner.done, inner.settle

    def wait(self) -> torch.Tensor:
        tensor = self._inner.wait()
        self._inner.settle()
        return tensor

    @property
    def moved(self):
        return self._inner.moved
