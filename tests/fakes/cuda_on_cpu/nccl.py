"""NCCL for the stand-in: `cupy.cuda.nccl` between threads of a process, and torch's group, which is
gloo's.

What is received lands later than it is queued; all else moves at once. The device is told of each
use of a tensor. `fakes/fake_nccl.py` is for the transport by itself: with buffers that fill up, and
streams that wait.
"""

import ctypes
import secrets
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from fakes.cuda_on_cpu import Device

Where = tuple[int, int]  # a device and a stream

_HANDLES = 1 << 12  # a stream's handle is a pointer: never a small number
_receives: dict[Where, list[threading.Event]] = defaultdict(list)


def handle(where: Where) -> int:
    device, stream = where
    return (stream * 64 + device + 1) * _HANDLES


def _where(stream_handle: int) -> Where:
    stream, device = divmod(stream_handle // _HANDLES - 1, 64)
    return device, stream


def under_way(where: Where) -> list[threading.Event]:
    """Receives that are queued on a stream and have not finished."""
    _receives[where] = [receive for receive in _receives[where] if not receive.is_set()]
    return list(_receives[where])


def stand_in(device: "Device") -> None:
    """Be `cupy.cuda.nccl` and `torch.distributed.ProcessGroupNCCL`."""
    module: Any = ModuleType("cupy.cuda.nccl")
    module.available, module.NCCL_UINT8, module.NcclError = True, 1, NcclError
    module.get_unique_id = lambda: secrets.token_bytes(128)
    module.NcclCommunicator = lambda ndev, unique_id, rank: Communicator(device, unique_id, rank)
    cupy, cuda = ModuleType("cupy"), ModuleType("cupy.cuda")
    cupy.cuda, cuda.nccl = cuda, module
    sys.modules |= {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": module}
    dist.ProcessGroupNCCL = Group


class NcclError(RuntimeError):
    pass


class Communicator:
    """One of two ends. What is sent is over at once; what is received when it is there, or when an
    end is aborted.
    """

    _wires: ClassVar[dict[tuple[bytes, int], SimpleQueue[bytes | None]]] = defaultdict(
        SimpleQueue
    )  # to an end

    def __init__(self, device: "Device", unique_id: bytes, rank: int) -> None:
        self._device, self._ended, self._lost = device, False, False
        self._to_me, self._to_peer = self._wires[unique_id, rank], self._wires[unique_id, 1 - rank]
        self._jobs: SimpleQueue[tuple[int, int, threading.Event, int] | None] = SimpleQueue()
        threading.Thread(target=self._receive_all, daemon=True).start()

    def send(self, pointer: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._use(pointer, False, stream)
        self._to_peer.put(ctypes.string_at(pointer, count))

    def recv(self, pointer: int, count: int, datatype: int, peer: int, stream: int) -> None:
        self._use(pointer, True, stream)
        landed, where = threading.Event(), _where(stream)
        _receives[where].append(landed)
        self._device.receiving(where[0], 1)
        self._jobs.put((pointer, count, landed, where[0]))

    def check_async_error(self) -> None:
        if self._lost:
            raise NcclError(
                "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"
            )

    def abort(self) -> None:
        self._ended = True
        for wire in (self._to_me, self._to_peer, self._jobs):
            wire.put(None)

    destroy = abort

    def _use(self, pointer: int, writes: bool, stream: int) -> None:
        if self._ended:
            raise NcclError("NCCL_ERROR_INVALID_ARGUMENT: invalid argument")
        self._device.use_raw(pointer, writes, *_where(stream), b"NCCL")

    def _receive_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            pointer, count, landed, device = job
            message = None if self._lost or self._ended else self._to_me.get()
            if message is None:
                self._lost = True
            else:
                assert len(message) == count, "NCCL would hang: the two ends disagree on a size"
                ctypes.memmove(pointer, message, count)
            self._device.receiving(device, -1)
            landed.set()


class Group:
    """What dpipe uses of `ProcessGroupNCCL`. Its calls run on a stream of its own."""

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        gloo: Any = dist.ProcessGroupGloo
        chosen = gloo._Options()
        chosen._timeout, chosen._devices = (
            options._timeout,
            [gloo.create_device(hostname="127.0.0.1")],
        )
        self._gloo, self._stream = gloo(store, rank, size, chosen), torch.cuda.Stream()

    def allreduce(self, tensors: Sequence[torch.Tensor], options: Any = None) -> "Work":
        host = [torch.ops.cuda_on_cpu.host(tensor) for tensor in tensors]
        wide = [tensor.float() for tensor in host]  # gloo does not add bf16
        chosen = options or dist.AllreduceOptions()

        def land() -> None:
            for tensor, total in zip(host, wide, strict=True):
                tensor.copy_(total)

        return self._begin([], tensors, lambda: self._gloo.allreduce(wide, chosen), land)

    def _allgather_base(self, out: torch.Tensor, mine: torch.Tensor) -> "Work":
        return self._between(out, mine, self._gloo._allgather_base)

    def _reduce_scatter_base(self, out: torch.Tensor, mine: torch.Tensor) -> "Work":
        return self._between(out, mine, self._gloo._reduce_scatter_base)

    def abort(self) -> None:
        self._gloo.abort()

    def _between(self, out: torch.Tensor, mine: torch.Tensor, call: Callable[..., Any]) -> "Work":
        host = torch.ops.cuda_on_cpu.host
        return self._begin([mine], [out], lambda: call(host(out), host(mine)), lambda: None)

    def _begin(
        self,
        read: Sequence[torch.Tensor],
        written: Sequence[torch.Tensor],
        call: Callable[[], Any],
        land: Callable[[], None],
    ) -> "Work":
        assert all(tensor.is_cuda and tensor.is_contiguous() for tensor in (*read, *written)), (
            "NCCL refuses them"
        )
        made = torch.cuda.Event()
        made.record()
        self._stream.wait_event(made)
        with torch.cuda.stream(self._stream):
            for tensor in (*read, *written):
                torch.ops.cuda_on_cpu.touch(tensor, any(tensor is one for one in written))
                tensor.record_stream(self._stream)
            moved = torch.cuda.Event()
            moved.record()
        return Work(call(), land, moved)


class Work:
    def __init__(self, inner: Any, land: Callable[[], None], moved: torch.cuda.Event) -> None:
        self._inner, self._land, self._moved = inner, land, moved

    def wait(self, timeout: Any = None) -> bool:
        """The current stream waits."""
        if self._inner is not None:
            self._inner.wait()
            self._land()
            self._inner = None
        torch.cuda.current_stream().wait_event(self._moved)
        return True

    def is_completed(self) -> bool:
        return self._inner is None or bool(self._inner.is_completed())
