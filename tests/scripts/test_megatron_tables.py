import csv
import json
import statistics

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
    """Eighty rows, three percent on average, ten at most; no row is fitted."""
    errors = [abs(row["predicted_mib"] / row["published_mib"] - 1) for row in rows]
    assert len(errors) == 80
    assert sum(errors) / 80 <= 0.03
    assert max(errors) <= 0.10


def test_time_is_relative_to_the_baseline_and_fitted_rows_are_marked(rows):
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
    assert (
        "Memory, 80 rows: mean error" in run(table, "megatron_memory_time", "--mode", "sim").output
    )


@pytest.mark.slow
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
def test_unknown_mode_is_refused(table, name, mode, instead):
    result = run(table, name, "--mode", mode)
    assert result.exit_code == 2
    assert result.output == f"table: {name} has no mode '{mode}'; {instead}\n"


def simulated(table, name: str) -> list:
    source = table.ROOT / f"scripts/published/{name}.csv"
    return table.SIMULATED[name].simulated(source)


def test_times_follow_from_a_batch_of_sixteen(rows):
    errors = [abs(row["predicted_ms"] / row["published_ms"] - 1) for row in rows]
    assert sum(errors) / len(errors) <= 0.078


def test_parts_of_an_iteration_are_near_their_timers(table):
    """Except a forward pass that took longer on 64 GPUs than on 128, and the check in which ranks
    wait for others: it took 41, 8 and 114 ms on 32, 64 and 128 GPUs.
    """
    rows = [row for row in simulated(table, "megatron_bert345m_timers") if not row.contradicts]
    far = [row for row in rows if abs(row.error_percent) > 10]
    assert [(row.gpus, row.part) for row in far] == [
        (64, "forward"),
        (128, "check for infinities"),
    ]
    unseen = [abs(row.error_percent) for row in rows if not row.fitted and row not in far]
    assert len(unseen) == 16
    assert sum(unseen) / len(unseen) <= 5


def test_iterations_of_more_machines_follow_from_those_of_up_to_four(table):
    rows = simulated(table, "megatron_bert345m_scaling")
    errors = {row.gpus: abs(row.error_percent) for row in rows if not row.contradicts}
    assert set(errors) == {1, 8, 32, 64, 128}
    assert max(errors.values()) <= 10


def test_parts_that_no_smooth_model_can_explain_are_all_of_one_run_and_a_check(table):
    rows = simulated(table, "megatron_bert345m_timers")
    marked = [(row.gpus, row.part) for row in rows if row.contradicts]
    assert marked == [
        *((row.gpus, row.part) for row in rows if row.gpus == 16),
        (64, "check for infinities"),
    ]


def test_run_contradicts_those_on_half_and_on_twice_as_many_gpus(table):
    from tables.bert345m import contradicting

    assert contradicting({8: 100, 16: 121, 32: 90}) == {16}
    assert contradicting({8: 100, 16: 121, 32: 101}) == set()
    assert contradicting({8: 100, 16: 80, 32: 97}) == {16}
    # Beside a run that is not believed, none is.
    assert contradicting({8: 100, 16: 900, 32: 80, 64: 120}) == {16}
    assert contradicting({1: 100, 8: 10, 16: 100}) == set()


def test_classifier_of_gpt3xl_is_near_its_published_rows(table):
    """Five numbers are fitted to five rows."""
    rows = simulated(table, "gpt3xl_megatron")
    fitted = [row for row in rows if row.fitted]
    assert len(fitted) == 5
    assert all(row.error_percent == 0 for row in fitted)
    assert sum(row.contradicts for row in rows) == 9
    unseen = [row for row in rows if row.published_s and not (row.fitted or row.contradicts)]
    assert statistics.median(abs(row.error_percent) for row in unseen) <= 8.2
    one_machine = [abs(row.error_percent) for row in unseen if row.gpus == 8]
    assert sum(one_machine) / len(one_machine) <= 3.5


def test_fit_into_16_gb_is_right_for_all_but_two_rows(table):
    rows = simulated(table, "gpt3xl_megatron")
    assert sum(row.fits == (row.published_s is not None) for row in rows) >= 54


def test_contradicting_rows_are_found_by_a_rule(table):
    from tables.gpt3xl import contradicting, megatron_cases

    cases = list(megatron_cases(table.ROOT / "scripts/published/gpt3xl_megatron.csv"))
    marked = [cases[index].published_s for index in sorted(contradicting(cases))]
    assert marked == [26.72, 41.06, 12.45, 20.68, 7.33, 18.75, 6.78, 10.18, 4.51]


def test_ranks_are_numbered_tensor_then_data_then_pipeline_parallel():
    """Stages of 12 ranks on machines of 8: every hop leaves; of machine 1, two replicas of stage 0
    and two of stage 1 have rings of two ranks each.
    """
    from tables.iteration import Crossings, Job, crossings
    from tables.megatron import Shape

    shape = Shape(24, 2048, 16, 2048, 28_996, 1)
    six = {cut: Job(shape, *cut, 6, 252, "baseline") for cut in ((8, 1), (1, 8), (4, 2), (2, 4))}
    found = {cut: crossings(job, 8) for cut, job in six.items()}
    assert found == {
        (8, 1): Crossings(hops=0, rings=8),
        (1, 8): Crossings(hops=6, rings=2),
        (4, 2): Crossings(hops=8, rings=4),
        (2, 4): Crossings(hops=8, rings=4),
    }
    assert crossings(Job(shape, 2, 4, 1, 64, "baseline"), 8) == Crossings(0, 0)


def test_values_of_fp32_are_counted_with_four_bytes():
    from dataclasses import replace

    from tables.megatron import Device, Shape, kept_bytes, layer_us

    half = Shape(24, 2048, 16, 2048, 28_996, 1)
    device = Device(1e9, 900, 150, 1.0, 0.8)  # memory is all that takes time
    times = [sum(layer_us(replace(half, value_bytes=v), 1, "baseline", device)) for v in (2, 4)]
    assert 1.9 < times[1] / times[0] <= 2
    kept = [kept_bytes(replace(half, value_bytes=v), 1, "full-recompute") for v in (2, 4)]
    assert kept == [2**23, 2**24]


def test_blank_table_is_filled_with_predictions_alone(table):
    text = run(table, "gpt3xl_torch_pipe_fsdp", "--mode", "sim").output
    assert "left blank in the source" in text
    assert "a prediction alone" in text


def test_scaling_plot_is_drawn(table, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "pipe.png"
    assert run(table, "gpt3xl_torch_pipe", "--mode", "sim", "--png", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")
