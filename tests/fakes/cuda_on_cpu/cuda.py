"""`torch.cuda` for the stand-in: what dpipe and its tests use of it. Imported once the device is
there.
"""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from fakes.cuda_on_cpu import nccl

if TYPE_CHECKING:
    from fakes.cuda_on_cpu import Device

HANG_S = 30.0
NAME = "a CPU that stands in"
_device: Any = None  # the `Device`, from `stand_in` on


def stand_in(device: "Device") -> None:
    """Be `torch.cuda`."""
    global _device
    _device = device
    count = device.num_devices()
    replaced = {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": torch.accelerator.current_device_index,
        "set_device": lambda of: torch.accelerator.set_device_index(index(of)),
        "synchronize": lambda of=None: device.see_all(),
        "Stream": Stream,
        "Event": Event,
        "stream": on_stream,
        "current_stream": current_stream,
        "memory_allocated": lambda of=None: device.memory_now(index(of)),
        "max_memory_allocated": lambda of=None: device.memory_peak(index(of)),
        "mem_get_info": lambda of=None: (
            properties(of).total_memory - device.memory_now(index(of)),
            properties(of).total_memory,
        ),
        "reset_peak_memory_stats": lambda of=None: device.reset_peak(index(of)),
        "get_device_name": lambda of=None: NAME,
        "get_device_properties": properties,
        "get_device_capability": lambda of=None: (9, 0),
        "utilization": utilization,
        "default_generators": tuple(torch.Generator().manual_seed(n) for n in range(count)),
        "set_sync_debug_mode": lambda mode: device.refuse_waits(mode == "error"),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda of=0: (
        0
    )  # imported where there is a GPU, and not called
    _synchronise_by_futures()


def index(of: Any = None) -> int:
    """The number of a device, which is given as torch takes it."""
    if isinstance(of, int):
        return of
    found = None if of is None else torch.device(of).index
    return torch.accelerator.current_device_index() if found is None else found


class Stream(torch.Stream):
    def __new__(cls, device: Any = None, of: torch.Stream | None = None) -> "Stream":
        if of is None:
            return super().__new__(cls, torch.device("cuda", index(device)))
        known = {
            "stream_id": of.stream_id,
            "device_index": of.device_index,
            "device_type": of.device_type,
        }
        return super().__new__(cls, **known)

    def __init__(self, *given: Any, **named: Any) -> None:
        self.where = (self.device_index, self.stream_id)

    @property
    def cuda_stream(self) -> int:
        return nccl.handle(self.where)

    def wait_event(self, event: "Event") -> None:
        event.land()
        _device.wait(*self.where, event.number)


class Event:
    """A position in its stream; NCCL's receives may still be running."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._timed = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        where = (stream or current_stream()).where
        self.number, self._under_way = _device.record(*where), nccl.under_way(where)
        self._at = time.perf_counter()

    def query(self) -> bool:
        over = all(receive.is_set() for receive in self._under_way)
        if over:
            _device.see_event(self.number)
        return over

    def synchronize(self) -> None:
        self.land()
        _device.see_event(self.number)

    def land(self) -> None:
        for receive in self._under_way:
            assert receive.wait(HANG_S), "NCCL waits for a peer that does not send"

    def elapsed_time(self, other: "Event") -> float:
        assert self._timed and other._timed, (
            "CUDA would refuse: both events must have enable_timing"
        )
        return (other._at - self._at) * 1e3


@contextmanager
def on_stream(stream: Stream) -> Iterator[None]:
    device_before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(stream.device_index)
    before = current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(device_before)


def current_stream(of: Any = None) -> Stream:
    return Stream(of=torch.accelerator.current_stream(index(of)))


def properties(of: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=NAME, uuid=f"stand-in-{index(of)}", total_memory=1 << 40, major=9, minor=0
    )


def utilization(of: Any = None) -> int:
    raise ModuleNotFoundError("there is no nvidia-ml-py for a stand-in")


def _synchronise_by_futures() -> None:
    """A thread that takes a result has synchronised with the thread that made it."""
    give, take = Future.set_result, Future.result

    def set_result(self: Any, result: Any) -> None:
        self.event = _device.tell()
        give(self, result)

    def result(self: Any, timeout: float | None = None) -> Any:
        found = take(self, timeout)
        if hasattr(self, "event"):
            _device.see_event(self.event)
        return found

    Future.set_result, Future.result = set_result, result
