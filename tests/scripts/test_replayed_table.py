"""Of lines made up here, whose seconds nobody measured."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

LINE = {
    "mode": "replay", "engine": "dpipe", "schedule": "1f1b", "delay_ms": 5.0, "bandwidth_gbps": 2.0,
    "tensor_parallel": 1, "pipeline_parallel": 8, "predicted_s": 6.4, "measured_s": 6.5,
}  # fmt: skip
SPLIT = LINE | {"tensor_parallel": 2, "pipeline_parallel": 4, "schedule": "1f1b, 4 stages"}
SLOW = SPLIT | {"predicted_s": 25.0, "measured_s": 26.0}
ELSEWHERE = SPLIT | {"delay_ms": 1.0}


@pytest.fixture
def table(script):
    return script("table")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    lines = (
        LINE,
        SLOW,
        ELSEWHERE,
        LINE | {"measured_s": 8.0},
        {"mode": "replay", "measured_s": 1.0},
        {"mode": "real"},
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def run(table, *words: str | Path) -> Result:
    return CliRunner().invoke(table.main, ["gpt3xl_megatron", "--mode", "replay", *map(str, words)])


def test_layouts_are_compared_with_the_fastest_pipeline_of_their_network(table, results):
    rows = json.loads(run(table, "--results", results, "--json").output)
    compared = [
        [row[key] for key in ("delay_ms", "tensor_parallel", "schedule", "over_pipeline")]
        for row in rows
    ]
    assert compared == [
        [5.0, 1, "1f1b", 1.0],
        [5.0, 2, "1f1b", 4.0],
        [1.0, 2, "1f1b", None],
        [5.0, 1, "1f1b", 1.23],
    ]
    assert [row["error_percent"] for row in rows[:2]] == [1.6, 4.0]


def test_replay_that_was_not_measured_names_its_sweep(table, tmp_path):
    result = run(table, "--results", tmp_path / "none.jsonl")
    assert result.exit_code == 2
    assert (
        "no row of mode 'replay'; run scripts/sweep.py scripts/sweeps/gpt3xl_megatron_replay.toml"
        in result.output
    )


def test_replay_is_drawn(table, results, tmp_path):
    pytest.importorskip("matplotlib")
    assert run(table, "--results", results, "--png", tmp_path / "table.png").exit_code == 0
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


def test_sweep_cuts_eight_hosts_by_tensor_and_by_pipeline(script, table, tmp_path):
    """At scale 32: an activation of 16 MiB, all-reduced twice in each of a stage's layers."""
    sweep = script("sweep")
    file = table.ROOT / "scripts/sweeps/gpt3xl_megatron_replay.toml"
    cells = list(sweep.cells(sweep.read_table(sweep.Sweep, file), tmp_path))
    found = {
        (
            c.config.tensor_parallel.size,
            c.config.pipeline.stages,
            c.config.replay.exchanges,
            c.config.num_machines,
        )
        for c in cells
    }
    assert found == {(1, 8, 0, 8), (2, 4, 12, 8), (4, 2, 24, 8), (8, 1, 48, 8)}
    assert {c.config.replay.exchange_bytes for c in cells} == {16_777_216 // 32}
    assert len({c.key for c in cells}) == len(cells) == 5 * 4


def test_comparison_by_network_is_refused_of_layouts(table, results):
    """It printed the layouts."""
    result = run(table, "--results", results, "--compare")
    assert result.exit_code == 2
    assert "--compare is of gpt3xl_gpipe_network alone" in result.output


def test_page_without_marks_of_layouts_is_left_as_it_is(table, results, tmp_path):
    page = tmp_path / "results.md"
    page.write_text("nothing is marked here")
    result = run(table, "--results", results, "--page", page)
    assert result.exit_code == 2
    assert "has no lines <!-- gpt3xl_megatron replay --> and <!-- end -->" in result.output
    assert page.read_text() == "nothing is marked here"
