import csv
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.greedy import greedy

from dpipe.network.link import Link
from dpipe.schedule.generate import generate
from dpipe.timeline.simulate import simulate

NAME = "gpt3xl_gpipe_network"
KEPT = Path(__file__).resolve().parents[2] / f"scripts/results/sim/{NAME}.csv"
NETWORKS = [(0.1, 10), (1, 5), (5, 2), (10, 1), (50, 1)]
FIELDS = [
    "delay_ms", "bandwidth_gbps", "data_parallel", "engine", "schedule", "wire",
    "published_s", "predicted_s", "measured_s", "predicted_that_day_s",
]  # fmt: skip
LINE = {
    "delay_ms": 10.0, "bandwidth_gbps": 1.0, "data_parallel": 1, "engine": "dpipe",
    "schedule": "gpipe", "wire": "bf16", "published_s": None, "predicted_s": 1.0,
    "measured_s": 16.0, "mode": "replay", "commit": "abc", "digest": "def",
    "network": {
        "name": "10ms-1gbps", "delay_ms": 10.0, "bandwidth_gbps": 1.0, "window_bytes": 9.7e6,
    },
    "venue": "lab", "scale": 32, "connections": 1,
}  # fmt: skip
LOSSY = {"name": "home", "delay_ms": 25.0, "bandwidth_gbps": 0.02, "loss_percent": 0.1}


@pytest.fixture
def table(script, monkeypatch):
    module = script("table")
    monkeypatch.setattr(module, "ProcessPoolExecutor", InThisProcess)
    return module


@pytest.fixture
def quick(table, monkeypatch):
    """The table with a fake simulator that always predicts 20 s."""
    monkeypatch.setattr(table, "with_prediction", lambda row, *_: replace(row, predicted_s=20.0))
    return table


@pytest.fixture
def results(tmp_path) -> Path:
    path = tmp_path / "results.jsonl"
    path.write_text(
        json.dumps(LINE) + "\n" + json.dumps(LINE | {"mode": "real", "measured_s": 17.0}) + "\n"
    )
    return path


def run(table, *words: str | Path) -> Result:
    return CliRunner().invoke(table.main, [NAME, *map(str, words)])


def test_prediction_is_within_three_percent_of_what_was_published(table):
    """The first row is fitted; the other eight follow from the profiles and from what TCP does. The
    predictions are those that are kept, which test_published.py makes again.
    """
    with KEPT.open() as file:
        kept = [row for row in csv.DictReader(file) if row["engine"] == "published"]
    rows = table.published(NAME)
    assert [(row.delay_ms, row.bandwidth_gbps) for row in rows] == [*NETWORKS, *NETWORKS[:4]]
    assert [row.data_parallel for row in rows] == [1] * 5 + [4] * 4
    for row, prediction in zip(rows, kept, strict=True):
        assert row.delay_ms == float(prediction["delay_ms"])
        assert row.bandwidth_gbps == float(prediction["bandwidth_gbps"])
        assert row.data_parallel == int(prediction["data_parallel"])
    errors = [
        abs(float(prediction["predicted_s"]) / row.published_s - 1)
        for row, prediction in zip(rows, kept, strict=True)
    ]
    assert max(errors) < 0.03
    assert sum(errors) / len(errors) < 0.01


def test_published_row_without_the_start_of_tcp_would_be_a_fifth_too_fast(table, monkeypatch):
    """So the slow start of idle connections explains the last row."""
    last = table.published(NAME)[4]
    monkeypatch.setattr(table.tcp, "start_up_ms", lambda link, num_bytes, frames: 0.0)
    assert table.with_prediction(last).predicted_s < 0.82 * last.published_s


