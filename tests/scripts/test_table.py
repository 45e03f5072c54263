import csv
import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

NAME = "gpt3xl_gpipe_network"
NETWORKS = [(0.1, 10), (1, 5), (5, 2), (10, 1), (50, 1)]
FIELDS = [
    "delay_ms", "bandwidth_gbps", "data_parallel", "engine", "schedule", "wire",
    "published_s", "predicted_s", "measured_s",
]  # fmt: skip
LINE = {
    "delay_ms": 50.0, "bandwidth_gbps": 1.0, "data_parallel": 1, "engine": "dpipe", "schedule": "auto", "wire": "bf16",
    "published_s": None, "predicted_s": 14.7, "measured_s": 15.0, "mode": "replay", "commit": "abc", "digest": "def",
}  # fmt: skip


@pytest.fixture
def table(script):
    return script("table")


@pytest.fixture
def results(tmp_path) -> Path:
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(LINE) + "\n" + json.dumps(LINE | {"mode": "real", "measured_s": 16.0}) + "\n")
    return path


def run(table, *words: str | Path) -> Result:
    return CliRunner().invoke(table.main, [NAME, *map(str, words)])


def test_prediction_is_within_three_percent_of_what_was_published(table):
    """The first row is fitted; the other four follow from the profiles, the last one from TCP's window."""
    rows = [table.with_prediction(row) for row in table.published(NAME)]
    assert [(row.delay_ms, row.bandwidth_gbps) for row in rows] == NETWORKS
    assert [row.predicted_s for row in rows] == [pytest.approx(row.published_s, rel=0.03) for row in rows]


def test_published_row_without_the_window_would_be_a_fifth_too_fast(table, monkeypatch):
    """So it is the window that explains the last row."""
    last = table.published(NAME)[-1]
    monkeypatch.setattr(table, "load_network", lambda path: table_network_without_window(path))
    assert table.with_prediction(last).predicted_s < 0.82 * last.published_s


def table_network_without_window(path: Path):
    from dataclasses import replace

    from dpipe.topology import load_network

    network = load_network(path)
    return replace(network, default=replace(network.default, window_bytes=None))


def test_auto_in_bf16_at_the_worst_network_beats_the_published_best(table):
    row = table.with_prediction(table.Row(50, 1, 1, "dpipe", "auto", "bf16"))
    assert row.predicted_s <= 14.9


def test_json_has_the_rows_of_one_mode(table, results):
    rows = json.loads(run(table, "--mode", "replay", "--results", results, "--json").output)
    assert [list(row) for row in rows] == [FIELDS] * 6
    assert [row["measured_s"] for row in rows if row["engine"] == "dpipe"] == [15.0]
    assert [row["published_s"] for row in rows if row["engine"] == "published"] == [15.16, 15.49, 16.80, 22.90, 29.08]


def test_csv_has_the_same_rows(table, results):
    lines = run(table, "--mode", "real", "--results", results, "--csv").output.splitlines()
    rows = list(csv.DictReader(lines))
    assert list(rows[0]) == FIELDS
    assert (rows[-1]["engine"], rows[-1]["published_s"], rows[-1]["measured_s"]) == ("dpipe", "", "16")


def test_markdown_shows_the_error_and_says_what_is_left_out(table, results):
    text = run(table, "--mode", "replay", "--results", results).output
    assert "| 50 | 1 | 1 | dpipe | auto | bf16 |  | 14.7 | 15 | +2.0 % |" in text
    assert text.rstrip().endswith(
        "data_parallel 4 (a parameter server beside the pipeline) are published, but not simulated yet."
    )


def test_simulated_rows_are_the_published_ones_and_every_schedule_and_wire(table, monkeypatch):
    monkeypatch.setattr(table, "ProcessPoolExecutor", InThisProcess)
    monkeypatch.setattr(table, "with_prediction", lambda row: row)
    rows = table.simulated(NAME)
    assert [row.engine for row in rows] == ["published"] * 5 + ["dpipe"] * 5 * 3 * 3
    assert {row.label for row in rows[5:]} == {
        f"dpipe {schedule} {wire}" for schedule in ("1f1b", "zero-bubble", "auto") for wire in ("fp32", "bf16", "int8")
    }


class InThisProcess:
    map = staticmethod(map)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


def test_mode_that_nothing_was_measured_in_says_what_to_run(table, tmp_path):
    result = run(table, "--mode", "real", "--results", tmp_path / "none.jsonl")
    assert result.exit_code == 2
    assert "holds no row of mode 'real'; run scripts/sweep.py scripts/sweeps/gpt3xl_gpipe_network.toml" in result.output


def test_png_is_drawn(table, results, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "table.png"
    assert run(table, "--mode", "replay", "--results", results, "--png", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(table, results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(table, "--mode", "replay", "--results", results, "--png", tmp_path / "table.png")
    assert result.exit_code == 2
    assert "pip install 'dpipe[plot]'" in result.output


def test_comparison_has_a_line_a_network_and_a_column_a_system(table, results):
    lines = run(table, "--mode", "replay", "--results", results, "--compare").output.splitlines()
    assert lines[0] == "| network | published gpipe fp32 | dpipe auto bf16 |"
    assert lines[2] == "| 0.1 ms, 10 Gbit/s | 15.16 |  |"
    assert lines[-1] == "| 50 ms, 1 Gbit/s | 29.08 | 15.00 |"
