"""Measured runs are predicted again by today's simulator, and what it says is kept."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from dpipe.errors import ConfigError
from dpipe.plan.forecast import forecast

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "scripts/results/sim/today.jsonl"
SWEEPS = ("gpt3xl_replicas", "gpt3xl_megatron_replay", "gpt3xl_overlap")


@pytest.fixture
def today(script):
    return script("today")


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def sweep_file(name: str) -> Path:
    return ROOT / f"scripts/sweeps/{name}.toml"


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", SWEEPS)
def test_prediction_of_today_is_the_one_that_is_kept(today, name: str) -> None:
    """After an intended change: scripts/today.py, as docs/results.md names it."""
    rows = list(today.today(sweep_file(name)))
    assert rows
    assert rows == [row for row in lines_of(KEPT) if row["sweep"] == rows[0]["sweep"]]


@pytest.mark.parametrize("name", ["gpt3xl_replicas", "gpt3xl_megatron", "gpt3xl_overlap"])
def test_prediction_of_the_day_is_that_of_the_measured_line(name: str) -> None:
    kept = [row for row in lines_of(KEPT) if row["sweep"] == name]
    lines = lines_of(ROOT / f"scripts/results/{name}.jsonl")
    assert [(row["predicted_that_day_s"], row["measured_s"]) for row in kept] == [
        (line["predicted_s"], line["measured_s"]) for line in lines
    ]


def one_line(tmp_path: Path, **changed: object) -> Path:
    line = lines_of(ROOT / "scripts/results/gpt3xl_overlap.jsonl")[0]
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(line | changed) + "\n", encoding="utf-8")
    return results


def test_order_that_was_measured_is_what_is_predicted(today, tmp_path: Path) -> None:
    file = sweep_file("gpt3xl_overlap")
    (kept,) = today.today(file, one_line(tmp_path))
    forward_first = ["F" * 16 + "IW" * 16] * 12
    (other,) = today.today(file, one_line(tmp_path, order=forward_first))
    assert other["predicted_today_s"] > kept["predicted_today_s"]


def test_run_is_predicted_as_it_was_clipped(today, tmp_path: Path, monkeypatch) -> None:
    """A step that is clipped waits for a vote; the oldest lines do not say, and were not."""
    clipped = []

    def noting(config, **options):
        clipped.append(config.train.clip_norm)
        return forecast(config, **options)

    monkeypatch.setattr(today, "forecast", noting)
    list(today.today(sweep_file("gpt3xl_overlap"), one_line(tmp_path)))
    oldest = ROOT / "scripts/results/gpt3xl_megatron.jsonl"
    assert "clip_norm" not in lines_of(oldest)[0]
    list(today.today(sweep_file("gpt3xl_megatron_replay"), oldest))
    assert clipped == [1, *[0] * 20]


def test_run_that_the_sweep_no_longer_has_is_named(today, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no run 50ms-1gbps, dpipe, gpipe, fp32, 1"):
        list(today.today(sweep_file("gpt3xl_overlap"), one_line(tmp_path, schedule="gpipe")))


@pytest.mark.slow
def test_rows_are_printed_and_kept(today, tmp_path: Path) -> None:
    out = tmp_path / "today.jsonl"
    words = [str(sweep_file("gpt3xl_overlap")), "--out", str(out)]
    result = CliRunner().invoke(today.main, words)
    assert result.exit_code == 0
    assert result.output == out.read_text(encoding="utf-8")
    assert len(lines_of(out)) == 6
