"""The placement search beside DT-FM's own solver: with a stand-in for it, and what the docs say."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import dtfm_original  # noqa: E402 - scripts are not a package

RESULTS = ROOT / "scripts/results/placement_dtfm.jsonl"
# As the solver names things; its search puts each region's machines into one stage.
STAND_IN = """
import config
import dtfm

def problem():
    sizes = config.send_gradient_size, config.send_activation_size
    return dtfm.Problem(peer_delay, peer_bandwidth, 8, 8, *sizes)

def compute_data_parallel_cost(groups):
    links = dtfm._Links(problem())
    return FACTOR * max(links.exchange_s(group) for group in groups)

def compute_pipeline_parallel_cost(groups):
    return dtfm._Links(problem()).path_s([dtfm._mask(group) for group in groups]), None, None

def GCMA(nodes, population, offspring):
    by_region = sorted(nodes, key=lambda node: node % 8)
    return [by_region] * 3, [2.0, 1.0, 3.0], None
"""


@pytest.fixture
def own_modules() -> Iterator[None]:
    """The solver's files have names that anything might have."""
    yield
    for name in ("scheduler", "config"):
        sys.modules.pop(name, None)


def compared(folder: Path, factor: float) -> Result:
    (folder / "config.py").write_text("")
    (folder / "scheduler.py").write_text(STAND_IN.replace("FACTOR", str(factor)))
    arguments = ["--solver", str(folder), "--case", "eight regions", "--seconds", "0.1"]
    return CliRunner().invoke(dtfm_original.main, arguments)


@pytest.mark.usefixtures("own_modules")
def test_both_searches_are_priced_alike(tmp_path: Path) -> None:
    result = compared(tmp_path, 1.0)
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)
    assert row["candidates"] == 3
    assert row["found_s"] < row["original_s"]


@pytest.mark.usefixtures("own_modules")
def test_solver_with_another_cost_is_not_compared(tmp_path: Path) -> None:
    result = compared(tmp_path, 1.1)
    assert result.exit_code == 1
    assert "DT-FM's own function" in result.output


def test_folder_without_the_solver_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(dtfm_original.main, ["--solver", str(tmp_path)])
    assert result.exit_code == 2
    assert "give the solver's own folder" in result.output


def test_kept_searches_cost_no_more_than_the_solvers_and_docs_say_so() -> None:
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    assert [row["case"] for row in rows] == list(dtfm_original.CASES)
    for row in rows:
        assert row["original_took_s"] >= 320
        assert row["found_s"] <= row["original_s"]
    assert dtfm_original.as_table(rows) in (ROOT / "docs/results.md").read_text(encoding="utf-8")
