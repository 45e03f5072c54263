#!/usr/bin/env python3
"""Trains one model in several ways and holds the final held-out losses against the first one's.

    scripts/convergence.py                              runs what is missing, then prints the table
    scripts/convergence.py scripts/sweeps/convergence.toml    the same
    scripts/convergence.py --kept FILE                  trains nothing: the table of what is there

Each cell of the file is a `dpipe launch` on this machine with overrides of its own, one for each of
the file's seeds; a line of JSON for each is appended to the results. A difference is the mean over
the seeds, each held against the first cell with the same seed. Ends with 1 where a run failed or a
loss lies outside the cell's bound.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import click
from pydantic import BaseModel, ConfigDict, Field
from table import ROOT
from trials import append, commit_of_tree, key_of, read_table, run_to_end, whole_lines
from venue import ThisMachine

from dpipe.config.load import Config, load
from dpipe.errors import DpipeError


class Cell(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    overrides: tuple[str, ...] = ()
    within_percent: float | None = Field(
        default=None, gt=0
    )  # of the first cell's final held-out loss


class Convergence(BaseModel):
    """A file of cells; `overrides` are for all of them. Paths are relative to the repository."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()  # none: that of the configuration
    cell: tuple[Cell, ...] = Field(min_length=2)
    timeout_s: float = Field(default=3600.0, gt=0)  # a run


Losses = dict[str, dict[int | None, float]]  # by cell, of the seeds that were trained


def all_overrides(plan: Convergence, cell: Cell, seed: int | None) -> tuple[str, ...]:
    of_seed = () if seed is None else (f"train.seed={seed}",)
    return (*plan.overrides, *cell.overrides, *of_seed)


def configuration(
    plan: Convergence, cell: Cell, seed: int | None, folder: Path
) -> tuple[Config, tuple[str, ...]]:
    of_folder = f"run.folder={json.dumps(str(folder))}"
    overrides = (*all_overrides(plan, cell, seed), of_folder)
    return load(ROOT / plan.config, overrides), overrides


def train(plan: Convergence, cell: Cell, seed: int | None, folder: Path) -> dict[str, Any]:
    """The line of a cell. Raises `RunError` where its run fails."""
    config, overrides = configuration(plan, cell, seed, folder)
    rows = run_to_end(ROOT / plan.config, overrides, ThisMachine(), timeout_s=plan.timeout_s)
    held_out = {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}
    return {
        "name": cell.name,
        "overrides": list(all_overrides(plan, cell, seed)),
        "steps": config.train.steps,
        "held_out_loss": held_out,
        "final_held_out_loss": held_out[config.train.steps],
        "commit": commit_of_tree(),
        "key": key_of(config),
    }


def runs_of(plan: Convergence) -> Iterator[tuple[Cell, int | None]]:
    """Seed by seed, so that what is interrupted has compared all cells with some."""
    for seed in plan.seeds or (None,):
        for cell in plan.cell:
            yield cell, seed


def losses_kept(plan: Convergence, results: Path, folder: Path) -> Losses:
    """The final losses that `results` has."""
    lines = {line["key"]: line for line in whole_lines(results)}
    losses: Losses = {cell.name: {} for cell in plan.cell}
    for cell, seed in runs_of(plan):
        key = key_of(configuration(plan, cell, seed, folder)[0])
        if key in lines:
            losses[cell.name][seed] = lines[key]["final_held_out_loss"]
    return losses


def train_missing(plan: Convergence, results: Path, folder: Path) -> None:
    """Append a line for each cell and seed that `results` lacks."""
    losses = losses_kept(plan, results, folder)
    for cell, seed in runs_of(plan):
        if seed not in losses[cell.name]:
            click.echo(f"{cell.name} ... ", nl=False, err=True)
            line = train(plan, cell, seed, folder)
            append(results, line)
            click.echo(f"{line['final_held_out_loss']:.4f}", err=True)


def excesses(plan: Convergence, losses: Losses, cell: Cell) -> list[float]:
    """How far a cell's losses are from the first cell's, in percent, by seed."""
    first = losses[plan.cell[0].name]
    pairs = [(loss, first[seed]) for seed, loss in losses[cell.name].items() if seed in first]
    return [(loss / of_first - 1) * 100 for loss, of_first in pairs]


def is_close(plan: Convergence, losses: Losses, cell: Cell) -> bool:
    found = excesses(plan, losses, cell)
    if cell.within_percent is None or not found:
        return True
    return abs(mean(found)) <= cell.within_percent


def as_markdown(plan: Convergence, losses: Losses) -> str:
    titles = ["trained with", "final held-out loss, nats", "difference", "bound"]
    if plan.seeds:
        titles.insert(3, "by seed")
    rows: list[Sequence[str]] = [titles, ["---"] * len(titles)]
    for cell in plan.cell:
        found = excesses(plan, losses, cell)
        if not found:
            continue  # not trained yet
        bound = "" if cell.within_percent is None else f"{cell.within_percent:g} %"
        missed = "" if is_close(plan, losses, cell) else " MISSED"
        mean_loss = mean(losses[cell.name].values())
        row = [cell.name, f"{mean_loss:.4f}", f"{mean(found):+.2f} %"]
        if plan.seeds:
            row.append(", ".join(f"{each:+.2f}" for each in found))
        rows.append([*row, bound + missed])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@click.command(help=__doc__)
@click.argument(
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=ROOT / "scripts/sweeps/convergence.toml",
)
@click.option(
    "--results", type=Path, help="The file to append to; default scripts/results/NAME.jsonl."
)
@click.option("--kept", is_flag=True, help="Train nothing; print what the results hold.")
def main(file: Path, results: Path | None, kept: bool) -> None:
    try:
        plan = read_table(Convergence, file)
        results_path = results or ROOT / f"scripts/results/{plan.name}.jsonl"
        folder = ROOT / "runs/sweeps" / plan.name
        if not kept:
            train_missing(plan, results_path, folder)
        losses = losses_kept(plan, results_path, folder)
    except DpipeError as error:
        click.echo(f"convergence: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(as_markdown(plan, losses))
    sys.exit(0 if all(is_close(plan, losses, cell) for cell in plan.cell) else 1)


if __name__ == "__main__":
    main()
