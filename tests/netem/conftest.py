"""What tests marked `lab` need."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from netem.router import MODULES


@pytest.fixture(scope="session")
def possible() -> None:
    """A lab can be made here; where it cannot, that is a failure and not a silence."""
    if os.environ.get("DPIPE_NO_LAB") == "1":
        pytest.skip("DPIPE_NO_LAB=1: labs are not tested")
    missing = ["root"] if os.geteuid() else []
    missing += [
        program for program in ("ip", "tc", "ping", "linux.uml", "insmod", "ethtool") if not shutil.which(program)
    ]
    missing += [] if list(MODULES.glob("*/kernel/net/sched/sch_netem.ko")) else [str(MODULES)]
    if missing:
        pytest.fail(
            f"a lab needs {', '.join(missing)}: run scripts/apt-lab as root, or set DPIPE_NO_LAB=1 to go without"
        )


@pytest.fixture
def profile(tmp_path) -> Callable[[str], Path]:
    """`profile("delay_ms = ...")` is a file of its own each time."""

    def write(text: str) -> Path:
        path = tmp_path / f"profile{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
