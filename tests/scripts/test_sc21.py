"""The SC21 paper's measurements: simulated if that is quick, and as batch jobs for a stand-in for
sbatch.
"""

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from sc21.cluster import PARAMETERS, predicted
from sc21.experiments import EXPERIMENTS
from sc21.run import main
from sc21.slurm import CONFIGURATION, batch_job, case_name, overrides, site
from tables.form import ORIGINS

from dpipe.config.load import load
from dpipe.config.presets import PRESETS
from dpipe.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SITE = {
    "SLURM_PARTITION": "gpus",
    "SLURM_ACCOUNT": "me",
    "SLURM_TIME": "00:10:00",
    "GPUS_PER_NODE": "8",
    "DPIPE": "dpipe",
    "DPIPE_FILES": "/shared/*.txt",
    "DPIPE_TOKENIZER": "bytes",
    "DPIPE_STEPS": "5",
}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CONFIG.sh's variables are set; returns the folder of the runs."""
    for name, text in (SITE | {"DPIPE_RUNS": str(tmp_path / "runs")}).items():
        monkeypatch.setenv(name, text)
    return tmp_path / "runs"


def run(*words: object) -> Result:
    return CliRunner().invoke(main, [*map(str, words)])


def rows(name: str, most_actions: int = 600) -> list:
    cases = [
        c
        for c in EXPERIMENTS[name].cases
        if c.num_microbatches * c.pipeline * c.stages_per_rank <= most_actions
    ]
    return [predicted(case) for case in cases]


def test_every_experiment_has_its_script() -> None:
    scripts = {
        path.stem.removeprefix("run_"): path for path in (ROOT / "scripts/sc21").glob("run_*.sh")
    }
    assert set(scripts) == set(EXPERIMENTS)
    for name, path in scripts.items():
        assert os.access(path, os.X_OK)
        assert f'/run" {name} "$@"' in path.read_text()


def test_sizes_of_table_1_are_the_presets() -> None:
    ours = [(case.num_layers, case.width, case.num_heads) for case in EXPERIMENTS["table_1"].cases]
    presets = [sizes for name, sizes in PRESETS.items() if name.startswith("sc21")]
    assert ours == [(sizes["num_layers"], sizes["width"], sizes["num_heads"]) for sizes in presets]


def test_every_case_fills_its_gpus_and_its_batch() -> None:
    for experiment in EXPERIMENTS.values():
        for case in experiment.cases:
            assert case.num_microbatches * case.micro_batch * case.data == case.batch
            assert case.num_layers % (case.pipeline * case.stages_per_rank) == 0
    assert [case.gpus for case in EXPERIMENTS["table_1"].cases][-1] == 3072


def test_weak_scaling_follows_from_its_first_row() -> None:
    first, *others = rows("table_1")
    assert first.fitted
    assert abs(first.error_percent) < 0.5
    assert len(others) >= 5
    assert all(abs(row.error_percent) < 12 and row.fits is not False for row in others)


def kept(name: str) -> list[dict[str, str]]:
    path = ROOT / f"scripts/results/sc21/{name}.csv"
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_prediction_of_today_is_the_one_that_is_kept(name: str) -> None:
    """Only the quick cases; after an intended change, run_NAME.sh writes all."""
    today = {(row.series, row.x): row for row in rows(name, most_actions=1200)}
    assert today
    assert len(kept(name)) == len(EXPERIMENTS[name].cases)
    for row in kept(name):
        predicted_row = today.get((row["series"], row["x"]))
        if predicted_row is not None:
            assert row["seconds"] == f"{predicted_row.seconds:.4g}"
            assert row["tflops"] == f"{predicted_row.tflops:.4g}"


def test_readme_has_the_rows_of_the_results() -> None:
    text = (ROOT / "scripts/sc21/README.md").read_text(encoding="utf-8")
    for row in kept("table_1"):
        error = "fitted" if row["fitted"] else f"{float(row['error_percent']):+.1f} %"
        ranks = f"{row['tensor']} x {row['pipeline']} x {row['data']}"
        shown = f"{row['published_tflops']} | {row['tflops']} | {error}"
        assert f"| {row['x']} | {row['gpus']} | {ranks} | {shown} | " in text


def test_summary_of_table_1_matches_its_rows() -> None:
    errors = [abs(float(row["error_percent"])) for row in kept("table_1") if not row["fitted"]]
    said = f"mean error {sum(errors) / 9:.1f} %, largest {max(errors):.1f} %"
    readme = ROOT / "scripts/sc21/README.md"
    assert said in readme.read_text(encoding="utf-8")
    page = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    assert f"nine others have a mean error of {sum(errors) / 9:.1f} %" in page