def test_quiet_connection_takes_round_trips_until_its_link_is_full(table):
    """Windows of 1, 2 and 4 units of 1,431,840 bytes; the link carries 5 of them a round trip."""
    unit = 16 * 10 * 8949
    link = Link(delay_ms=50, bandwidth_gbps=5 * unit * 8 / 1e8)
    assert table.tcp.start_up_ms(link, 100 * unit) == pytest.approx(300 - 100 * 7 / 5)
    assert table.tcp.start_up_ms(link, 2 * unit) == pytest.approx(150 - 100 * 2 / 5)


def test_link_that_a_first_window_fills_has_no_start_up(table):
    assert table.tcp.start_up_ms(Link(delay_ms=0.1, bandwidth_gbps=10), 2**24) == 0


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("network", "fp32_s", "bf16_s"),
    [((0.1, 10), 14.8, 14.3), ((1, 5), 15.7, 14.8), ((5, 2), 18.6, 16.3), ((10, 1), 30.0, 18.7)],
)
def test_four_replicas_take_no_longer_than_asked(table, network, fp32_s, bf16_s):
    """ "auto" considers this schedule, so it is not slower."""
    assert replicated_s(table, network, "fp32") <= fp32_s
    assert replicated_s(table, network, "bf16") <= bf16_s


def test_four_replicas_in_int8_cost_at_most_12_percent_at_1_gbit(table):
    assert replicated_s(table, (10, 1), "int8") <= 1.12 * replicated_s(
        table, (10, 1), "int8", replicas=1
    )


def replicated_s(table, network: tuple[float, float], wire: str, replicas: int = 4) -> float:
    row = table.Row(*network, replicas, "dpipe", "auto", wire)
    cost, known = table.cost_of(wire), table.load_network(table.profile_of(row)).over(2)
    schedule = greedy(12, 64, cost, known, in_flight=40)
    return simulate(schedule, cost, known, replicas=table.replicas_of(row)).duration_us / 1e6


def test_local_sgd_pays_for_its_exchange_once_in_a_hundred_steps(table, monkeypatch):
    monkeypatch.setattr(table, "search", lambda *sizes, **_: greedy(*sizes, in_flight=40))
    alone, local = (
        table.with_prediction(table.Row(10, 1, *row, "auto", "fp32")).predicted_s
        for row in ((1, "dpipe"), (4, "dpipe local-sgd"))
    )
    assert alone < local <= 1.01 * alone


@pytest.mark.slow
def test_auto_in_bf16_at_the_worst_network_beats_the_published_best(table):
    row = table.with_prediction(table.Row(50, 1, 1, "dpipe", "auto", "bf16"))
    assert row.predicted_s <= 14.9


def test_json_has_the_rows_of_one_mode(quick, results):
    rows = json.loads(run(quick, "--mode", "replay", "--results", results, "--json").output)
    assert [list(row) for row in rows] == [FIELDS] * 6
    assert [row["measured_s"] for row in rows if row["engine"] == "dpipe"] == [16.0]
    source = [row["published_s"] for row in rows if row["engine"] == "published"]
    assert source == [15.16, 15.49, 16.80, 22.90, 29.08]


def test_measured_replicas_stand_beside_published_ones(table, tmp_path, monkeypatch):
    (tmp_path / "r.jsonl").write_text(json.dumps(LINE | {"data_parallel": 4}))
    monkeypatch.setattr(table, "with_prediction", lambda row, *_: row)
    assert [row.data_parallel for row in table.measured(NAME, "replay", tmp_path / "r.jsonl")] == [
        4
    ] * 5


def test_csv_has_the_same_rows(quick, results):
    lines = run(quick, "--mode", "real", "--results", results, "--csv").output.splitlines()
    rows = list(csv.DictReader(lines))
    assert list(rows[0]) == FIELDS
    assert (rows[-1]["engine"], rows[-1]["published_s"], rows[-1]["measured_s"]) == (
        "dpipe",
        "",
        "17",
    )


