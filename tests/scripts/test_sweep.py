import json
import re
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.network.link import Link, Network
from dpipe.network.profile import load_network
from dpipe.processes.launch import STOPPING

CONFIG = """
    [model]
    layers = "replay"
    [replay]
    forward_ms = 2
    backward_ms = 4
    message_bytes = 4000
    [train]
    steps = 3
    batch_size = 4
    num_microbatches = 4
    clip_norm = 0
    [pipeline]
    stages = 2
    [run]
    tensorboard = false
    trace_steps = 1
"""
ROOT = Path(__file__).parents[2]
NEAR, FAR = (
    "delay_ms = 1\nbandwidth_gbps = 1\n",
    "delay_ms = 20\nbandwidth_gbps = 1\nwindow_bytes = 4e6\n",
)


class Bench:
    """A sweep in a separate folder, with given measurements."""

    def __init__(self, sweep, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sweep, self.folder, self.results = sweep, folder, folder / "results.jsonl"
        self.measured: list[str] = []
        monkeypatch.setattr(sweep, "ROOT", folder)
        self.write("config.toml", CONFIG)
        self.write("near.toml", NEAR)
        self.write("far.toml", FAR)

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text)

    def run(
        self,
        scale: int = 1,
        engine: str = "dpipe",
        schedules: Sequence[str] = ("gpipe", "1f1b"),
        most: int | None = None,
        **keys: object,
    ) -> Result:
        table = {
            "name": "small",
            "config": "config.toml",
            "networks": ["near.toml", "far.toml"],
            "scale": scale,
        } | keys
        runs = {"engine": engine, "schedules": schedules}
        blocks = [*table.items(), "[[run]]", *runs.items()]
        self.write(
            "sweep.toml",
            "\n".join(b if isinstance(b, str) else f"{b[0]} = {json.dumps(b[1])}" for b in blocks),
        )
        most = [] if most is None else ["--most", str(most)]
        return CliRunner().invoke(
            self.sweep.main,
            [str(self.folder / "sweep.toml"), "--results", str(self.results), *most],
        )

    def lines(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.results.read_text().splitlines()]


@pytest.fixture
def bench(script, tmp_path, monkeypatch) -> Bench:
    bench = Bench(script("sweep"), tmp_path, monkeypatch)

    def measure(cell, at, timeout_s):
        bench.measured.append(str(cell))
        return {"measured_s": 1.5}

    monkeypatch.setattr(bench.sweep, "measure", measure)
    return bench


ALL = [
    "near dpipe gpipe fp32",
    "near dpipe 1f1b fp32",
    "far dpipe gpipe fp32",
    "far dpipe 1f1b fp32",
]


def test_cell_without_a_round_of_local_sgd_is_refused(bench):
    """It was measured, and then the mean was over no steps."""
    local = {"kind": "local-sgd", "replicas": 2, "inner_steps": 10}
    with pytest.raises(
        ConfigError, match="train.steps 10 hold no round of data_parallel.inner_steps 10"
    ):
        bench.sweep.check_rounds(build({"data_parallel": local, "train": {"steps": 10}}))


def test_sweep_measures_every_cell_once(bench):
    assert bench.run().exit_code == 0
    assert bench.measured == ALL
    assert bench.run().exit_code == 0
    assert bench.measured == ALL


def test_line_has_the_columns_and_where_they_are_from(bench):
    bench.run(networks=["far.toml"], schedules=["gpipe"])
    (line,) = bench.lines()
    assert (line["delay_ms"], line["bandwidth_gbps"], line["measured_s"], line["mode"]) == (
        20,
        1,
        1.5,
        "replay",
    )
    assert line["network"] == {
        "name": "far", "delay_ms": 20, "bandwidth_gbps": 1, "jitter_ms": 0,
        "loss_percent": 0, "window_bytes": 4e6,
    }  # fmt: skip
    assert 0.06 < line["predicted_s"] < 0.08
    assert len(line["digest"]) == 16


def test_line_has_what_no_order_is_below(bench):
    """A micro-batch is there and back in 40 ms, and takes 2, 2, 4 and 4 ms on its way."""
    bench.run(networks=["far.toml"])
    gpipe, one_f_one_b = bench.lines()
    assert gpipe["bound_s"] == one_f_one_b["bound_s"]
    assert 0.052 < gpipe["bound_s"] < min(gpipe["predicted_s"], one_f_one_b["predicted_s"])


def test_line_of_replicas_has_no_bound(script):
    agreeing = {"replicas": 2, "kind": "all-reduce"}
    config = build({"model": {"layers": "replay"}, "data_parallel": agreeing})
    sweep = script("sweep")
    assert sweep.bound_s(config, sweep.forecast(config)) is None


def test_interrupted_sweep_goes_on_where_it_stopped(bench, monkeypatch):
    measure = bench.sweep.measure

    def interrupted(cell, at, timeout_s):
        if len(bench.measured) == 2:
            raise KeyboardInterrupt
        return measure(cell, at, timeout_s)

    monkeypatch.setattr(bench.sweep, "measure", interrupted)
    assert bench.run().exit_code == 1
    monkeypatch.setattr(bench.sweep, "measure", measure)
    bench.run()
    assert bench.measured == ALL
    assert len({line["key"] for line in bench.lines()}) == 4


