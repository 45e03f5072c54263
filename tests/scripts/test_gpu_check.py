"""The script on a CPU, and the results that an interrupted or partly failing check must still
give.
"""

import json
import os
import runpy
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from dpipe.bench.mfu import TINY
from dpipe.report.efficiency import peak_of

ROOT = Path(__file__).resolve().parents[2]


def dies(case, results) -> None:
    os._exit(7)


def hangs(case, results) -> None:
    time.sleep(60)


def a_row(**known):
    base = {
        "model": "GPT-3 XL 1.3B",
        "context": 2048,
        "engine": "dpipe",
        "stages": 1,
        "recompute": "none",
        "step_s": 1.0,
        "tokens_per_s": 2.0,
        "mfu": 0.514,
        "compiled": False,
        "memory_gb": None,
        "predicted_gb": None,
        "hidden": None,
        "over plain": 1.011,
    }
    return base | known


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.usefixtures("warm_spawn")
def test_tiny_run_writes_both_files(script, tmp_path) -> None:
    """One stage beside a plain loop, and two stages in two processes."""
    result = CliRunner().invoke(
        script("gpu_check").main, ["--tiny", "--out", str(tmp_path)], catch_exceptions=False
    )
    assert result.exit_code == 0
    report = json.loads((tmp_path / "gpu_check.json").read_text())
    assert report["failures"] == {}
    assert [(r["engine"], r["stages"]) for r in report["rows"]] == [
        ("plain", 1),
        ("dpipe", 1),
        ("dpipe", 2),
    ]
    assert all(r["tokens_per_s"] > 0 for r in report["rows"])
    text = (tmp_path / "gpu_check.md").read_text()
    assert "| tiny | 32 | 4 x 2 | dpipe | 2 | none | False |" in text
    assert "**Not run on a GPU.**" in text


def test_cases_without_time_are_listed(script, tmp_path) -> None:
    arguments = ["--tiny", "--minutes", "0", "--out", str(tmp_path)]
    CliRunner().invoke(script("gpu_check").main, arguments, catch_exceptions=False)
    assert "not measured: tiny, sequence 32, 2 stages, recompute none: no time was left" in (
        tmp_path / "gpu_check.md"
    ).read_text().replace("\n", " ")


def test_aims_are_those_of_one_stage_without_recomputation(script) -> None:
    rows = [
        a_row(),
        a_row(model="GPT-2 345M", **{"over plain": 1.02}),
        a_row(stages=4, mfu=0.9),
        a_row(engine="plain"),
    ]
    assert [str(aim) for aim in script("gpu_check").aims(rows)] == [
        "met: MFU of the 1.3B model in one stage 51.4% (at least 50%)",
        "met: engine over a plain loop, at worst 1.020 (at most 1.03)",
    ]


def test_missed_aims_are_said_to_be_missed(script) -> None:
    """Memory of any layout but compiled ones; sends of many micro-batches."""
    module = script("gpu_check")
    rows = [
        a_row(memory_gb=10.0, predicted_gb=9.6),
        a_row(memory_gb=10.0, predicted_gb=5.0, compiled=True),
        a_row(model=module.MANY.name, stages=2, hidden=0.9),
        a_row(stages=4, hidden=0.1),
    ]
    assert [str(aim) for aim in module.aims(rows)[2:]] == [
        "**missed**: predicted memory, off by at most 4.0% (at most 3%)",
        "**missed**: sends hidden behind compute, 90.0% (at least 95%)",
    ]


@pytest.mark.parametrize("fault", ["a test", "a case", "an aim"])
def test_check_fails_for_a_failed_test_a_failed_case_and_a_missed_aim(
    script, fault: str, tmp_path: Path
) -> None:
    module = script("gpu_check")
    report = module.Report(tmp_path, "a GPU", rows=[a_row()])
    assert report.passed
    if fault == "a test":
        report.tests.append(module.Tested("test_a", 1, "exit code 1"))
    if fault == "a case":
        report.failures["a case"] = "no room"
    if fault == "an aim":
        report.rows.append(a_row(**{"over plain": 1.2}))
    assert not report.passed


