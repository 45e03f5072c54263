"""Each table of scripts/schedules.py at a tiny size, and what the docs say of the kept ones."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/results.md"
NAMES = ["bound", "few", "interleaved", "memory", "optimum", "overlap", "time"]
PROFILES = {
    "alike": "delay_ms = 10\nbandwidth_gbps = 1\n",
    "unlike": "delay_ms = 10\nbandwidth_gbps = 1\n"
    "link = [{ from = 0, to = 1, delay_ms = 30, bandwidth_gbps = 0.5 }]\n",
}


@pytest.fixture
def schedules(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("schedules")


@pytest.fixture
def tiny(
    schedules: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., str]:
    for name, text in PROFILES.items():
        (tmp_path / f"{name}.toml").write_text(text)
    changes = {
        "PROFILES": tmp_path,
        "RESULTS": tmp_path,
        "NUM_STAGES": 3,
        "MICROBATCHES": (2, 3),
        "FEW_AND_MANY": (2, 4),
        "MESSAGES_MIB": (8,),
        "SMALL": ((2, 3),),
        "BEFORE_S": {("unlike", 3): (9.0,)},
    }
    for key, value in changes.items():
        monkeypatch.setattr(schedules, key, value)

    def printed(*words: str) -> str:
        result = CliRunner().invoke(schedules.main, words)
        assert result.exit_code == 0, result.output
        return result.output

    return printed


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("bound", 4),
        ("few", 1),
        ("interleaved", 4),
        ("memory", 4),
        ("optimum", 1),
        ("overlap", 2),
        ("time", 2),
    ],
)
def test_each_table_is_made_kept_and_printed_again(
    name: str, rows: int, tiny: Callable[..., str], tmp_path: Path
) -> None:
    text = tiny(name)
    assert len(text.splitlines()) == 2 + rows
    assert tiny(name, "--print") == text
    kept = (tmp_path / f"schedules_{name}.jsonl").read_text().splitlines()
    steps = [row for row in map(json.loads, kept) if "auto_s" in row]
    for row in steps:
        assert row["auto_s"] <= row.get("published_s", 99)
        assert row["auto_s"] <= row.get("one_f_one_b_s", 99)
        assert row["auto_s"] >= max(row.get("bound_s", 0), row.get("optimum_s", 0)) - 1e-4


@pytest.mark.parametrize("name", NAMES)
def test_docs_say_what_the_file_says(name: str, schedules: ModuleType) -> None:
    _, table = schedules.TABLES[name]
    shown = "\n".join(table(schedules.kept(name)))
    page = PAGE.read_text(encoding="utf-8")
    section = page.partition(f":Command: `scripts/schedules.py {name}`")[2].partition("\n## ")[0]
    assert f"`scripts/results/sim/schedules_{name}.jsonl`" in section
    assert shown in section


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bound", "interleaved"])
def test_kept_steps_are_those_that_are_found_today(
    name: str, schedules: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the smallest steps on two networks. After an intended change, make the tables again."""
    kept = schedules.kept(name)
    fewest = min(row["micro_batches"] for row in kept)
    quick = [row for row in schedules.networks() if row[0] in ("10ms-1gbps", "worldwide")]
    monkeypatch.setattr(schedules, "networks", lambda: quick)
    monkeypatch.setattr(schedules, "MESSAGES_MIB", (8,))
    monkeypatch.setattr(schedules, "MICROBATCHES", (fewest,))
    monkeypatch.setattr(schedules, "FEW_AND_MANY", (fewest,))
    make, _ = schedules.TABLES[name]
    today = list(make())
    assert len(today) >= 2
    assert all(row in kept for row in today)


def test_auto_is_within_5_percent_of_the_bound_but_for_what_the_docs_explain(
    schedules: ModuleType,
) -> None:
    rows = schedules.kept("bound")
    assert len(rows) == 15 * 2 * 2 * 5
    far = [row for row in rows if schedules.above(row) > 5]
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{len(rows) - len(far)} of {len(rows)} steps are within 5 %" in page
    for row in far:
        assert f"{row['network']}, {row['message_mib']} MiB, M = {row['micro_batches']}:" in page


def test_auto_is_slower_than_nothing_that_was_published(schedules: ModuleType) -> None:
    for row in schedules.kept("bound"):
        assert row["auto_s"] <= row["published_s"] + 1e-4
    for row in schedules.kept("memory"):
        assert row["auto_s"] <= row["one_f_one_b_s"] + 1e-4


def test_auto_with_two_stages_a_rank_is_near_its_bound_and_behind_nothing_published(
    schedules: ModuleType,
) -> None:
    rows = schedules.kept("interleaved")
    assert len(rows) == 15 * 2 * 2
    for row in rows:
        assert row["auto_s"] <= row["published_s"] + 1e-4
        assert row["auto_s"] >= row["bound_s"] - 1e-4
    far = [row for row in rows if schedules.above(row) > 5]
    page = " ".join(PAGE.read_text(encoding="utf-8").split())
    assert f"{len(rows) - len(far)} of {len(rows)} steps of two stages a rank" in page
    for row in far:
        named = f"{row['network']}, {row['message_mib']} MiB, M = {row['micro_batches']}"
        assert f"{named} ({schedules.above(row):.1f} %)" in page


def test_auto_reaches_the_optimum_of_every_small_pipeline(schedules: ModuleType) -> None:
    rows = schedules.kept("optimum")
    assert len(rows) == 66
    assert all(row["auto_s"] <= 1.001 * row["optimum_s"] for row in rows)
    assert re.search(r"all 66", PAGE.read_text(encoding="utf-8"))


def test_few_micro_batches_take_less_than_before(schedules: ModuleType) -> None:
    rows = schedules.kept("few")
    assert len(rows) == 16
    assert all(row["auto_s"] < row["before_s"] for row in rows)


def test_search_of_every_profile_is_timed_with_and_without_a_vote(schedules: ModuleType) -> None:
    rows = schedules.kept("time")
    assert {(row["stages"], row["micro_batches"]) for row in rows} == {(12, 64)}
    cells = {(row["network"], row["message_mib"], row["votes"]) for row in rows}
    assert len(cells) == len(rows) == 15 * 2 * 2
    assert max(row["cpu_s"] for row in rows) <= 3