def test_csv_keeps_a_comma_inside_its_cell(quick, tmp_path):
    """A pipeline of another size is "auto, 2 stages" in the results: its cells stood one column too
    far right.
    """
    (tmp_path / "r.jsonl").write_text(json.dumps(LINE | {"schedule": "auto, 2 stages"}))
    *_, row = csv.DictReader(
        run(
            quick, "--mode", "replay", "--results", tmp_path / "r.jsonl", "--csv"
        ).output.splitlines()
    )
    assert (row["schedule"], row["wire"], row["measured_s"]) == ("auto, 2 stages", "bf16", "16")


def test_damaged_line_of_the_results_is_named(quick, results):
    results.write_text(results.read_text()[:-30])
    result = run(quick, "--mode", "replay", "--results", results)
    assert result.exit_code == 2
    assert f"table: {results}, line 2 is not a row of JSON" in result.output


@pytest.mark.parametrize("path", ["nowhere/table.png", "table.drawing"])
def test_png_that_cannot_be_written_is_refused_before_anything_is_simulated(
    table, results, tmp_path, path
):
    result = run(table, "--mode", "replay", "--results", results, "--png", tmp_path / path)
    assert result.exit_code == 2
    assert "must end in .png and be in a folder that exists" in result.output


def test_markdown_shows_the_error(quick, results):
    text = run(quick, "--mode", "replay", "--results", results).output
    assert "| 10 | 1 | 1 | dpipe | gpipe | bf16 |  | 20 | 16 | 1 | -20.0 % | +1500.0 % |" in text


def test_measured_line_gets_the_prediction_that_its_own_run_would_have_today(
    script, table, tmp_path
):
    """In a lab at 1/32: packets' headers count, and the window is the kernel's, not a thirty-second
    of it.
    """
    sweep = script("sweep")
    given = {
        "name": NAME,
        "config": "scripts/sweeps/gpt3xl_replay.toml",
        "venue": "lab",
        "scale": 32,
    }
    networks, runs = ["netem/profiles/50ms-1gbps.toml"], [{"schedules": ["gpipe"]}]
    runs.append({"schedules": ["gpipe"], "overrides": ["pipeline.stages=8"]})
    for cell in sweep.cells(sweep.Sweep(**given, networks=networks, run=runs), tmp_path):
        line = sweep.as_line(cell, {"measured_s": 30.0}, "abc")
        assert line["clip_norm"] == 1
        row = table.row_of(line)
        assert row.predicted_that_day_s == line["predicted_s"]
        assert row.predicted_s == pytest.approx(line["predicted_s"], abs=2e-3)


def test_measured_line_waits_for_a_vote_where_its_run_did(table):
    """The oldest lines have no clip_norm: nothing was clipped."""
    network = table.measured_network(LINE)
    assert table.measured_ballots(LINE, network) is None
    assert table.measured_ballots(LINE | {"clip_norm": 0}, network) is None
    assert table.measured_ballots(LINE | {"clip_norm": 1}, network) == network
    shaped = LINE | {"clip_norm": 1, "venue": "shaped"}
    assert table.measured_ballots(shaped, network).default.delay_ms == 0.1


def test_page_has_what_was_predicted_beside_what_was_measured(table, tmp_path, monkeypatch):
    def today(row, *_):
        return replace(row, predicted_s=21.0 if row.wire == "bf16" else row.predicted_s)

    monkeypatch.setattr(table, "with_prediction", today)
    lines = [
        LINE | {"schedule": "auto", "wire": "fp32", "predicted_s": 15.5},
        LINE | {"schedule": "auto", "predicted_s": 20.0, "measured_s": 20.5},
        LINE | {"schedule": "1f1b, 8 stages", "predicted_s": 30.0, "measured_s": 30.25},
    ]
    results, page = tmp_path / "r.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.write_text(f"<!-- {table.NETWORKS} replay -->\nNot measured yet.\n<!-- end -->\n")
    words = [table.NETWORKS, "--mode", "replay", "--results", str(results), "--page", str(page)]
    result = CliRunner().invoke(table.main, words)
    assert result.exit_code == 0, result.output
    assert page.read_text().splitlines()[1:-1] == [
        "| one-way delay, bandwidth | published, fp32 | dpipe, fp32: predicted | measured "
        "| dpipe, bf16: predicted | measured |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 10 ms, 1 Gbit/s | 22.90 | 15.50 | 16.00 | 20.00 (today 21.00) | 20.50 |",
        "| 10 ms, 1 Gbit/s, 1f1b, 8 stages |  |  |  | 30.00 | 30.25 |",
    ]