def test_errors_of_interleaved_rows_are_those_that_the_readme_says() -> None:
    cases = EXPERIMENTS["table_1"].cases
    rows = list(zip(cases, kept("table_1"), strict=True))
    errors = {
        interleaved: [
            abs(float(row["error_percent"]))
            for case, row in rows
            if (case.stages_per_rank > 1) is interleaved and case.tensor == 8
        ]
        for interleaved in (False, True)
    }
    text = " ".join((ROOT / "scripts/sc21/README.md").read_text(encoding="utf-8").split())
    means = {interleaved: f"{sum(each) / len(each):.1f} %" for interleaved, each in errors.items()}
    assert f"interleaved rows are still {means[True]} too fast" in text
    assert f"not interleaved err by {means[False]} on average" in text


def test_errors_of_strong_scaling_are_those_that_the_readme_says() -> None:
    errors = [abs(float(row["error_percent"])) for row in kept("strong_scaling")]
    text = " ".join((ROOT / "scripts/sc21/README.md").read_text(encoding="utf-8").split())
    mean = f"{sum(errors) / len(errors):.1f} %"
    assert f"mean error {mean}, largest {max(errors):.1f} %" in text
    assert f"errs by {mean} on average instead of 5.1 %" in text


def test_two_sequences_at_a_time_are_best_at_a_large_batch() -> None:
    """Figure 16: they leave fewer waves open than one, and a smaller bubble than four."""
    speeds = {row["x"]: float(row["tflops"]) for row in kept("figure_16")[4:]}
    assert max(speeds, key=speeds.__getitem__) == "2"
    more = (speeds["2"] / speeds["1"] - 1) * 100
    text = (ROOT / "scripts/sc21/README.md").read_text(encoding="utf-8")
    assert f"2 is best at batch 512, {more:.1f} % faster than 1" in text


def test_every_assumption_says_where_it_is_from() -> None:
    assert all(parameter.origin.startswith(ORIGINS) for parameter in PARAMETERS)


def test_model_flops_leave_out_what_is_recomputed() -> None:
    """Four passes instead of three, except for the logits."""
    row = predicted(EXPERIMENTS["table_1"].cases[0])
    assert 1.25 < row.tflops / row.model_tflops < 4 / 3
    assert row.mfu == pytest.approx(row.model_tflops / 312)


def test_tensor_parallelism_beyond_a_machine_is_not_best() -> None:
    tops = max(
        (row for row in rows("figure_13") if row.series == "batch 32"), key=lambda row: row.tflops
    )
    assert tops.tensor == 8


@pytest.mark.parametrize("name", ["figure_14", "figure_15"])
def test_data_parallelism_is_better_where_the_model_fits(name: str) -> None:
    line = [row.tflops for row in rows(name) if row.series == "batch 32"]
    assert len(line) == 5
    assert line == sorted(line, reverse=True)


def test_scattering_helps_where_hops_are_many() -> None:
    whole, scattered = (
        next(row for row in rows("figure_18") if row.series == series)
        for series in ("whole", "scattered")
    )
    assert 1.02 < scattered.tflops / whole.tflops < 1.15


def test_simulation_writes_a_table_and_a_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = run("figure_15", "--mode", "sim", "--folder", tmp_path)
    assert result.exit_code == 0, result.output
    assert "The paper: slower the larger the tensor parallel size." in result.output
    assert "batch 512: 0." in (tmp_path / "figure_15.md").read_text()
    assert len(list(csv.DictReader((tmp_path / "figure_15.csv").read_text().splitlines()))) == 15
    assert (tmp_path / "figure_15.png").read_bytes().startswith(b"\x89PNG")


def test_plot_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = run("figure_15", "--mode", "sim", "--folder", tmp_path)
    assert result.exit_code == 2
    assert "dpipe[plot]" in result.output


@pytest.mark.parametrize("name", [*SITE, "DPIPE_RUNS"])
def test_variable_missing_in_the_configuration_is_named(
    name: str, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, " ")
    result = run("figure_14", "--mode", "slurm", "--dry-run")
    assert result.exit_code == 2
    assert f"CONFIG.sh does not set {name}, which --mode slurm needs" in result.output


def test_invalid_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="GPUS_PER_NODE must be a number from 1, got 'eight'"):
        site(SITE | {"DPIPE_RUNS": "runs", "GPUS_PER_NODE": "eight"})