def test_line_that_was_cut_short_is_measured_anew(bench):
    bench.run()
    whole = bench.results.read_text()
    bench.results.write_text(whole[:-30])
    bench.run()
    assert bench.measured == [*ALL, ALL[-1]]
    assert bench.results.read_text() == whole


def test_cell_is_measured_again_on_a_network_that_has_changed(bench):
    bench.run()
    bench.write("near.toml", NEAR.replace("delay_ms = 1", "delay_ms = 2"))
    bench.run()
    assert bench.measured == [*ALL, *ALL[:2]]


def test_failed_cell_is_reported_and_the_others_are_measured(bench, monkeypatch):
    measure = bench.sweep.measure

    def failing(cell, at, timeout_s):
        if str(cell) == ALL[1]:
            raise bench.sweep.RunError(f"{cell} failed: out of luck")
        return measure(cell, at, timeout_s)

    monkeypatch.setattr(bench.sweep, "measure", failing)
    result = bench.run()
    assert result.exit_code == 1
    assert "near dpipe 1f1b fp32 failed: out of luck" in result.output
    assert bench.measured == [ALL[0], *ALL[2:]]


@pytest.fixture
def in_a_lab(bench, monkeypatch) -> dict[str, str]:
    """The commands of a sweep in a lab, with a fake lab."""
    monkeypatch.setattr(bench.sweep, "venue", lambda *_: nullcontext())
    return {"venue": "lab"}


def only_cell(bench, venue):
    table = {
        "name": "s",
        "config": "config.toml",
        "venue": venue,
        "networks": ["far.toml"],
        "scale": 4,
    }
    sweep = bench.sweep.Sweep(**table, run=[{"schedules": ["1f1b"]}])
    (cell,) = bench.sweep.cells(sweep, bench.folder / "work")
    return cell


def test_scale_divides_messages_bandwidth_and_window_but_not_delay(bench):
    cell = only_cell(bench, "shaped")
    assert cell.config.replay.message_bytes == 1000
    assert load_network(cell.config.transport.shape).default == Link(20, 0.25, window_bytes=1e6)


def test_in_a_lab_the_kernel_has_its_own_window_and_ranks_listen_outside(bench):
    config = only_cell(bench, "lab").config
    assert load_network(config.predict.network).default == Link(20, 0.25, window_bytes=4e6)
    assert config.transport.shape is None
    assert config.node.bind == "0.0.0.0"


def test_cells_of_another_venue_or_engine_are_others(bench, in_a_lab, monkeypatch):
    monkeypatch.setattr(
        bench.sweep, "compare_pipelining", lambda name, size: {"loss difference": 0.0}
    )
    bench.run(networks=["far.toml"], schedules=["gpipe"], **in_a_lab)
    bench.run(networks=["far.toml"], schedules=["gpipe"], engine="torch", **in_a_lab)
    assert only_cell(bench, "shaped").key != only_cell(bench, "lab").key
    assert bench.measured == ["far dpipe gpipe fp32", "far torch gpipe fp32"]


@pytest.mark.parametrize(("schedule", "compared"), [("gpipe", "gpipe"), ("auto", "zero-bubble")])
def test_line_of_torch_has_its_loss_difference(bench, in_a_lab, monkeypatch, schedule, compared):
    monkeypatch.setattr(
        bench.sweep,
        "compare_pipelining",
        lambda name, size: {"loss difference": {compared: 1e-7}[name]},
    )
    bench.run(networks=["far.toml"], schedules=[schedule], engine="torch", **in_a_lab)
    (line,) = bench.lines()
    assert line["loss_difference"] == 1e-7


def test_torch_with_other_losses_is_refused(bench, in_a_lab, monkeypatch):
    def differ(schedule, size):
        raise AssertionError("the losses differ by 1")

    monkeypatch.setattr(bench.sweep, "compare_pipelining", differ)
    result = bench.run(networks=["far.toml"], schedules=["gpipe"], engine="torch", **in_a_lab)
    assert result.exit_code == 1
    assert "the losses differ by 1" in result.output
    assert not bench.results.exists()


def test_sweep_stops_after_as_many_cells_as_asked(bench):
    bench.run(most=3)
    assert bench.measured == ALL[:3]
    bench.run(most=3)
    assert bench.measured == ALL


