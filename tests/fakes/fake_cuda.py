"""What `dpipe.streams.CudaStreams` uses of `torch.cuda`, on threads: work that is queued runs
later, in order.

The stream that a thread starts with is the program itself: what it is given has run, and to wait is
to block.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import ClassVar

import torch

from dpipe.streams import CudaStreams

HANG_S = 30.0


class FakeStream:
    """A thread that runs what it is given, in order."""

    by_handle: ClassVar[dict[int, "FakeStream"]] = {}
    _handles = itertools.count(1)

    def __init__(self, device: torch.device | None = None) -> None:
        self.cuda_stream = next(self._handles)
        self.by_handle[self.cuda_stream] = self
        self._queue: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def queue(self, work: Callable[[], None]) -> None:
        self._queue.put(work)

    def wait_event(self, event: "FakeEvent") -> None:
        self.queue(event.synchronize)

    def _run(self) -> None:
        with suppress(Empty):  # nothing stops it: a test that has ended gives it nothing more
            while True:
                self._queue.get(timeout=HANG_S)()


class Program(FakeStream):
    """The stream that is current where none was chosen."""

    def __init__(self) -> None:
        self.cuda_stream = 0

    def queue(self, work: Callable[[], None]) -> None:
        work()


class FakeEvent:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        self._fired = threading.Event()
        self.at_s = 0.0

    def record(self, stream: FakeStream) -> None:
        stream.queue(self._fire)

    def query(self) -> bool:
        return self._fired.is_set()

    def synchronize(self) -> None:
        assert self._fired.wait(HANG_S), "a stream waits for an event that nobody comes to"

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert self.query() and end.query(), "an event is asked for its time before it was come to"
        return max(0.0, end.at_s - self.at_s) * 1e3  # as little as CUDA promises

    def _fire(self) -> None:
        self.at_s = time.perf_counter()
        self._fired.set()


class FakeCuda:
    Event, Stream = FakeEvent, FakeStream

    def __init__(self) -> None:
        self._here = threading.local()
        self._program = Program()

    def current_device(self) -> int:
        return 0

    def set_device(self, device: torch.device) -> None:
        pass

    def utilization(self, device: torch.device) -> int:
        return 83

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        return getattr(self._here, "stream", self._program)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._here.stream = before


class ThreadedStreams(CudaStreams):
    """`CudaStreams` over `FakeCuda`, for tensors on the CPU."""

    def __init__(self, cuda: FakeCuda) -> None:
        super().__init__(torch.device("cuda", 0), cuda)
        self.device = torch.device("cpu")
        self.kept: list[torch.Tensor] = []

    @property
    def gpu(self) -> str:
        return f"of {id(self)}"

    def keep(self, tensor: torch.Tensor) -> None:
        self.kept.append(tensor)
