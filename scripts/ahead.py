#!/usr/bin/env python3
"""What `dpipe measure` and `dpipe simulate --machines` say of a job ahead of it, beside what its
steps then take on this machine.

    scripts/ahead.py JOB [-o KEY=VALUE] [--runs N]    measures and runs, then prints the table
    scripts/ahead.py                                  the table of what is there

    measure   run   measure   run   measure
    |__ ahead __|__ after __|
                |__ ahead __|__ after __|

A machine's speed may change by more than a prediction is wrong by. So it is measured before each
run and after it, with a process for each rank, as they will share the machine's cores; and noted is
what share of the processors' time a virtual machine's host took from it meanwhile. All runs are cut
into stages as the first prediction says. A line of JSON for each run is appended to the results.
The table says how far the runs of a job are off on average, and how well so many runs can tell.
"""

import json
import math
import secrets
import subprocess
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import click
import psutil
from table import ROOT
from trials import append, commit_of_tree, run_to_end, whole_lines
from venue import ThisMachine

from dpipe.config.load import load
from dpipe.processes.environment import environment
from dpipe.processes.launch import free_port

RESULTS = ROOT / "scripts/results/ahead.jsonl"
_MEASURE_S = 900.0
_RUN_S = 3600.0
_LENGTH = ("train.steps=", "train.eval_")  # overrides of how long a run is, not of what a step is
_HEAD = (
    "job",
    "layers a stage, as predicted",
    "predicted",
    "runs",
    "measured / predicted",
    "standard error",
    "least",
    "most",
)


class Stolen:
    """Of the time that this machine's processors had something to do in a `with` block, the share
    that the host of a virtual machine gave to others; 0 where the system does not say.
    """

    percent = 0.0

    def __enter__(self) -> "Stolen":
        self._before = psutil.cpu_times()
        return self

    def __exit__(self, *_: object) -> None:
        after = psutil.cpu_times()
        spent = {}
        for name in after._fields:
            spent[name] = getattr(after, name) - getattr(self._before, name)
        stolen_s = spent.get("steal", 0.0)
        idle_s = spent["idle"] + spent.get("iowait", 0.0)
        busy_s = sum(spent.values()) - idle_s
        self.percent = round(100 * stolen_s / max(busy_s, stolen_s, 1e-9), 1)


class Predicted(NamedTuple):
    step_s: float
    # Layers a stage, by what was measured where the job does not say it; none for replayed stages.
    split: list[int]
    stolen_percent: float  # while the machine was measured


def predicted(job: str, overrides: tuple[str, ...]) -> Predicted:
    """What `dpipe simulate` says of a step on this machine as it is now."""
    with TemporaryDirectory() as folder:
        machines = Path(folder) / "machines.toml"
        with Stolen() as stolen:
            _measure(job, overrides, machines)
        argv = _dpipe("simulate", job, overrides, f"--machines={machines}", "--json")
        said = json.loads(subprocess.check_output(argv, env=environment(), text=True))
    has_layers = load(Path(job), overrides).model.family.computes
    split = said["layers_per_stage"] if has_layers else []
    return Predicted(said["step_s"], split, stolen.percent)