def test_narrow_page_has_bound_prediction_and_measurement_of_each_system(table, tmp_path):
    lines = [
        LINE | {"schedule": "auto", "wire": "int4", "bound_s": 14.25, "predicted_s": 14.5},
        LINE | {"network": LOSSY, "predicted_s": 20.0, "measured_s": 20.5},
        LINE | {"engine": "torch", "wire": "fp32", "predicted_s": 10.0},
    ]
    results, page = tmp_path / "r.jsonl", tmp_path / "page.md"
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    page.write_text(f"<!-- {table.BY_WIRE[0]} replay -->\nNot measured yet.\n<!-- end -->\n")
    words = [table.BY_WIRE[0], "--mode", "replay", "--results", str(results), "--page", str(page)]
    result = CliRunner().invoke(table.main, words)
    assert result.exit_code == 0, result.output
    assert page.read_text().splitlines()[1:-1] == [
        "| one-way delay, bandwidth | system | bound | predicted | measured "
        "| measured / predicted |",
        "| --- | --- | --- | --- | --- | --- |",
        "| 10 ms, 1000 Mbit/s | dpipe, auto, int4 | 14.25 | 14.50 | 16.00 | 1.103 |",
        "| 10 ms, 1000 Mbit/s | torch, gpipe, fp32 |  | 10.00 | 16.00 | 1.600 |",
        "| 25 ms, 20 Mbit/s, 0.1 % loss | dpipe, gpipe, bf16 |  | 20.00 | 20.50 | 1.025 |",
    ]


def test_narrow_links_are_compared_by_the_systems_that_all_of_them_have(table, tmp_path):
    """From several files, since lines of a home are measured at another size."""
    lines = [
        LINE | {"schedule": "auto", "wire": "int4", "predicted_s": 14.5},
        LINE | {"engine": "torch", "wire": "fp32", "predicted_s": 10.0},
    ]
    home = LINE | {"schedule": "auto", "wire": "int4", "network": LOSSY, "predicted_s": 20.0}
    near, far, page = tmp_path / "near.jsonl", tmp_path / "far.jsonl", tmp_path / "page.md"
    near.write_text("".join(json.dumps(line) + "\n" for line in lines))
    far.write_text(json.dumps(home) + "\n")
    page.write_text(f"<!-- {table.BY_WIRE[0]} replay -->\n<!-- end -->\n")
    words = [table.BY_WIRE[0], "--mode", "replay", "--compare", "--page", str(page)]
    words += ["--results", str(near), "--results", str(far)]
    result = CliRunner().invoke(table.main, words)
    shown = [
        "| one-way delay, bandwidth | dpipe, auto, int4 |",
        "| --- | --- |",
        "| 10 ms, 1000 Mbit/s | 16.00 (14.50) |",
        "| 25 ms, 20 Mbit/s, 0.1 % loss | 16.00 (20.00) |",
    ]
    assert result.output.splitlines() == shown
    assert page.read_text().splitlines()[1:-1] == shown


def test_readme_compares_narrow_links_as_they_were_measured(table, tmp_path):
    page = tmp_path / "readme.md"
    page.write_text((table.ROOT / "README.md").read_text())
    words = ["gpt3xl_narrow", "--mode", "replay", "--compare", "--page", str(page)]
    for name in ("gpt3xl_narrow", "gpt3xl_home"):
        words += ["--results", str(table.ROOT / f"scripts/results/{name}.jsonl")]
    assert CliRunner().invoke(table.main, words).exit_code == 0
    assert page.read_text() == (table.ROOT / "README.md").read_text()


