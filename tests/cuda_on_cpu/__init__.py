"""A stand-in for GPUs where torch is a CPU build: tests marked `gpu` run, and what a GPU would do wrong fails them.

    PYTHONPATH=tests python -m pytest -p cuda_on_cpu -m "gpu or stand_in"

`device.cpp` makes a CUDA device of host memory and looks for races between streams; this module is `torch.cuda` to it,
and `nccl.py` is `cupy.cuda.nccl` and torch's NCCL group. It stands for this process alone: ranks are threads of it.
Nothing here takes the time that a GPU would, and nothing runs later than it is queued but what NCCL receives.

A pytest plugin, because torch must find the device when it is first imported. With a CUDA build of torch it is nothing.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("device.cpp")
HANG_S = 30.0
_MOST_SHOWN = 1 << 16  # bytes


def _torch_folder() -> Path:
    """Found without an import: the device must be there first."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def _is_for_gpus(folder: Path) -> bool:
    spec = importlib.util.spec_from_file_location("torch_version", folder / "version.py")
    assert spec is not None and spec.loader is not None
    version = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(version)
    return version.cuda is not None


def _built(torch: Path) -> Path:
    """The library of `device.cpp`; kept for the next time, by what it is made of."""
    options = ["-O1", "-std=c++20", "-shared", "-fPIC", f"-L{torch / 'lib'}", f"-Wl,-rpath,{torch / 'lib'}"]
    options += [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}", "-ltorch_cpu", "-lc10"]
    made_of = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + repr(options).encode()
    library = Path(tempfile.gettempdir()) / f"dpipe-cuda-on-cpu-{os.getuid()}-{hashlib.sha256(made_of).hexdigest()}.so"
    if not library.exists():
        if shutil.which("g++") is None:
            raise pytest.UsageError("the stand-in for GPUs is compiled: install g++")
        own = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", str(SOURCE), "-o", str(own), *options], check=True, timeout=300)
        own.replace(library)
    return library


class Device:
    """`device.cpp`'s functions."""

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
        number, where, flag = ctypes.c_int64, ctypes.c_int, ctypes.c_bool
        self.num_devices = self._function("num_devices", where)
        self.memory_now = self._function("memory_now", number, where)
        self.memory_peak = self._function("memory_peak", number, where)
        self.reset_peak = self._function("reset_peak", None, where)
        self.refuse_waits = self._function("refuse_waits", None, flag)
        self.record = self._function("record", number, where, number)
        self.wait = self._function("wait", None, where, number, number)
        self.see_event = self._function("see_event", None, number)
        self.see_all = self._function("see_all", None)
        self.tell = self._function("tell", number)
        self.receiving = self._function("receiving", None, where, where)
        self.use_raw = self._function("use_raw", None, ctypes.c_void_p, flag, where, number, ctypes.c_char_p)
        self._take_races = self._function("take_races", number, ctypes.c_char_p, number)

    def take_races(self) -> tuple[int, str]:
        """How many were found since the last call, and the first ones in words."""
        text = ctypes.create_string_buffer(_MOST_SHOWN)
        count = self._take_races(text, _MOST_SHOWN)
        return count, text.value.decode(errors="replace")

    def _function(self, name: str, returned: Any, *taken: Any) -> Any:
        function = getattr(self._library, name)
        function.restype, function.argtypes = returned, taken
        return lambda *arguments: function(*arguments)  # a ctypes function cannot be hashed, as torch.compile wants


DEVICE: Device | None = None  # while it stands in


