"""CUDA streams and events, or their stand-ins on a CPU.

    compute   --[1F4]--*--[1B2]------------------.--[1F5]--   the caller's own stream
    send      ---------'--wait--[1SEND_F4]--*    |            encoding, copies to the host
    receive   --[1RECV_F5]--*--------------------'--wait      copies from the host          * a mark

The host queues work and goes on. `mark()` is a point in the current stream, behind all that is
queued there; `wait(mark)` lets work that is queued from then on run behind it. Neither blocks the
host; `block` does, and has a deadline.

On a CPU a stream is the program itself: what is queued has run, a mark is the time, and there is
nothing to wait for.
"""

import logging
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

LOG = logging.getLogger(__name__)
_POLL_S = 20e-6  # of `block`: at first, then twice as long each time
_POLL_MAX_S = 1e-3
_NOTHING = nullcontext()

Mark = Any  # the time in nanoseconds on a CPU, an event on a GPU: `Streams` alone looks inside


class Streams(Protocol):
    """The streams of one device. Used by one thread, but for methods that say "from any thread"."""

    device: torch.device

    def mark(self) -> Mark:
        """A point in the current stream. From any thread."""

    def wait(self, mark: Mark) -> None:
        """Let work queued from here on, on the current stream, run behind `mark`. From any
        thread.
        """

    def done(self, mark: Mark) -> bool:
        """Whether the device has reached `mark`. From any thread."""

    def block(self, mark: Mark, timeout_s: float) -> None:
        """Wait on the host for the device to reach `mark`; raises `TimeoutError`. From any
        thread.
        """

    def sending(
        self, after: Mark, tensors: Iterable[torch.Tensor]
    ) -> AbstractContextManager[object]:
        """Inside, work goes to the send stream, behind `after`. It may read `tensors` even if the
        caller frees them meanwhile.
        """

    def receiving(self) -> AbstractContextManager[object]:
        """Inside, work goes to the receive stream. From any thread."""

    def keep(self, tensor: torch.Tensor) -> None:
        """The current stream uses `tensor`, made on another: do not reuse its memory before
        then.
        """

    def catch_up(self) -> None:
        """Wait on the host for the current stream; once a step, when all of it is queued."""

    def ns(self, mark: Mark) -> int:
        """When the device reached `mark`, by `time.perf_counter_ns`; it must have reached it."""

    def peak_bytes(self) -> int | None:
        """The most device memory that tensors have taken so far; None on a CPU."""

    def use_percent(self) -> int | None:
        """How busy the GPU was in the last second or less, as in nvidia-smi; None if unknown."""


class HostStreams:
    """A CPU: everything runs in the order of the program."""

    device = torch.device("cpu")
    mark = staticmethod(time.perf_counter_ns)

    def wait(self, mark: Mark) -> None:
        pass

    def done(self, mark: Mark) -> bool:
        return True

    def block(self, mark: Mark, timeout_s: float) -> None:
        pass

    def sending(
        self, after: Mark, tensors: Iterable[torch.Tensor]
    ) -> AbstractContextManager[object]:
        return _NOTHING

    def receiving(self) -> AbstractContextManager[object]:
        return _NOTHING

    def keep(self, tensor: torch.Tensor) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def ns(self, mark: Mark) -> int:
        return int(mark)

    def peak_bytes(self) -> int | None:
        return None

    def use_percent(self) -> int | None:
        return None


@dataclass(frozen=True)
class _Anchor:
    """An event, and the host's time at which it was seen to have passed."""

    event: Any
    ns: int


class CudaStreams:
    """A GPU. Construct it in the thread that computes: its current stream is the compute stream.

    `cuda` is `torch.cuda`, or a fake of it in tests.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        index = cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self._cuda = cuda
        cuda.set_device(self.device)  # libraries that are given no device use the current one
        # One for each direction: a copy to the host and one from it run beside each other.
        self._send = cuda.Stream(self.device)
        self._receive = cuda.Stream(self.device)
        self._tells_use = True
        self.catch_up()

    def catch_up(self) -> None:
        event = self.mark()
        event.synchronize()
        # A new anchor each step: the time between two events is a float of milliseconds, which is
        # coarse between events far apart.
        self._anchor = _Anchor(event, time.perf_counter_ns())

    @property
    def gpu(self) -> str:
        """The GPU's UUID."""
        return str(self._cuda.get_device_properties(self.device).uuid)

    def stream(self) -> Any:
        """A stream of its own, for a link."""
        return self._cuda.Stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[object]:
        """Inside, work goes to `stream` and its device is current; a new thread starts on GPU 0."""
        context: AbstractContextManager[object] = self._cuda.stream(stream)
        return context

    def mark(self) -> Mark:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self.device))
        return event

    def wait(self, mark: Mark) -> None:
        self._cuda.current_stream(self.device).wait_event(mark)

    def done(self, mark: Mark) -> bool:
        return bool(mark.query())

    def block(self, mark: Mark, timeout_s: float) -> None:
        # Not `synchronize`, which has no deadline. Sleeping leaves the interpreter to the threads
        # that move bytes.
        deadline = time.monotonic() + timeout_s
        pause_s = _POLL_S
        while not mark.query():
            if time.monotonic() > deadline:
                raise TimeoutError(f"the device has not reached an event within {timeout_s:g} s")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MAX_S)

    def sending(
        self, after: Mark, tensors: Iterable[torch.Tensor]
    ) -> AbstractContextManager[object]:
        self._send.wait_event(after)
        with self.on(self._send):
            for tensor in tensors:
                self.keep(tensor)
        return self.on(self._send)

    def receiving(self) -> AbstractContextManager[object]:
        return self.on(self._receive)

    def keep(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._cuda.current_stream(self.device))

    def ns(self, mark: Mark) -> int:
        # Asked both ways: CUDA does not promise a negative time where `mark` came first.
        anchor = self._anchor  # read once: the computing thread may replace it meanwhile
        since_ms = anchor.event.elapsed_time(mark)
        if since_ms <= 0:
            since_ms = -mark.elapsed_time(anchor.event)
        return anchor.ns + int(since_ms * 1e6)

    def peak_bytes(self) -> int | None:
        return int(self._cuda.max_memory_allocated(self.device))

    def use_percent(self) -> int | None:
        if self._tells_use:
            try:
                return int(self._cuda.utilization(self.device))
            # NVML raises kinds of its own: no nvidia-ml-py, or a driver that does not say.
            except Exception as error:
                self._tells_use = False
                LOG.warning("the use of %s is not reported: %s", self.device, error)
        return None


HOST = HostStreams()


def streams_of(device: torch.device | str) -> Streams:
    """The streams of `device`."""
    device = torch.device(device)
    return CudaStreams(device) if device.type == "cuda" else HOST


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`tensor` on `device`, for use on the current stream; the host does not wait for a GPU."""
    if device.type != "cuda" or tensor.device.type == "cuda":
        return tensor.to(device)
    # Pinned, because CUDA copies from other memory only while the host waits.
    return tensor.pin_memory().to(device, non_blocking=True)
