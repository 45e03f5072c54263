"""Daemons of Debian's, which a test starts for itself and stops."""

import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_STOP_S = 10.0


def needs(*programs: str) -> None:
    """Fails if one is not installed: these tests run only where they are asked for."""
    missing = [program for program in programs if shutil.which(program) is None]
    if missing:
        pytest.fail(f"needs {', '.join(missing)}: run scripts/apt-daemons as root")


@contextmanager
def started(
    command: Sequence[str], log: Path, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The process while the block runs. What it says is in `log`."""
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=env)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_S)


def until(condition: Callable[[], bool], what: str, timeout_s: float = 60.0) -> None:
    """Looks ten times a second. Fails with `what` after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"after {timeout_s:g} s still not: {what}"
        time.sleep(0.1)
