#!/usr/bin/env python3
"""Trains one model in several ways and holds the final held-out losses against the first one's.

    scripts/convergence.py                              runs what is missing, then prints the table
    scripts/convergence.py scripts/sweeps/convergence.toml    the same

Each cell of the file is a `dpipe launch` on this machine with overrides of its own, one for each of
the file's seeds; a line of JSON for each is appended to the results. A difference is the mean over
the seeds, each held against the first cell with the same seed. Ends with 1 where a run failed or a
loss lies outside the cell's bound.
"""

import json
import sys
from collections.abc import Sequence
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


Losses = dict[str, list[float]]  # by cell, one a seed


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


def train_missing(plan: Convergence, results: Path, folder: Path) -> Losses:
    """The final losses of all cells, after training those that `results` lacks."""
    lines = {line["key"]: line for line in whole_lines(results)}
    losses: Losses = {cell.name: [] for cell in plan.cell}
    # Seed by seed, so that what is interrupted has compared all cells with some.
    for seed in plan.seeds or (None,):
        for cell in plan.cell:
            key = key_of(configuration(plan, cell, seed, folder)[0])
            if key not in lines:
                click.echo(f"{cell.name} ... ", nl=False, err=True)
                lines[key] = train(plan, cell, seed, folder)
                append(results, lines[key])
                click.echo(f"{lines[key]['final_held_out_loss']:.4f}", err=True)
            losses[cell.name].append(lines[key]["final_held_out_loss"])
    return losses


def excesses(plan: Convergence, losses: Losses, cell: Cell) -> list[float]:
    """How far a cell's losses are from the first cell's, in percent, by seed."""
    pairs = zip(losses[cell.name], losses[plan.cell[0].name], strict=True)
    return [(loss / first - 1) * 100 for loss, first in pairs]


def is_close(plan: Convergence, losses: Losses, cell: Cell) -> bool:
    if cell.within_percent is None:
        return True
    return abs(mean(excesses(plan, losses, cell))) <= cell.within_percent


def as_markdown(plan: Convergence, losses: Losses) -> str:
    titles = ["trained with", "final held-out loss, nats", "difference", "bound"]
    if plan.seeds:
        titles.insert(3, "by seed")
    rows: list[Sequence[str]] = [titles, ["---"] * len(titles)]
    for cell in plan.cell:
        bound = "" if cell.within_percent is None else f"{cell.within_percent:g} %"
        missed = "" if is_close(plan, losses, cell) else " MISSED"
        found = excesses(plan, losses, cell)
        row = [cell.name, f"{mean(losses[cell.name]):.4f}", f"{mean(found):+.2f} %"]
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
def main(file: Path, results: Path | None) -> None:
    try:
        plan = read_table(Convergence, file)
        results_path = results or ROOT / f"scripts/results/{plan.name}.jsonl"
        losses = train_missing(plan, results_path, ROOT / "runs/sweeps" / plan.name)
    except DpipeError as error:
        click.echo(f"convergence: {error}", err=True)
        sys.exit(error.exit_code)
    click.echo(as_markdown(plan, losses))
    sys.exit(0 if all(is_close(plan, losses, cell) for cell in plan.cell) else 1)


if __name__ == "__main__":
    main()
