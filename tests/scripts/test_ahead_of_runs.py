"""scripts/ahead.py, on a job of seconds."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

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
def test_line_has_what_was_predicted_ahead_and_what_steps_took(
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
    assert len(line["steps_s"]) == 3
    assert min(line["steps_s"]) <= line["measured_s"] <= max(line["steps_s"])
    assert f"predicted {line['predicted_s']:.4g} s" in result.output


@pytest.mark.usefixtures("warm_ranks")
def test_job_that_cannot_be_measured_says_so(
    script: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    job = tmp_path / "job.toml"
    job.write_text('[model]\nlayers = "no.such.module:layers"\n')
    result = CliRunner().invoke(script("ahead").main, [str(job)])
    assert result.exit_code == 1
    assert "dpipe measure has failed" in result.output
