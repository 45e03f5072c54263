#!/usr/bin/env python3
"""What `dpipe measure` and `dpipe simulate --machines` say of a job ahead of it, beside what its
steps then take on this machine.

    scripts/ahead.py JOB [-o KEY=VALUE] [--runs N]    measures and runs, then prints the table
    scripts/ahead.py                                  the table of what is there

    measure   run   measure   run   measure
    |__ ahead __|__ after __|
                |__ ahead __|__ after __|

A machine's speed may change by more than a prediction is wrong by. So it is measured before each
run and after it, with a process for each rank, as they will share the machine's cores. Meanwhile a
yardstick, the same small computation again and again on each core, says how fast the machine is:
while layers were measured, and while steps ran. And noted is what share of the processors' time a
virtual machine's host took. A line of JSON for each run is appended to the results. The table says
how far the runs of a job are off on average, and how well so many runs can tell.
"""

import json
import math
import os
import secrets
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import mean, median, stdev
from tempfile import TemporaryDirectory
from threading import Event, Thread, Timer
from typing import Any, NamedTuple

import click
import psutil
import torch
from table import ROOT
from trials import append, commit_of_tree, run_to_end, whole_lines
from venue import ThisMachine

from dpipe.config.load import load
from dpipe.processes.environment import environment
from dpipe.processes.launch import free_port

RESULTS = ROOT / "scripts/results/ahead.jsonl"
_MEASURE_S = 900.0
_RUN_S = 3600.0
_EVERY_S = 0.5  # a look of the yardstick, which takes some 3 ms of a core
_PRODUCTS = 30  # in a look
_LOOK_S = 0.1
_MEASURES = "measuring what the layers take"  # dpipe measure says so
_LENGTH = ("train.steps=", "train.eval_")  # overrides of how long a run is, not of what a step is
_HEAD = ("job", "predicted", "runs", "measured / predicted", "standard error", "least", "most")


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


