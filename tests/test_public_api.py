"""What `import dpipe` gives, pinned: taking a name away breaks somebody's program."""

import subprocess
import sys

import pytest

import dpipe

PUBLIC = """
    Action Config Cost DpipeError Link Network Op Schedule Span Timeline
    check generate load_network lower simulate
"""


def test_public_names_are_these() -> None:
    assert dpipe.__all__ == PUBLIC.split()


@pytest.mark.parametrize("name", PUBLIC.split())
def test_public_name_is_found_where_it_lives(name: str) -> None:
    assert getattr(dpipe, name).__name__ == name


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'dpipe' has no attribute 'sim'"):
        _ = dpipe.sim


def test_planning_and_predicting_need_no_torch() -> None:
    program = """
import sys
from dpipe import Cost, Network, generate, simulate
step = simulate(generate("1f1b", 4, 8), Cost.uniform(4, 1e4, 2e4, 1_000_000), Network())
assert step.duration_us > 8 * 3e4, step.duration_us
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