def _measure(job: str, overrides: tuple[str, ...], file: Path) -> None:
    """Writes what `dpipe measure` finds, a process for each rank."""
    size = load(Path(job), overrides).world_size
    environ = {**environment(), "DPIPE_TOKEN": secrets.token_hex(16)}
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for rank in range(size):
        place = ["--alone"]
        if size > 1:
            place = [f"--rank={rank}", f"--world-size={size}", f"--coordinator={address}"]
        argv = _dpipe("measure", job, overrides, *place, f"--out={file}")
        process = subprocess.Popen(argv, env=environ, stdout=subprocess.DEVNULL)
        processes.append(process)
    try:
        codes = [process.wait(_MEASURE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise click.ClickException("dpipe measure has failed")


def _dpipe(command: str, job: str, overrides: tuple[str, ...], *options: str) -> list[str]:
    given = []
    for override in overrides:
        given += ["-o", override]
    return [sys.executable, "-m", "dpipe", command, job, *given, *options]


def measured_s(job: str, overrides: tuple[str, ...]) -> list[float]:
    """Of each step but the first."""
    with TemporaryDirectory() as folder:
        in_folder = f"run.folder={json.dumps(folder + '/run')}"
        rows = run_to_end(Path(job), (*overrides, in_folder), ThisMachine(), timeout_s=_RUN_S)
    seconds = []
    for row in rows:
        if "step_s" in row:
            seconds.append(row["step_s"])
    return seconds[1:]


def compared(job: str, overrides: tuple[str, ...], ahead: Predicted) -> dict[str, Any]:
    """A run that is cut as `ahead` says, with what was predicted ahead of it and what after it."""
    as_cut = overrides
    if ahead.split:
        as_cut += (f"pipeline.split={ahead.split}",)
    with Stolen() as stolen:
        steps_s = measured_s(job, as_cut)
    after = predicted(job, as_cut)
    today = date.today()
    return {
        "job": job,
        "overrides": overrides,
        "split": ahead.split,
        "predicted_s": ahead.step_s,
        "predicted_after_s": after.step_s,
        "measured_s": median(steps_s),
        "steps_s": steps_s,
        # Ahead, of the run, and after it.
        "stolen_percent": (ahead.stolen_percent, stolen.percent, after.stolen_percent),
        "date": today.isoformat(),
        "commit": commit_of_tree(),
    }


def ratio(line: dict[str, Any]) -> float:
    """Measured over predicted: the mean of ahead and after, where there are both."""
    ahead_s = line["predicted_s"]
    around_s = mean((ahead_s, line.get("predicted_after_s", ahead_s)))
    return float(line["measured_s"] / around_s)


def summaries(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table: for each job, its overrides and its cut, the mean of its runs' ratios,
    with its standard error. Runs that follow each other share a prediction, so that it is a little
    larger.
    """
    ratios = defaultdict[tuple[str, str, str], list[float]](list)
    for line in lines:
        words = [line["job"]]
        for override in line["overrides"]:
            if not override.startswith(_LENGTH):
                words.append(override)
        around = "ahead and after" if "predicted_after_s" in line else "ahead"
        cut = ", ".join(map(str, line.get("split", ())))  # earlier lines have none
        ratios[" ".join(words), cut, around].append(ratio(line))
    rows = []
    for (job, cut, around), each in ratios.items():
        error = ""
        if len(each) > 1:
            error = f"{stdev(each) / math.sqrt(len(each)):.3f}"
        numbers = [f"{mean(each):.3f}", error, f"{min(each):.3f}", f"{max(each):.3f}"]
        rows.append([job, cut, around, str(len(each)), *numbers])
    return rows


@click.command()
@click.argument("job", type=click.Path(exists=True, dir_okay=False), required=False)
@click.option("-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE")
@click.option("--runs", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(job: str | None, overrides: tuple[str, ...], runs: int, results: Path) -> None:
    """Predict a job's step from measurements of this machine, and run it."""
    if job is not None:
        alternate(job, overrides, runs, results)
    for cells in (_HEAD, ["---"] * len(_HEAD), *summaries(whole_lines(results))):
        click.echo(f"| {' | '.join(cells)} |")


def alternate(job: str, overrides: tuple[str, ...], runs: int, results: Path) -> None:
    """Measure before each run and after it. Appends a line for each to `results`."""
    ahead = predicted(job, overrides)
    for _ in range(runs):
        line = compared(job, overrides, ahead)
        append(results, line)
        took_s = line["measured_s"]
        after = Predicted(line["predicted_after_s"], line["split"], line["stolen_percent"][-1])
        stolen = " %, ".join(f"{percent:g}" for percent in line["stolen_percent"])
        click.echo(
            f"predicted {ahead.step_s:.4g} s, measured {took_s:.4g} s: "
            f"{took_s / ahead.step_s:.3f}; predicted after it {after.step_s:.4g} s: "
            f"{ratio(line):.3f} of the mean of both; its host took {stolen} % of the "
            "processors ahead, of the run, and after it"
        )
        ahead = after


if __name__ == "__main__":
    main()
