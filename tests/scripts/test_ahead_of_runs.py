"""scripts/ahead.py, on a job of seconds."""

import json
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

ROOT = Path(__file__).resolve().parents[2]
JOB = """\
[model]
num_layers = 2
width = 16
num_heads = 2
context = 8
[data]
files = ["{text}"]
tokenizer = "bytes"
held_out = 0.0
[train]
steps = 4
batch_size = 2
num_microbatches = 2
[run]
tensorboard = false
"""


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("stages", [1, 2])
def test_line_has_what_was_predicted_around_a_run_and_what_its_steps_took(
    script: Callable[[str], ModuleType], tmp_path: Path, stages: int
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a few words, again and again. " * 60)
    job = tmp_path / "job.toml"
    job.write_text(JOB.format(text=text))
    results = tmp_path / "ahead.jsonl"
    words = [str(job), "-o", f"pipeline.stages={stages}", "--results", str(results)]
    result = CliRunner().invoke(script("ahead").main, words)
    assert result.exit_code == 0, result.output
    (line,) = map(json.loads, results.read_text().splitlines())
    assert line["predicted_s"] > 0
    assert line["predicted_after_s"] > 0
    assert len(line["stolen_percent"]) == 3
    assert len(line["steps_s"]) == 3
    assert min(line["steps_s"]) <= line["measured_s"] <= max(line["steps_s"])
    assert f"predicted {line['predicted_s']:.4g} s" in result.output


def test_prediction_after_a_run_is_the_one_ahead_of_the_next(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("ahead")
    speeds = iter([1.0, 2.0, 4.0])
    monkeypatch.setattr(module, "predicted", lambda *_: module.Predicted(next(speeds), [2], 0.5))
    monkeypatch.setattr(module, "measured_s", lambda *_: [3.0, 3.0, 9.0])
    job = tmp_path / "job.toml"
    job.write_text("")
    results = tmp_path / "ahead.jsonl"
    words = [str(job), "--runs", "2", "--results", str(results)]
    result = CliRunner().invoke(module.main, words)
    assert result.exit_code == 0, result.output
    first, second = map(json.loads, results.read_text().splitlines())
    assert (first["predicted_s"], first["predicted_after_s"]) == (1.0, 2.0)
    assert (second["predicted_s"], second["predicted_after_s"]) == (2.0, 4.0)
    assert "measured 3 s: 3.000; predicted after it 2 s: 2.000 of the mean" in result.output
    assert "measured 3 s: 1.500; predicted after it 4 s: 1.000 of the mean" in result.output


@pytest.mark.parametrize(("split", "cut"), [([3, 1], ("pipeline.split=[3, 1]",)), ([], ())])
def test_runs_are_cut_as_the_first_prediction_says(
    script: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    split: list[int],
    cut: tuple[str, ...],
) -> None:
    module = script("ahead")
    of_predictions: list[tuple[str, ...]] = []
    of_runs: list[tuple[str, ...]] = []

    def predict(_job: str, overrides: tuple[str, ...]) -> object:
        of_predictions.append(overrides)
        return module.Predicted(1.0, split, 0.0)

    def run(_job: str, overrides: tuple[str, ...]) -> list[float]:
        of_runs.append(overrides)
        return [1.0]

    monkeypatch.setattr(module, "predicted", predict)
    monkeypatch.setattr(module, "measured_s", run)
    results = tmp_path / "ahead.jsonl"
    module.alternate("job.toml", ("a=1",), 2, results)
    as_cut = ("a=1", *cut)
    assert of_predictions == [("a=1",), as_cut, as_cut]
    assert of_runs == [as_cut, as_cut]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["split"] for line in lines] == [split, split]
    assert [line["overrides"] for line in lines] == [["a=1"], ["a=1"]]


def test_table_says_how_far_the_runs_of_a_job_are_off_on_average(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    results = tmp_path / "ahead.jsonl"
    runs = [
        {"overrides": ["train.steps=5", "a=1"], "measured_s": 2.1, "predicted_after_s": 3.0},
        {"overrides": ["a=1", "train.steps=9"], "measured_s": 1.9, "predicted_after_s": 1.0},
        {"overrides": ["a=1"], "measured_s": 1.2},
        {"overrides": ["a=1"], "measured_s": 1.1, "split": [3, 1], "predicted_after_s": 1.0},
    ]
    for run in runs:
        line = {"job": "job.toml", "predicted_s": 1.0, **run}
        with results.open("a") as file:
            file.write(json.dumps(line) + "\n")
    result = CliRunner().invoke(script("ahead").main, ["--results", str(results)])
    assert result.exit_code == 0, result.output
    assert result.output.splitlines()[2:] == [
        "| job.toml a=1 |  | ahead and after | 2 | 1.475 | 0.425 | 1.050 | 1.900 |",
        "| job.toml a=1 |  | ahead | 1 | 1.200 |  | 1.200 | 1.200 |",
        "| job.toml a=1 | 3, 1 | ahead and after | 1 | 1.100 |  | 1.100 | 1.100 |",
    ]


def test_page_has_the_table_of_what_is_there(script: Callable[[str], ModuleType]) -> None:
    result = CliRunner().invoke(script("ahead").main)
    assert result.exit_code == 0, result.output
    assert result.output in (ROOT / "docs/results.md").read_text("utf-8")


def test_stolen_time_is_a_share_of_what_was_not_idle(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("ahead")
    times = namedtuple("times", ["user", "system", "idle", "iowait", "steal"])
    looks = iter([times(0, 0, 0, 0, 0), times(5, 2, 50, 40, 3)])
    monkeypatch.setattr(module.psutil, "cpu_times", lambda: next(looks))
    with module.Stolen() as stolen:
        pass
    assert stolen.percent == 30.0


@pytest.mark.usefixtures("warm_ranks")
def test_job_that_cannot_be_measured_says_so(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\nlayers = "no.such.module:layers"\n')
    result = CliRunner().invoke(script("ahead").main, [str(job)])
    assert result.exit_code == 1
    assert "dpipe measure has failed" in result.output