class Yardstick:
    """How fast this machine's cores are while other processes have them: in a `with` block, twice a
    second on each, the time that some products of matrices take of it. They fit a core's own cache:
    otherwise they would say how much of it a job leaves to others.
    """

    def __enter__(self) -> "Yardstick":
        self._ended = Event()
        self._looks: list[tuple[float, float]] = []  # when, and products a second
        self._threads = []
        for core in os.sched_getaffinity(0):
            thread = Thread(target=self._look, args=(core,), daemon=True)
            thread.start()
            self._threads.append(thread)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def speed(self, since: float, until: float) -> float:
        """Products a second, the mean of all cores; NaN where no look fell in between. Times are of
        `time.monotonic`.
        """
        speeds = []
        for at, speed in list(self._looks):
            if since <= at <= until:
                speeds.append(speed)
        return mean(speeds) if speeds else math.nan

    def _look(self, core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        torch.set_num_threads(1)
        square = torch.ones(128, 128)
        while not self._ended.wait(_EVERY_S):
            began = time.thread_time()
            for _ in range(_PRODUCTS):
                torch.mm(square, square)
            took_s = time.thread_time() - began
            at = time.monotonic()
            speed = _PRODUCTS / took_s
            self._looks.append((at, speed))


class Predicted(NamedTuple):
    step_s: float
    stolen_percent: float  # while the machine was measured
    speed: float  # of the yardstick, while its layers were measured


class Steps(NamedTuple):
    seconds: list[float]  # of each but the first
    speed: float  # of the yardstick meanwhile


def predicted(job: str, overrides: tuple[str, ...], yardstick: Yardstick) -> Predicted:
    """What `dpipe simulate` says of a step on this machine as it is now."""
    with TemporaryDirectory() as folder:
        machines = Path(folder) / "machines.toml"
        with Stolen() as stolen:
            since, until = _measure(job, overrides, machines)
        argv = _dpipe("simulate", job, overrides, f"--machines={machines}", "--json")
        said = subprocess.check_output(argv, env=environment(), text=True)
    step_s = float(json.loads(said)["step_s"])
    speed = yardstick.speed(since, until)
    return Predicted(step_s, stolen.percent, speed)


def _measure(job: str, overrides: tuple[str, ...], file: Path) -> tuple[float, float]:
    """Writes what `dpipe measure` finds, a process for each rank. Returns since when and until when
    it measured layers.
    """
    size = load(Path(job), overrides).world_size
    environ = {**environment(), "DPIPE_TOKEN": secrets.token_hex(16)}
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for rank in range(size):
        place = ["--alone"]
        if size > 1:
            place = [f"--rank={rank}", f"--world-size={size}", f"--coordinator={address}"]
        argv = _dpipe("measure", job, overrides, *place, f"--out={file}")
        says = subprocess.PIPE if rank == 0 else None
        process = subprocess.Popen(
            argv, env=environ, stdout=subprocess.DEVNULL, stderr=says, text=True
        )
        processes.append(process)
    late = Timer(_MEASURE_S, processes[0].kill)
    late.start()
    try:
        times = _times_of_lines(processes[0])
        codes = [process.wait(_MEASURE_S) for process in processes]
    finally:
        late.cancel()
        for process in processes:
            process.kill()
            if process.stderr is not None:
                process.stderr.close()
    if any(codes):
        raise click.ClickException("dpipe measure has failed")
    since = times[_MEASURES]
    behind = [at for at in times.values() if at > since]
    return since, min(behind, default=time.monotonic())


def _times_of_lines(process: "subprocess.Popen[str]") -> dict[str, float]:
    """When it wrote each to its standard error, which appears in ours."""
    times = {}
    assert process.stderr is not None
    for line in process.stderr:
        times[line.strip()] = time.monotonic()
        click.echo(line, err=True, nl=False)
    return times


def _dpipe(command: str, job: str, overrides: tuple[str, ...], *options: str) -> list[str]:
    given = []
    for override in overrides:
        given += ["-o", override]
    return [sys.executable, "-m", "dpipe", command, job, *given, *options]


def measured(job: str, overrides: tuple[str, ...], yardstick: Yardstick) -> Steps:
    with TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        in_folder = f"run.folder={json.dumps(str(run))}"
        metrics = run / "metrics.jsonl"
        times: list[float] = []
        ended = Event()
        watch = Thread(target=_watch, args=(metrics, ended, times))
        watch.start()
        try:
            rows = run_to_end(Path(job), (*overrides, in_folder), ThisMachine(), timeout_s=_RUN_S)
        finally:
            ended.set()
            watch.join()
    seconds = []
    for row in rows:
        if "step_s" in row:
            seconds.append(row["step_s"])
    speed = yardstick.speed(times[0], times[-1]) if times else math.nan
    return Steps(seconds[1:], speed)


def _watch(metrics: Path, ended: Event, times: list[float]) -> None:
    """Note when the row of each step appears."""
    while not ended.wait(_LOOK_S):
        text = metrics.read_text(encoding="utf-8") if metrics.exists() else ""
        num_new = text.count('"step_s"') - len(times)
        for _ in range(num_new):
            times.append(time.monotonic())


def compared(
    job: str, overrides: tuple[str, ...], ahead: Predicted, yardstick: Yardstick
) -> tuple[dict[str, Any], Predicted]:
    """The line of a run, with what was predicted ahead of it and what after it; and the latter."""
    with Stolen() as stolen:
        steps = measured(job, overrides, yardstick)
    after = predicted(job, overrides, yardstick)
    line = {
        "job": job,
        "overrides": overrides,
        "predicted_s": ahead.step_s,
        "predicted_after_s": after.step_s,
        "measured_s": median(steps.seconds),
        "steps_s": steps.seconds,
        # Ahead, of the run, and after it.
        "stolen_percent": (ahead.stolen_percent, stolen.percent, after.stolen_percent),
        "date": date.today().isoformat(),
        "commit": commit_of_tree(),
    }
    speeds = (ahead.speed, steps.speed, after.speed)
    if not any(map(math.isnan, speeds)):  # else the run was too short for a look
        line["products_per_s"] = speeds
    return line, after


def ratios(line: dict[str, Any]) -> dict[str, float]:
    """Measured over predicted: by the mean of ahead and after, where there are both; and where the
    machine's speed is known, as each would have been at that of the run.
    """
    took_s = line["measured_s"]
    ahead_s = line["predicted_s"]
    if "predicted_after_s" not in line:
        return {"ahead": took_s / ahead_s}
    after_s = line["predicted_after_s"]
    found = {"ahead and after": took_s / mean((ahead_s, after_s))}
    if "products_per_s" in line:
        ahead, of_run, after = line["products_per_s"]
        at_one_speed_s = mean((ahead_s * ahead / of_run, after_s * after / of_run))
        found["ahead and after, at the run's speed"] = took_s / at_one_speed_s
    return found


def summaries(lines: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Rows of the table: for each job and its overrides, the mean of its runs' ratios, with its
    standard error. Runs that follow each other share a prediction, so that it is a little larger.
    """
    by_job = defaultdict[tuple[str, str], list[float]](list)
    for line in lines:
        words = [line["job"]]
        for override in line["overrides"]:
            if not override.startswith(_LENGTH):
                words.append(override)
        for around, ratio in ratios(line).items():
            by_job[" ".join(words), around].append(ratio)
    rows = []
    for (job, around), each in by_job.items():
        error = ""
        if len(each) > 1:
            error = f"{stdev(each) / math.sqrt(len(each)):.3f}"
        numbers = [f"{mean(each):.3f}", error, f"{min(each):.3f}", f"{max(each):.3f}"]
        rows.append([job, around, str(len(each)), *numbers])
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
    with Yardstick() as yardstick:
        ahead = predicted(job, overrides, yardstick)
        for _ in range(runs):
            line, ahead = compared(job, overrides, ahead, yardstick)
            append(results, line)
            click.echo(said(line))


def said(line: dict[str, Any]) -> str:
    predicted_s = line["predicted_s"]
    took_s = line["measured_s"]
    words = []
    for around, ratio in ratios(line).items():
        words.append(f"{around} {ratio:.3f}")
    found = ", ".join(words)
    stolen = " %, ".join(f"{percent:g}" for percent in line["stolen_percent"])
    return (
        f"predicted {predicted_s:.4g} s, measured {took_s:.4g} s: {took_s / predicted_s:.3f}; "
        f"predicted after it {line['predicted_after_s']:.4g} s; by the mean of {found}; its host "
        f"took {stolen} % of the processors ahead, of the run, and after it"
    )


if __name__ == "__main__":
    main()