def test_table_of_one_file_refuses_a_second(quick, results):
    result = run(quick, "--mode", "replay", "--results", results, "--results", results)
    assert result.exit_code == 2
    assert "give --results once, not 2 times" in result.output


def test_narrow_rows_as_comma_separated_values(table, results):
    words = [table.BY_WIRE[0], "--mode", "replay", "--results", str(results), "--csv"]
    (row,) = csv.DictReader(CliRunner().invoke(table.main, words).output.splitlines())
    assert row["system"] == "dpipe, gpipe, bf16"
    assert (row["bound_s"], row["predicted_s"], row["measured_s"]) == ("", "1", "16")


def test_network_of_a_row_says_what_becomes_of_its_packets(table):
    mobile = {"delay_ms": 40, "bandwidth_gbps": 0.05, "jitter_ms": 10}
    mobile |= {"loss_percent": 1, "reorder_percent": 0.5}
    (row,) = table.by_wire.rows_of([LINE | {"network": mobile, "predicted_s": 1.0}])
    assert row.network == "40 ± 10 ms, 50 Mbit/s, 1 % loss, 0.5 % out of order"


@pytest.mark.parametrize(
    "name",
    [
        "gpt3xl_narrow",
        "gpt3xl_home",
        "gpt3xl_stock",
        "gpt3xl_stock_cubic",
        "gpt3xl_stock_bbr",
        "finetuning_lossy",
        "finetuning_lossy_cubic",
        "finetuning_lossy_bbr",
        "finetuning_lossy_others",
    ],
)
def test_results_page_has_what_was_measured_with_tcp_as_it_comes(table, name, tmp_path):
    page = tmp_path / "results.md"
    page.write_text((table.ROOT / "docs/results.md").read_text())
    measured = (table.ROOT / f"scripts/results/{name}.jsonl").exists()
    words = [name, "--mode", "replay", "--page", str(page)]
    assert CliRunner().invoke(table.main, words).exit_code == (0 if measured else 2)
    assert page.read_text() == (table.ROOT / "docs/results.md").read_text()
    assert measured or f"<!-- {name} replay -->\nNot measured yet.\n" in page.read_text()


def test_order_that_auto_had_found_is_predicted_again(script, table, tmp_path, monkeypatch):
    """Today's search finds another schedule, which was not measured."""
    sweep = script("sweep")
    given = {"name": NAME, "config": "scripts/sweeps/gpt3xl_replay.toml", "venue": "lab"}
    networks, runs = ["netem/profiles/0.1ms-10gbps.toml"], [{"schedules": ["auto"]}]
    runs[0]["overrides"] = ["pipeline.stages=2"]
    (cell,) = sweep.cells(sweep.Sweep(**given, networks=networks, run=runs), tmp_path)
    line = sweep.as_line(cell, {"measured_s": 30.0}, "abc")
    assert {len(letters) for letters in line["order"]} == {3 * 64}
    monkeypatch.setattr(table, "search", None)
    assert table.row_of(line).predicted_s == pytest.approx(line["predicted_s"], abs=2e-3)


def test_order_says_one_stage_a_rank_with_micro_batches_in_order(table):
    found = greedy(3, 4, table.cost_of("fp32", 3), table.Network())
    assert table.schedule_in(table.order_of(found)).programs == found.programs
    assert table.order_of(generate("interleaved", 4, 2, stages_per_rank=2)) is None


def test_networks_are_measured_and_not_simulated(table):
    result = CliRunner().invoke(table.main, [table.NETWORKS, "--mode", "sim"])
    assert result.exit_code == 2
    assert "gpt3xl_networks has no mode 'sim'; use --mode replay" in result.output


def test_measured_line_of_a_shaped_venue_has_its_whole_rate_and_its_window(table):
    network = table.measured_network(LINE | {"venue": "shaped"})
    assert (network.default.bandwidth_gbps, network.default.window_bytes) == (1.0, 9.7e6)


