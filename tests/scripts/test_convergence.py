import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

ROOT = Path(__file__).resolve().parents[2]
FILE = """
    name = "small"
    config = "config.toml"
    overrides = ["train.steps=2"]
    [[cell]]
    name = "whole"
    [[cell]]
    name = "half"
    overrides = ["pipeline.wire=bf16"]
    within_percent = 1
"""
CONFIG = """
    [model]
    num_layers = 2
    width = 16
    num_heads = 2
    context = 16
    [data]
    files = ["FOLDER/text.txt"]
    cache = "FOLDER/cache"
    held_out = 0.1
    [train]
    batch_size = 4
    num_microbatches = 2
    eval_every = 1
    [pipeline]
    stages = 2
    [run]
    tensorboard = false
"""


class Bench:
    """A file of two cells in a separate folder, with given final losses."""

    def __init__(self, script, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.script, self.folder, self.results = script, folder, folder / "results.jsonl"
        self.losses, self.trained = {"none": 2.0, "bf16": 2.01}, []
        monkeypatch.setattr(script, "ROOT", folder)
        (folder / "config.toml").write_text(CONFIG.replace("FOLDER", str(folder)))
        (folder / "text.txt").write_text("It was a dark and stormy night. " * 100)

    def run(self, text: str = FILE, *options: str) -> Result:
        (self.folder / "cells.toml").write_text(text)
        argv = [str(self.folder / "cells.toml"), "--results", str(self.results), *options]
        return CliRunner().invoke(self.script.main, argv)


@pytest.fixture
def bench(script, tmp_path, monkeypatch) -> Bench:
    bench = Bench(script("convergence"), tmp_path, monkeypatch)

    def run_to_end(path, overrides, at, *, timeout_s):
        wire = bench.script.load(path, overrides).pipeline.wire
        bench.trained.append(wire)
        return [
            {"step": 0, "held_out_loss": 9.0},
            {"step": 1, "loss": 5.0},
            {"step": 2, "held_out_loss": bench.losses[wire]},
        ]

    monkeypatch.setattr(bench.script, "run_to_end", run_to_end)
    return bench


def test_table_holds_final_losses_against_the_first_cell(bench):
    result = bench.run()
    assert result.exit_code == 0
    assert "| half | 2.0100 | +0.50 % | 1 % |" in result.output


def test_seeds_are_compared_one_by_one_and_their_mean_is_held_to_the_bound(bench, monkeypatch):
    def run_to_end(path, overrides, at, *, timeout_s):
        config = bench.script.load(path, overrides)
        loss = bench.losses[config.pipeline.wire] + config.train.seed
        return [{"step": 2, "held_out_loss": loss}]

    monkeypatch.setattr(bench.script, "run_to_end", run_to_end)
    bench.losses = {"none": 1.0, "bf16": 1.02}
    result = bench.run(
        FILE.replace('overrides = ["train', 'seeds = [0, 1]\n    overrides = ["train')
    )
    assert result.exit_code == 1
    assert "| half | 1.5200 | +1.50 % | +2.00, +1.00 | 1 % MISSED |" in result.output
    assert len(bench.results.read_text().splitlines()) == 4


def test_loss_outside_its_bound_is_marked_and_ends_with_1(bench):
    bench.losses["bf16"] = 1.97
    result = bench.run()
    assert result.exit_code == 1
    assert "| half | 1.9700 | -1.50 % | 1 % MISSED |" in result.output


def test_cell_is_trained_once_until_what_it_is_given_changes(bench):
    bench.run()
    bench.run()
    assert bench.trained == ["none", "bf16"]
    bench.run(FILE.replace("within_percent = 1", "within_percent = 2"))
    assert bench.trained == ["none", "bf16"]
    bench.losses = {"none": 2.0, "int8": 2.0}
    bench.run(FILE.replace("bf16", "int8"))
    assert bench.trained == ["none", "bf16", "int8"]
    assert len({json.loads(line)["key"] for line in bench.results.read_text().splitlines()}) == 3


def test_kept_losses_are_shown_without_training(bench):
    bench.losses["int8"] = 2.0
    bench.run(FILE.replace("bf16", "int8"))
    bench.trained.clear()
    result = bench.run(FILE, "--kept")
    assert bench.trained == []
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == 3  # nothing of bf16


@pytest.mark.parametrize(
    "name", ["convergence_wires", "convergence_narrow", "convergence_finetune"]
)
def test_table_on_the_page_is_the_one_that_is_kept(script, name):
    cells = ROOT / f"scripts/sweeps/{name}.toml"
    result = CliRunner().invoke(script("convergence").main, ["--kept", str(cells)])
    assert result.output in (ROOT / "docs/results.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("within_percent = 1", "within = 1", "cell.1.within: Extra inputs are not permitted"),
        (
            "within_percent = 1",
            "within_percent = 0",
            "cell.1.within_percent: Input should be greater than 0",
        ),
        ("pipeline.wire=bf16", "pipeline.wire=int5", "pipeline.wire must be one of"),
    ],
)
def test_invalid_file_is_refused(bench, old, new, message):
    result = bench.run(FILE.replace(old, new))
    assert result.exit_code == 2
    assert message in result.output
