"""Of lines made up here, whose seconds nobody measured."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

LINE = {
    "mode": "real", "engine": "megatron", "schedule": "1f1b", "device": "made up", "gpus": 8,
    "tensor_parallel": 1, "pipeline_parallel": 8, "data_parallel": 1, "micro_batch": 1,
    "batch_size": 64, "precision": "fp32", "recompute": "full",
    "measured_s": 4.0, "memory_gb": 31.5, "mfu": 0.4, "loss_difference": 1e-6,
}  # fmt: skip
OURS = LINE | {"engine": "dpipe", "measured_s": 3.2, "loss_difference": None}
ELSEWHERE = LINE | {"pipeline_parallel": 2, "gpus": 2}
NAMES = (
    "gpt3xl_megatron",
    "gpt3xl_torch_pipe",
    "gpt3xl_torch_pipe_fsdp",
    "megatron_bert345m_scaling",
)


@pytest.fixture
def table(script):
    return script("table")


@pytest.fixture
def results(tmp_path: Path) -> Path:
    path = tmp_path / "results.jsonl"
    replayed = {"mode": "replay", "engine": "dpipe", "measured_s": 1.0}
    path.write_text("".join(json.dumps(line) + "\n" for line in (LINE, ELSEWHERE, OURS, replayed)))
    return path


def run(table, name: str, *words: str | Path) -> Result:
    return CliRunner().invoke(table.main, [name, "--mode", "real", *map(str, words)])


def test_engines_of_one_layout_are_together_beside_the_published_value(table, results):
    rows = json.loads(run(table, "gpt3xl_megatron", "--results", results, "--json").output)
    compared = [
        [
            row[key]
            for key in ("engine", "pipeline_parallel", "published_s", "measured_s", "over_ours")
        ]
        for row in rows
    ]
    assert compared == [
        ["megatron", 8, 19.71, 4.0, 1.25],
        ["dpipe", 8, 19.71, 3.2, 1.0],
        ["megatron", 2, None, 4.0, None],
    ]
    assert [row["ms_per_sample"] for row in rows] == [62.5, 50.0, 62.5]


def test_others_are_compared_with_our_best(table):
    from tables.measured import measured_rows

    rows = measured_rows([OURS, OURS | {"measured_s": 2.0}, OURS | {"measured_s": 8.0}, LINE], {})
    assert [row.over_ours for row in rows] == [1.6, 1.0, 4.0, 2.0]


def test_lines_of_other_devices_are_not_compared(table):
    from tables.measured import measured_rows

    (row, _) = measured_rows([LINE, OURS | {"device": "another"}], {})
    assert row.over_ours is None


@pytest.mark.parametrize(
    ("name", "layout", "seconds"),
    [
        ("gpt3xl_torch_pipe", (1, 8, 1, 2, 64, "fp32", "full"), 18.77),
        ("gpt3xl_torch_pipe_fsdp", (1, 8, 6, 2, 252, "fp32", "full"), None),
        ("megatron_bert345m_scaling", (2, 2, 8, 4, 128, "fp16", "full"), 2.95 * 128 / 1e3),
    ],
)
def test_published_rows_are_known_by_layout(table, name, layout, seconds):
    from tables import SIMULATED
    from tables.measured import Layout

    assert (
        SIMULATED[name].published(table.ROOT / f"scripts/published/{name}.csv")[Layout(*layout)]
        == seconds
    )


def test_markdown_says_where_it_was_measured(table, results):
    lines = run(table, "gpt3xl_megatron", "--results", results).output.splitlines()
    assert lines[2].startswith(
        "| megatron | 1f1b | made up | 8 | 1 | 8 | 1 | 1 | 64 | fp32 | full | 19.71 | 4 |"
    )
    assert (
        lines[-1]
        == "3 rows measured on made up; 2 of them beside what the source published on its own GPUs."
    )


@pytest.mark.parametrize("name", NAMES)
def test_table_without_measurements_names_the_sweep(table, name, tmp_path):
    result = run(table, name, "--results", tmp_path / "none.jsonl")
    assert result.exit_code == 2
    assert (
        f"none.jsonl holds no row of mode 'real'; run scripts/sweep.py scripts/sweeps/{name}.toml"
        in result.output
    )
    assert (table.ROOT / f"scripts/sweeps/{name}.toml").exists()


def test_measured_plot_is_drawn(table, results, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "table.png"
    assert run(table, "gpt3xl_megatron", "--results", results, "--png", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
