import csv
import json

import pytest
from click.testing import CliRunner, Result


@pytest.fixture
def table(script):
    return script("table")


def run(table, name: str, *words: object) -> Result:
    return CliRunner().invoke(table.main, [name, *map(str, words)])


@pytest.fixture
def rows(table) -> list[dict[str, object]]:
    return json.loads(run(table, "megatron_memory_time", "--mode", "sim", "--json").output)


def test_memory_of_the_published_rows_is_within_the_bounds(rows):
    """Issue 6: eighty rows, three percent on average, ten at most; no row is fitted."""
    errors = [abs(row["predicted_mib"] / row["published_mib"] - 1) for row in rows]
    assert len(errors) == 80
    assert sum(errors) / 80 <= 0.03
    assert max(errors) <= 0.10


def test_time_is_told_over_the_baseline_and_fitted_rows_are_marked(rows):
    fitted = [row for row in rows if row["fitted"]]
    others = [
        abs(row["overhead_error"])
        for row in rows
        if not row["fitted"] and row["strategy"] != "baseline"
    ]
    assert [(row["model"], row["tensor_parallel"], row["pipeline_parallel"]) for row in fitted] == [
        ("bert-345m", 2, 2)
    ] * 4
    assert sum(others) / len(others) <= 6
    assert all(row["published_overhead"] == 0 for row in rows if row["strategy"] == "baseline")


def test_table_in_other_forms_has_the_same_rows(table):
    lines = run(table, "megatron_memory_time", "--mode", "sim", "--csv").output.splitlines()
    assert len(list(csv.DictReader(lines))) == 80
    assert "Memory: mean error" in run(table, "megatron_memory_time", "--mode", "sim").output


def test_plot_is_drawn(table, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "table.png"
    assert run(table, "megatron_memory_time", "--mode", "sim", "--png", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "mode", "instead"),
    [
        ("megatron_memory_time", "real", "use --mode sim"),
        ("gpt3xl_torch_pipe", "replay", "use --mode sim or real"),
    ],
)
def test_mode_that_is_not_there_is_refused(table, name, mode, instead):
    result = run(table, name, "--mode", mode)
    assert result.exit_code == 2
    assert result.output == f"table: {name} has no mode '{mode}'; {instead}\n"


@pytest.fixture
def scaling(table):
    from tables import scaling

    return scaling


def first(rows, number: int) -> list:
    return [row for row, _ in zip(rows, range(number), strict=False)]


def published(table, name: str):
    return table.ROOT / f"scripts/published/{name}.csv"


def test_bert_on_more_machines_follows_from_two_rows(table, scaling):
    """All but the run on 16 GPUs, which is six times slower than its neighbours in the source
    itself.
    """
    rows = list(
        map(scaling.row_of, scaling.bert_cases(published(table, "megatron_bert345m_scaling")))
    )
    errors = {row.gpus: row.error_percent for row in rows}
    assert [row.gpus for row in rows if row.fitted] == [1, 32]
    assert abs(errors[1]) < 1
    assert abs(errors[32]) < 1
    assert max(abs(errors[gpus]) for gpus in (8, 64, 128)) < 20
    assert errors[16] < -80


def test_fitted_rows_of_gpt3xl_are_met_and_marked(table, scaling):
    rows = first(
        map(scaling.row_of, scaling.megatron_cases(published(table, "gpt3xl_megatron"))), 2
    )
    assert [(row.fitted, abs(row.error_percent) < 1) for row in rows] == [(True, True)] * 2


def test_blank_table_is_filled_with_predictions_alone(table):
    text = run(table, "gpt3xl_torch_pipe_fsdp", "--mode", "sim").output
    assert "left blank in the source" in text
    assert "a prediction alone" in text


def test_scaling_plot_is_drawn(table, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "pipe.png"
    assert run(table, "gpt3xl_torch_pipe", "--mode", "sim", "--png", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