def test_profile_of_unlike_links_comes_back_as_it_was(bench):
    network = Network("pair", None, {(0, 1): Link(10, 1), (1, 0): Link(20, 2, window_bytes=5e5)})
    bench.write("pair.toml", bench.sweep.as_profile(network))
    assert load_network(bench.folder / "pair.toml") == network


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"engines": ["dpipe"]}, "engines: Extra inputs are not permitted"),
        (
            {"engine": "deepspeed"},
            "run.0.engine: Input should be 'dpipe', 'torch', 'fsdp' or 'megatron', got 'deepspeed'",
        ),
        ({"engine": "torch"}, "transport.shape must be left out, its network is gloo's"),
        ({"venue": "cloud"}, "venue: Input should be 'local', 'shaped' or 'lab', got 'cloud'"),
        ({"scale": 0}, "scale: Input should be greater than or equal to 1, got 0"),
        ({"schedules": ["wavefront"]}, "pipeline.schedule must be one of .*, got 'wavefront'"),
        ({"networks": ["nowhere.toml"]}, r"nowhere.toml does not exist"),
    ],
)
def test_invalid_sweep_is_refused_before_anything_runs(bench, keys, message):
    result = bench.run(**keys)
    assert result.exit_code == 2
    assert re.search(message, result.output)
    assert bench.measured == []


def test_sweep_file_must_exist_and_be_toml(bench):
    missing = CliRunner().invoke(bench.sweep.main, [str(bench.folder / "none.toml")])
    bench.write("torn.toml", "name =")
    torn = CliRunner().invoke(bench.sweep.main, [str(bench.folder / "torn.toml")])
    assert "none.toml does not exist" in missing.output
    assert "torn.toml is not TOML" in torn.output
    assert missing.exit_code == torn.exit_code == 2


def test_scale_is_refused_where_packets_are_lost(bench):
    """Of a message that is divided fewer would be."""
    bench.write("far.toml", f"{FAR}loss_percent = 0.1\n")
    result = bench.run(scale=4)
    assert result.exit_code == 2
    assert "far loses packets: with scale 4" in result.output
    assert bench.run().exit_code == 0


def test_scale_is_refused_for_a_real_model(bench):
    bench.write("config.toml", CONFIG.replace('layers = "replay"', "num_layers = 2"))
    result = bench.run(scale=4)
    assert result.exit_code == 2
    assert "scale 4 divides replay.message_bytes, but" in result.output


def test_network_with_fewer_pairs_than_ranks_is_refused_first(bench):
    bench.write("near.toml", "link = []")
    result = bench.run()
    assert "'near' has no link from rank 0 to 1" in result.output
    assert bench.measured == []


@pytest.mark.slow
def test_real_cell_takes_the_simulated_time(script, tmp_path, monkeypatch):
    """Two processes, three steps, 20 ms each way: the measured time is the simulated one and a
    little more.
    """
    bench = Bench(script("sweep"), tmp_path, monkeypatch)
    result = bench.run(networks=["far.toml"], schedules=["gpipe"])
    assert result.exit_code == 0, result.output
    (line,) = bench.lines()
    assert line["predicted_s"] <= line["measured_s"] < line["predicted_s"] + 0.2


def test_commit_is_left_open_where_there_is_no_git(script, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert script("trials").commit_of_tree() == ""


@pytest.mark.parametrize("code", [0, 128 + 15], ids=["in good order", "before its ranks heard"])
def test_run_that_was_stopped_is_no_result_and_ends_the_sweep(script, tmp_path, monkeypatch, code):
    """Ctrl-C reaches the launcher while a cell runs; its ranks end their step, or die of it while
    they start.
    """
    bench = Bench(script("sweep"), tmp_path, monkeypatch)

    def stopped(argv_of_rank, num_ranks, **settings):
        settings["on_line"](STOPPING)
        return code

    monkeypatch.setattr(script("trials"), "launch", stopped)
    result = bench.run()
    assert result.exit_code == 1
    assert result.output.splitlines() == ["[1/4] near dpipe gpipe fp32 ... ", "Aborted!"]
    assert not bench.results.exists()


def test_failed_run_shows_the_end_of_its_output(script, tmp_path, monkeypatch):
    bench = Bench(script("sweep"), tmp_path, monkeypatch)
    bench.write("far.toml", FAR + "jitter_ms = 1")
    result = bench.run(networks=["far.toml"], schedules=["gpipe"])
    assert result.exit_code == 1
    assert "has jitter, loss or reordering" in result.output
    assert not bench.results.exists()


def test_run_that_takes_too_long_is_ended(script, tmp_path, monkeypatch):
    bench = Bench(script("sweep"), tmp_path, monkeypatch)
    result = bench.run(networks=["far.toml"], schedules=["gpipe"], timeout_s=0.3)
    assert result.exit_code == 1
    assert (
        "far dpipe gpipe fp32: the ranks have not ended after 0.3 s and were killed"
        in result.output
    )


@pytest.mark.parametrize("name", ["gpt3xl_gpipe_network", "gpt3xl_replicas"])
def test_committed_results_are_those_of_their_sweep_file(script, tmp_path, name):
    """Otherwise a change of the configuration has changed the keys of measured cells, and the sweep
    would measure all again.
    """
    sweep = script("sweep")
    known = {
        cell.key
        for cell in sweep.cells(
            sweep.read_table(sweep.Sweep, ROOT / f"scripts/sweeps/{name}.toml"), tmp_path
        )
    }
    lines = [
        json.loads(line)
        for line in (ROOT / f"scripts/results/{name}.jsonl").read_text("utf-8").splitlines()
    ]
    assert lines and {line["key"] for line in lines} <= known
