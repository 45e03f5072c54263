"""A stand-in for GPUs where torch is a CPU build: tests marked `gpu` run, and what a GPU would do
wrong fails them.

    PYTHONPATH=tests python -m pytest -p fakes.cuda_on_cpu -m "gpu or stand_in"

`device.cpp` makes a CUDA device of host memory and looks for races between streams; `cuda.py` is
`torch.cuda` to it, and `nccl.py` is `cupy.cuda.nccl` and torch's NCCL group. It stands for this
process alone: ranks are threads of it. Nothing here takes the time that a GPU would, and nothing
runs later than it is queued but what NCCL receives.

A pytest plugin, because torch must find the device when it is first imported. With a CUDA build of
torch it is nothing.
"""

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_name("device.cpp")
_MOST_SHOWN = 1 << 16  # bytes


def _torch_folder() -> Path:
    """Without importing torch, because the device must exist first."""
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
    options = [
        "-O1",
        "-std=c++20",
        "-shared",
        "-fPIC",
        f"-L{torch / 'lib'}",
        f"-Wl,-rpath,{torch / 'lib'}",
    ]
    options += [
        f"-I{torch / 'include'}",
        f"-I{torch / 'include/torch/csrc/api/include'}",
        "-ltorch_cpu",
        "-lc10",
    ]
    made_of = SOURCE.read_bytes() + (torch / "version.py").read_bytes() + repr(options).encode()
    library = (
        SOURCE.parent / "__pycache__" / f"device-{hashlib.sha256(made_of).hexdigest()[:16]}.so"
    )
    if not library.exists():
        library.parent.mkdir(exist_ok=True)
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
        self.use_raw = self._function(
            "use_raw", None, ctypes.c_void_p, flag, where, number, ctypes.c_char_p
        )
        self._take_races = self._function("take_races", number, ctypes.c_char_p, number)

    def take_races(self) -> tuple[int, str]:
        """The number of races since the last call, and descriptions of the first ones."""
        text = ctypes.create_string_buffer(_MOST_SHOWN)
        count = self._take_races(text, _MOST_SHOWN)
        return count, text.value.decode(errors="replace")

    def _function(self, name: str, returned: Any, *taken: Any) -> Any:
        function = getattr(self._library, name)
        function.restype, function.argtypes = returned, taken
        return lambda *arguments: function(
            *arguments
        )  # a ctypes function cannot be hashed, as torch.compile wants


def build() -> Path | None:
    """The library of the stand-in; None where torch is for GPUs."""
    folder = _torch_folder()
    return None if _is_for_gpus(folder) else _built(folder)


DEVICE: Device | None = None  # while it stands in


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before anything imports torch. With a build for GPUs these are left as they are."""
    global DEVICE
    library = build()
    if library is not None:
        DEVICE = Device(library)
        from fakes.cuda_on_cpu import cuda, nccl

        cuda.stand_in(DEVICE)
        nccl.stand_in(DEVICE)


def pytest_runtest_setup(item: pytest.Item) -> None:
    marker = item.get_closest_marker("gpu")
    if DEVICE is not None and marker is not None and "real" in marker.kwargs:
        pytest.skip(f"needs a real GPU: {marker.kwargs['real']}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """A test passes if nothing raced in it."""
    if DEVICE is not None:
        DEVICE.take_races()  # of one that has failed before
    yield
    count, races = (0, "") if DEVICE is None else DEVICE.take_races()
    assert not count, f"{count} races, of which\n{races[:4000]}"