def stand_in(device: Device) -> None:
    """Be `torch.cuda`."""
    import torch

    from cuda_on_cpu import nccl

    cuda: Any = torch.cuda
    count = device.num_devices()

    def index(of: Any = None) -> int:
        if isinstance(of, int):
            return of
        found = None if of is None else torch.device(of).index
        return cuda.current_device() if found is None else found

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, of: torch.Stream | None = None) -> "Stream":
            if of is not None:
                known = {"stream_id": of.stream_id, "device_index": of.device_index, "device_type": of.device_type}
                return super().__new__(cls, **known)
            return super().__new__(cls, torch.device("cuda", index(device)))

        def __init__(self, *given: Any, **named: Any) -> None:
            self.where = (self.device_index, self.stream_id)

        @property
        def cuda_stream(self) -> int:
            return nccl.handle(self.where)

        def wait_event(self, event: "Event") -> None:
            event.land()
            device.wait(*self.where, event.number)

    class Event:
        """What its stream had come to; NCCL's receives may still be under way."""

        def __init__(self, enable_timing: bool = False) -> None:
            self._timed = enable_timing

        def record(self, stream: Stream | None = None) -> None:
            where = (stream or cuda.current_stream()).where
            self.number, self._under_way = device.record(*where), nccl.under_way(where)
            self._at = time.perf_counter()

        def query(self) -> bool:
            over = all(receive.is_set() for receive in self._under_way)
            if over:
                device.see_event(self.number)
            return over

        def synchronize(self) -> None:
            self.land()
            device.see_event(self.number)

        def land(self) -> None:
            for receive in self._under_way:
                assert receive.wait(HANG_S), "NCCL waits for a peer that does not send"

        def elapsed_time(self, other: "Event") -> float:
            assert self._timed and other._timed, "CUDA would refuse: both events must have enable_timing"
            return (other._at - self._at) * 1e3

    @contextmanager
    def on_stream(stream: Stream) -> Iterator[None]:
        device_before = cuda.current_device()
        cuda.set_device(stream.device)
        before = cuda.current_stream()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(before)
            cuda.set_device(device_before)

    def current_stream(of: Any = None) -> Stream:
        return Stream(of=torch.accelerator.current_stream(index(of)))

    def properties(of: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="a CPU that stands in", uuid=f"stand-in-{index(of)}", total_memory=1 << 40, major=9, minor=0
        )

    def utilization(of: Any = None) -> int:
        raise ModuleNotFoundError("there is no nvidia-ml-py for a stand-in")

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
        "reset_peak_memory_stats": lambda of=None: device.reset_peak(index(of)),
        "get_device_name": lambda of=None: properties(of).name,
        "get_device_properties": properties,
        "get_device_capability": lambda of=None: (9, 0),
        "utilization": utilization,
        "default_generators": tuple(torch.Generator().manual_seed(n) for n in range(count)),
        "set_sync_debug_mode": lambda mode: device.refuse_waits(mode == "error"),
    }
    for name, value in replaced.items():
        setattr(cuda, name, value)
    torch._C._cuda_getCurrentRawStream = lambda of=0: 0  # imported where there is a GPU, and not called
    _tell_what_futures_tell(device)
    nccl.stand_in(device)


def _tell_what_futures_tell(device: Device) -> None:
    """Who takes a result knows what the thread knew that gave it."""
    give, take = Future.set_result, Future.result

    def set_result(self: Any, result: Any) -> None:
        self.told = device.tell()
        give(self, result)

    def result(self: Any, timeout: float | None = None) -> Any:
        found = take(self, timeout)
        if hasattr(self, "told"):
            device.see_event(self.told)
        return found

    Future.set_result, Future.result = set_result, result


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before anything imports torch. With a build for GPUs these are left as they are."""
    global DEVICE
    folder = _torch_folder()
    if not _is_for_gpus(folder):
        DEVICE = Device(_built(folder))
        stand_in(DEVICE)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if DEVICE is not None and marker is not None and "real" in marker.kwargs:
        pytest.skip(f"needs a real GPU: {marker.kwargs['real']}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test passes if nothing raced."""
    yield
    count, races = (0, "") if DEVICE is None else DEVICE.take_races()
    assert not count, f"{count} races, of which\n{races[:4000]}"
