"""Predicts a table or figure of the SC21 paper, submits its cases to Slurm, or shows their results.

\b
  --mode sim      predicted for machines of eight A100s, which sc21/cluster.py describes
  --mode slurm    one batch job of `dpipe train` per case, on the cluster of CONFIG.sh
  --mode real     the results of those jobs so far

sim and real write FOLDER/NAME.csv, .md and .png.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from tables.form import as_text

from dpipe.config.load import load
from dpipe.errors import ConfigError, DpipeError
from sc21.cluster import PARAMETERS, predicted
from sc21.experiments import EXPERIMENTS, Experiment
from sc21.rows import Row, draw
from sc21.slurm import CONFIGURATION, batch_job, measured, overrides, site


def write(name: str, experiment: Experiment, rows: Sequence[Row], folder: Path) -> str:
    """Write the three files; returns the Markdown. Raises `ConfigError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ConfigError(
            "the plot needs matplotlib; install the extra: pip install 'dpipe[plot]'"
        ) from None
    folder.mkdir(parents=True, exist_ok=True)
    whole = len(rows) == len(experiment.cases)
    finding = (
        experiment.finds(rows)
        if whole
        else f"{len(rows)} of {len(experiment.cases)} cases have run"
    )
    note = f"The paper: {experiment.statement}.\n\nHere: {finding}."
    text = f"# {experiment.title}\n\n{as_text(rows, None, note, PARAMETERS, digits=4)}\n"
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / f"{name}.csv").write_text(
        as_text(rows, "csv", note, digits=4) + "\n", encoding="utf-8"
    )
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    draw(rows, figure, x_label=experiment.x_label, y=experiment.y, title=experiment.title)
    figure.savefig(folder / f"{name}.png", dpi=120)
    return text


def submit(name: str, experiment: Experiment, *, dry_run: bool) -> None:
    """Submit every case that fits the cluster. All configurations are checked first, so that a
    mistake submits none.
    """
    cluster = site(os.environ)
    for case in experiment.cases:
        load(CONFIGURATION, overrides(case))
    for case in experiment.cases:
        if case.tensor > cluster.gpus_per_node:
            reason = (
                f"a group of {case.tensor} needs one machine, and GPUS_PER_NODE is "
                f"{cluster.gpus_per_node}"
            )
            click.echo(f"left out: {case.series} at {case.x}: {reason}")
            continue
        argv = batch_job(name, case, cluster)
        click.echo(shlex.join(argv))
        if not dry_run:
            _call(argv)


def _call(argv: list[str]) -> None:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        raise ConfigError(
            "sbatch is not here; run --mode slurm cluster Slurm is, or add --dry-run"
        ) from None
    if done.returncode:
        raise ConfigError(f"sbatch refused the case above: {done.stderr.strip()}")
    click.echo(done.stdout.strip())


def rows_of(name: str, experiment: Experiment, mode: str) -> list[Row]:
    if mode == "sim":
        return [predicted(case) for case in experiment.cases]
    runs = Path(os.environ.get("DPIPE_RUNS") or "runs/sc21")
    rows = [row for case in experiment.cases if (row := measured(name, case, runs)) is not None]
    if not rows:
        raise ConfigError(f"no case of {name} has run in {runs}; submit them with --mode slurm")
    return rows


@click.command(help=__doc__)
@click.argument("name", type=click.Choice([*EXPERIMENTS]))
@click.option(
    "--mode",
    type=click.Choice(["sim", "slurm", "real"]),
    required=True,
    help="Where the step times are from.",
)
@click.option(
    "--folder",
    type=Path,
    default=Path("runs/sc21"),
    show_default=True,
    help="Where the results go.",
)
@click.option("--dry-run", is_flag=True, help="With slurm: print the sbatch commands and run none.")
def main(name: str, mode: str, folder: Path, dry_run: bool) -> None:
    experiment = EXPERIMENTS[name]
    try:
        if mode == "slurm":
            submit(name, experiment, dry_run=dry_run)
        else:
            click.echo(write(name, experiment, rows_of(name, experiment, mode), folder))
    except DpipeError as error:
        click.echo(f"sc21: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
