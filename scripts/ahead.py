#!/usr/bin/env python3
"""What `dpipe measure` and `dpipe simulate --machines` say of a job ahead of it, beside what its
steps then take on this machine.

    scripts/ahead.py JOB [-o KEY=VALUE] [--runs N]

Each run measures anew, with a process for each rank, as they will share the machine's cores. A line
of JSON for each is appended to the results.
"""

import json
import secrets
import subprocess
import sys
from datetime import date
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import click
from table import ROOT
from trials import append, commit_of_tree, run_to_end
from venue import ThisMachine

from dpipe.config.load import load
from dpipe.processes.environment import environment
from dpipe.processes.launch import free_port

RESULTS = ROOT / "scripts/results/ahead.jsonl"
_MEASURE_S = 900.0
_RUN_S = 3600.0


def measured_machines(job: str, overrides: tuple[str, ...], file: Path) -> None:
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


def predicted_s(job: str, overrides: tuple[str, ...], machines: Path) -> float:
    """Of `dpipe simulate`."""
    argv = _dpipe("simulate", job, overrides, f"--machines={machines}", "--json")
    said = subprocess.check_output(argv, env=environment(), text=True)
    return float(json.loads(said)["step_s"])


def _dpipe(command: str, job: str, overrides: tuple[str, ...], *options: str) -> list[str]:
    given = []
    for override in overrides:
        given += ["-o", override]
    return [sys.executable, "-m", "dpipe", command, job, *given, *options]


def measured_s(job: str, overrides: tuple[str, ...], folder: Path) -> list[float]:
    """Of each step but the first."""
    in_folder = f"run.folder={json.dumps(str(folder))}"
    rows = run_to_end(Path(job), (*overrides, in_folder), ThisMachine(), timeout_s=_RUN_S)
    seconds = []
    for row in rows:
        if "step_s" in row:
            seconds.append(row["step_s"])
    return seconds[1:]


def compared(job: str, overrides: tuple[str, ...]) -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        machines = Path(folder) / "machines.toml"
        measured_machines(job, overrides, machines)
        ahead_s = predicted_s(job, overrides, machines)
        steps_s = measured_s(job, overrides, Path(folder) / "run")
    today = date.today()
    return {
        "job": job,
        "overrides": overrides,
        "predicted_s": ahead_s,
        "measured_s": median(steps_s),
        "steps_s": steps_s,
        "date": today.isoformat(),
        "commit": commit_of_tree(),
    }


@click.command()
@click.argument("job", type=click.Path(exists=True, dir_okay=False))
@click.option("-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE")
@click.option("--runs", default=1, show_default=True, type=click.IntRange(min=1))
@click.option("--results", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(job: str, overrides: tuple[str, ...], runs: int, results: Path) -> None:
    """Predict a job's step from measurements of this machine, and run it."""
    for _ in range(runs):
        line = compared(job, overrides)
        append(results, line)
        ahead_s = line["predicted_s"]
        took_s = line["measured_s"]
        ratio = took_s / ahead_s
        click.echo(f"predicted {ahead_s:.4g} s, measured {took_s:.4g} s: {ratio:.3f}")


if __name__ == "__main__":
    main()
