"""What the tests of netem share."""

from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def profile(tmp_path) -> Callable[[str], Path]:
    """`profile("delay_ms = ...")` is a file of its own each time."""

    def write(text: str) -> Path:
        path = tmp_path / f"profile{len(list(tmp_path.iterdir()))}.toml"
        path.write_text(text, encoding="utf-8")
        return path

    return write
