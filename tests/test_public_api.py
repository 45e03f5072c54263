"""The public names of `import dpipe`: removing one breaks users' programs."""

import inspect
import subprocess
import sys

import pytest

import dpipe

PUBLIC = """
    Action Config Cost DpipeError InputError Link Network Op RunError Schedule Span Timeline
    check generate launch load load_network lower simulate train
"""


def test_public_names_are_these() -> None:
    assert dpipe.__all__ == PUBLIC.split()


@pytest.mark.parametrize("name", PUBLIC.split())
def test_public_name_is_found_where_it_lives(name: str) -> None:
    assert getattr(dpipe, name).__name__ == name


@pytest.mark.parametrize("name", PUBLIC.split())
def test_public_name_is_documented(name: str) -> None:
    assert inspect.getdoc(getattr(dpipe, name))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("load", "path overrides"),
        (
            "train",
            "config overrides rank world_size coordinator timeout_s resume fallback on_row show",
        ),
        ("launch", "config overrides num_ranks resume fallback on_row"),
        ("simulate", "schedule cost network"),
    ],
)
def test_parameters_keep_their_names(name: str, parameters: str) -> None:
    """Others may be added after them."""
    named = list(inspect.signature(getattr(dpipe, name)).parameters)
    assert named[: len(parameters.split())] == parameters.split()


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


def test_configuration_needs_no_torch() -> None:
    program = """
import sys, dpipe
assert dpipe.Config().train.steps == 100
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