def test_case_is_a_batch_job_of_one_process_a_gpu() -> None:
    case = EXPERIMENTS["figure_14"].cases[0]
    argv = batch_job("figure_14", case, site(SITE | {"DPIPE_RUNS": "/shared/runs"}))
    assert argv[0] == "sbatch"
    assert {
        "--partition=gpus",
        "--account=me",
        "--nodes=8",
        "--ntasks=64",
        "--ntasks-per-node=8",
    } <= set(argv)
    wrapped = argv[-1].removeprefix("--wrap=")
    assert wrapped.startswith("srun dpipe train ")
    assert "pipeline.stages=2" in wrapped
    assert "data_parallel.replicas=32" in wrapped
    assert "/shared/runs/figure_14-batch-32-2--32" in wrapped


def test_cases_are_configurations_that_dpipe_takes() -> None:
    cases = [case for experiment in EXPERIMENTS.values() for case in experiment.cases]
    for case in cases:
        assert load(CONFIGURATION, overrides(case)).world_size == case.gpus


def test_cases_have_runs_of_their_own() -> None:
    names = [
        case_name(name, case)
        for name, experiment in EXPERIMENTS.items()
        for case in experiment.cases
    ]
    assert len(set(names)) == len(names)


def test_jobs_are_submitted(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, 'echo Submitted batch job 7; echo "$@" >>$0.log', monkeypatch)
    result = run("figure_14", "--mode", "slurm")
    assert result.exit_code == 0, result.output
    assert result.output.count("Submitted batch job 7") == 10
    assert len((tmp_path / "bin/sbatch.log").read_text().splitlines()) == 10


def test_dry_run_submits_nothing(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "touch $0.log", monkeypatch)
    assert run("figure_14", "--mode", "slurm", "--dry-run").output.count("sbatch --job-name") == 10
    assert not (tmp_path / "bin/sbatch.log").exists()


def test_tensor_parallelism_over_two_machines_is_left_out(cluster: Path) -> None:
    output = run("figure_13", "--mode", "slurm", "--dry-run").output
    assert output.count("sbatch --job-name") == 6
    assert output.count("left out: ") == 4
    assert (
        "left out: batch 32 at 4, 16: a group of 16 needs one machine, and GPUS_PER_NODE is 8"
        in output
    )


def test_refusal_of_sbatch_is_reported(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, "echo invalid account >&2; exit 1", monkeypatch)
    result = run("figure_14", "--mode", "slurm")
    assert result.exit_code == 2
    assert "sbatch refused the case above: invalid account" in result.output


def test_missing_sbatch_is_reported(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("figure_14", "--mode", "slurm")
    assert result.exit_code == 2
    assert "sbatch is not here" in result.output


def stand_in(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "bin/sbatch"
    path.parent.mkdir()
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent), prepend=os.pathsep)


def test_measured_steps_make_the_same_table(cluster: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    case = EXPERIMENTS["table_1"].cases[0]
    folder = cluster / case_name("table_1", case)
    folder.mkdir(parents=True)
    steps = [
        {"step": i, "step_s": s, "gpu_memory_mb": {"0": 4e4}}
        for i, s in enumerate((90.0, 60.0, 4.0, 3.0, 5.0))
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    result = run("table_1", "--mode", "real", "--folder", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "1 of 10 cases have run" in result.output
    (row,) = csv.DictReader((tmp_path / "out/table_1.csv").read_text().splitlines())
    assert (row["seconds"], row["memory_gb"]) == ("4", "40")


@pytest.mark.parametrize("steps", [None, 2])
def test_table_without_runs_is_refused(steps: int | None, cluster: Path) -> None:
    if steps:
        folder = cluster / case_name("table_1", EXPERIMENTS["table_1"].cases[0])
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text('{"step": 0, "step_s": 1.0}\n' * steps)
    result = run("table_1", "--mode", "real")
    assert result.exit_code == 2
    assert "no case of table_1 has run in" in result.output


@pytest.mark.slow
def test_script_reads_the_configuration_beside_it(tmp_path: Path) -> None:
    """The whole way from the shell, in a copy of the tree whose interpreter is this one."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for path, text in {
        "scripts/setup": "exit 0",
        ".venv/bin/python": f'PYTHONPATH={ROOT}:$PYTHONPATH exec {sys.executable} "$@"',
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / path).chmod(0o755)
    script = tmp_path / "scripts/sc21/run_figure_11.sh"
    done = subprocess.run([script, "--mode", "slurm"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert (
        "CONFIG.sh does not set SLURM_PARTITION, SLURM_ACCOUNT, DPIPE_FILES, DPIPE_TOKENIZER, which"
        in done.stderr
    )
