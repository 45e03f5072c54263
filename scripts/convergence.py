#!/usr/bin/env python3
"""Trains one model in several ways and holds the final held-out losses against the first one's.

    scripts/convergence.py                              runs what is missing, then prints the table
    scripts/convergence.py scripts/sweeps/convergence.toml    the same

Each cell of the file is a `dpipe launch` on this machine with overrides of its own; a line of JSON
for each is appended to the results. Ends with 1 where a run failed or a loss lies outside the
cell's bound.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
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
    cell: tuple[Cell, ...] = Field(min_length=2)
    timeout_s: float = Field(default=3600.0, gt=0)  # a run


def configuration(plan: Convergence, cell: Cell, folder: Path) -> tuple[Config, tuple[str, ...]]:
    overrides = (*plan.overrides, *cell.overrides, f"run.folder={json.dumps(str(folder))}")
    return load(ROOT / plan.config, overrides), overrides


def train(plan: Convergence, cell: Cell, folder: Path) -> dict[str, Any]:
    """The line of a cell. Raises `RunError` where its run fails."""
    config, overrides = configuration(plan, cell, folder)
    rows = run_to_end(ROOT / plan.config, overrides, ThisMachine(), timeout_s=plan.timeout_s)
    held_out = {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}
    return {
        "name": cell.name,
        "overrides": [*plan.overrides, *cell.overrides],
        "steps": config.train.steps,
        "held_out_loss": held_out,
        "final_held_out_loss": held_out[config.train.steps],
        "commit": commit_of_tree(),
        "key": key_of(config),
    }


def train_missing(plan: Convergence, results: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The lines of all cells by name, after training those that `results` lacks."""
    lines = {line["key"]: line for line in whole_lines(results)}
    by_name: dict[str, dict[str, Any]] = {}
    for cell in plan.cell:
        key = key_of(configuration(plan, cell, folder)[0])
        if key not in lines:
            click.echo(f"{cell.name} ... ", nl=False, err=True)
            lines[key] = train(plan, cell, folder)
            append(results, lines[key])
            click.echo(f"{lines[key]['final_held_out_loss']:.4f}", err=True)
        by_name[cell.name] = lines[key]
    return by_name


def excess(plan: Convergence, losses: dict[str, float], cell: Cell) -> float:
    """How far a cell's loss is from the first cell's, in percent."""
    return (losses[cell.name] / losses[plan.cell[0].name] - 1) * 100


def is_close(plan: Convergence, losses: dict[str, float], cell: Cell) -> bool:
    return cell.within_percent is None or abs(excess(plan, losses, cell)) <= cell.within_percent


def as_markdown(plan: Convergence, losses: dict[str, float]) -> str:
    rows: list[Sequence[str]] = [
        ("trained with", "final held-out loss, nats", "difference", "bound"),
        ("---",) * 4,
    ]
    for cell in plan.cell:
        bound = "" if cell.within_percent is None else f"{cell.within_percent:g} %"
        missed = "" if is_close(plan, losses, cell) else " MISSED"
        rows.append(
            (
                cell.name,
                f"{losses[cell.name]:.4f}",
                f"{excess(plan, losses, cell):+.2f} %",
                bound + missed,
            )
        )
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
        lines = train_missing(plan, results_path, ROOT / "runs/sweeps" / plan.name)
    except DpipeError as error:
        click.echo(f"convergence: {error}", err=True)
        sys.exit(error.exit_code)
    losses = {name: line["final_held_out_loss"] for name, line in lines.items()}
    click.echo(as_markdown(plan, losses))
    sys.exit(0 if all(is_close(plan, losses, cell) for cell in plan.cell) else 1)


if __name__ == "__main__":
    main()