def test_line_of_another_pipeline_keeps_the_prediction_of_its_day(table):
    row = table.row_of(LINE | {"schedule": "auto, 2 stages", "predicted_s": 3.7})
    assert (row.predicted_that_day_s, row.predicted_s) == (3.7, 3.7)


def test_simulated_rows_are_the_published_ones_and_every_schedule_and_wire(table, monkeypatch):
    monkeypatch.setattr(table, "with_prediction", lambda row, *_: row)
    rows = table.simulated(NAME)
    assert [row.data_parallel for row in rows] == [1] * 5 + [4] * 4 + [1] * 5 * 3 * 3 + [
        4
    ] * 4 * 2 * 3
    wires = ("fp32", "bf16", "int8")
    assert {row.label for row in rows[9:]} == {
        *(
            f"dpipe {schedule} {wire}"
            for schedule in ("1f1b", "zero-bubble", "auto")
            for wire in wires
        ),
        *(f"{engine} auto {wire} x 4" for engine in ("dpipe", "dpipe local-sgd") for wire in wires),
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
    assert (
        "holds no row of mode 'real'; run scripts/sweep.py scripts/sweeps/gpt3xl_gpipe_network.toml"
        in result.output
    )


def test_png_is_drawn(quick, results, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "table.png"
    assert run(quick, "--mode", "replay", "--results", results, "--png", path).exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(quick, results, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run(quick, "--mode", "replay", "--results", results, "--png", tmp_path / "table.png")
    assert result.exit_code == 2
    assert "pip install 'dpipe[plot]'" in result.output


def test_comparison_has_a_line_a_network_and_a_column_a_system(quick, results):
    lines = run(quick, "--mode", "replay", "--results", results, "--compare").output.splitlines()
    assert lines[0] == "| network | published gpipe fp32 | dpipe gpipe bf16 |"
    assert lines[2] == "| 0.1 ms, 10 Gbit/s | 15.16 (-24.2 %) |  |"
    assert lines[5] == ("| 10 ms, 1 Gbit/s | 22.90 (+14.5 %) | 16.00 (+1500.0 %, today -20.0 %) |")


def test_page_gets_the_comparison_between_its_marks(quick, results, tmp_path):
    path = tmp_path / "results.md"
    path.write_text(f"before\n<!-- {NAME} replay -->\nold\n<!-- end -->\nafter\n")
    assert run(quick, "--mode", "replay", "--results", results, "--page", path).exit_code == 0
    lines = path.read_text().splitlines()
    assert lines[:3] == [
        "before",
        f"<!-- {NAME} replay -->",
        "| network | published gpipe fp32 | dpipe gpipe bf16 |",
    ]
    assert lines[-2:] == ["<!-- end -->", "after"]


def test_simulated_rows_have_their_errors_and_assumptions_below(
    quick, table, monkeypatch, tmp_path
):
    monkeypatch.setattr(
        table, "simulated", lambda name: [*map(quick.with_prediction, table.published(name))]
    )
    path = tmp_path / "results.md"
    path.write_text(f"<!-- {NAME} sim -->\n<!-- end -->\n")
    output = run(quick, "--mode", "sim", "--page", path).output
    said = "the first is fitted; 8 predicted: mean error"
    assert said in output
    assert said in path.read_text()
    assert "| piece that a reduce passes on | 4194304 | bytes | nominal: NCCL's buffer |" in output


def test_page_without_marks_is_left_as_it_is(quick, results, tmp_path):
    path = tmp_path / "results.md"
    path.write_text(f"<!-- {NAME} replay -->")
    result = run(quick, "--mode", "replay", "--results", results, "--page", path)
    assert result.exit_code == 2
    assert f"has no lines <!-- {NAME} replay --> and <!-- end -->" in result.output
    assert path.read_text() == f"<!-- {NAME} replay -->"