def test_measurement_whose_process_dies_is_reported(script, monkeypatch) -> None:
    module = script("gpu_check")
    monkeypatch.setattr(module, "_report", dies)
    assert module.in_own_process(TINY, 100).failure == "its process ended with exit code 7"


def test_measurement_that_hangs_is_ended_when_its_share_is_over(script, monkeypatch) -> None:
    module = script("gpu_check")
    monkeypatch.setattr(module, "_report", hangs)
    assert module.in_own_process(TINY, 0.5).failure == "not done within 0 s, its share"


def test_failure_is_the_message_of_the_process_that_failed(script, monkeypatch) -> None:
    """What several processes raise begins with an empty line and says who failed before it says
    why.
    """
    module = script("gpu_check")

    def fails(case):
        raise RuntimeError(
            "\n\n-- Process 1 terminated with the following error:\nValueError: no room\n"
        )

    monkeypatch.setattr(module, "measured", fails)
    monkeypatch.setattr(os, "setsid", lambda: None)
    ours, theirs = Pipe(duplex=False)
    module._report(TINY, theirs)
    outcome = ours.recv()
    assert outcome.failure == "RuntimeError: ValueError: no room"
    assert "in fails" in outcome.trace


def test_test_file_that_takes_too_long_keeps_its_output(script, tmp_path, monkeypatch) -> None:
    module = script("gpu_check")

    def late(argv, *, timeout, **options):
        raise subprocess.TimeoutExpired(
            argv, timeout, output=b"it began\n"
        )  # bytes, even with text=True

    monkeypatch.setattr(subprocess, "run", late)
    tested = module.run_test_file(tmp_path / "test_slow.py", 8)
    assert tested.code is None
    assert tested.said.startswith("not done")
    assert tested.output == "it began\n"


def test_tests_of_every_file_are_named_where_no_time_was_left(script, tmp_path) -> None:
    tested = script("gpu_check").run_tests(0, tmp_path / "log")
    said = {each.name: each.said for each in tested}
    assert said["test_nccl"] == "no time was left"
    assert "test_gpu_check" not in said


def test_files_have_the_results_so_far(script, tmp_path) -> None:
    module = script("gpu_check")
    report = module.Report(tmp_path, "CPU")
    report.add("a case", module.Outcome(failure="no room", trace="the whole story"))
    assert "not measured: a case: no room" in (tmp_path / "gpu_check.md").read_text()
    assert json.loads((tmp_path / "gpu_check.json").read_text())["traces"] == {
        "a case": "the whole story"
    }


def test_all_that_is_to_be_measured_fits_into_the_time(script) -> None:
    module = script("gpu_check")
    peak = peak_of("NVIDIA H200").flops("bf16")
    assert (
        module.TESTS_S + sum(module.expected_s(case, peak) for case in module.cases(False))
        <= 8 * 60
    )


def test_tests_for_gpus_can_be_collected_without_what_other_tests_need(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert "authority" in runpy.run_path(str(ROOT / "tests" / "conftest.py"))


def test_every_size_is_run_in_one_stage_and_four(script) -> None:
    module = script("gpu_check")
    cases = [case for case in module.cases(False) if case.name != module.MANY.name]
    assert len({(c.name, c.context, c.stages, c.recompute) for c in cases}) == 2 * 2 * 2 * 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_machine_without_a_gpu_is_refused_with_a_remedy(script, tmp_path) -> None:
    result = CliRunner().invoke(script("gpu_check").main, ["--out", str(tmp_path)])
    assert result.exit_code == 2
    assert "sees no CUDA GPU" in result.output
    assert list(tmp_path.iterdir()) == []


def test_interpreter_without_torch_is_refused_with_a_remedy(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    bare.chmod(0o755)
    words = [str(ROOT / "scripts/gpu_check"), "--tiny", "--out", str(tmp_path / "out")]
    done = subprocess.run(
        words,
        env={**os.environ, "PYTHON": str(bare), "PYTHONPATH": ""},
        text=True,
        capture_output=True,
    )
    assert done.returncode == 2
    assert "has no torch: name with PYTHON=" in done.stderr
    assert not (tmp_path / "out").exists()
