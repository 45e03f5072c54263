"""The planner's search beside other placements: a small case anew, and what the docs say of the
kept ones.
"""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import placement_cases  # noqa: E402 - scripts are not a package

RESULTS = ROOT / "scripts/results/placement.jsonl"


def kept() -> list[dict[str, object]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_search_finds_the_best_of_all_placements_and_cuts() -> None:
    case = placement_cases.Case("small", 3, 2, speeds=(1.0, 0.5), num_blocks=4)
    row = placement_cases.row_of(case, dtfm_seconds=0.1)
    assert row.planner == pytest.approx(row.exhaustive, rel=1e-9)
    assert row.planner <= min(row.greedy, row.random_best, row.by_dtfm)
    assert row.random_best < row.random_median
    assert row.dtfm_cost <= row.dtfm_cost_of_planner


def test_kept_rows_are_of_the_cases_and_the_planners_is_least() -> None:
    rows = kept()
    assert [row["case"] for row in rows] == [case.name for case in placement_cases.CASES]
    for row in rows:
        if row["exhaustive"] is not None:
            assert row["planner"] == row["exhaustive"]
        assert row["planner"] <= min(row["greedy"], row["random_best"], row["by_dtfm"])


def test_docs_have_the_kept_table() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert placement_cases.as_table(kept()) in page


@pytest.mark.slow
def test_fleet_is_planned_with_all_decisions() -> None:
    fleet = placement_cases.Case("small", 6, 1, speeds=(1.0, 0.5), num_blocks=4)
    row = placement_cases.fleet_row(fleet, batch_size=16)
    assert row.machines == 6
    assert row.stages * row.replicas <= 6
    # Of few micro-batches: the two differ by what forward and backward are in each other's way.
    assert row.estimated_s == pytest.approx(row.step_s, rel=0.3)
    assert row.cpu_s > 0


def test_fleets_are_of_the_sizes_that_are_promised() -> None:
    assert [fleet.count for fleet in placement_cases.FLEETS] == [64, 128, 512]
    speeds = [len(fleet.speeds) for fleet in placement_cases.FLEETS]
    assert speeds == [1, 1, 3]
