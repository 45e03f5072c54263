#!/usr/bin/env python3
"""Runs a bench several times and keeps what it printed, for a table of docs/results.md.

    scripts/benches.py engine --runs 2       writes scripts/results/bench/engine.json

A figure that is measured is kept as a list, one value a run. What a run is of (a schedule, a
transport) is the same in all of them. `tests/docs/test_bench_results.py` holds the page to the
files. Nothing else should run on the machine.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
NAMES = ("engine", "transport", "pipelining", "mfu")
_TIMEOUT_S = 1800.0

Row = dict[str, Any]


def merged(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for each of a run's, with all runs' values where they are measured."""
    return [_merged_row(rows) for rows in zip(*runs, strict=True)]


def _merged_row(rows: Sequence[Row]) -> Row:
    first = rows[0]
    merged_row: Row = {}
    for key, value in first.items():
        if isinstance(value, float):
            merged_row[key] = [row[key] for row in rows]
        elif all(row[key] == value for row in rows):
            merged_row[key] = value
    return merged_row


def as_json(rows: Sequence[Row], num_runs: int) -> str:
    """A line for each row, so that a difference can be read."""
    head = {"date": date.today().isoformat(), "kept": f"all of {num_runs} runs"}
    lines = ",\n    ".join(json.dumps(row) for row in rows)
    opening = json.dumps(head, indent=2).removesuffix("\n}")
    return f'{opening},\n  "rows": [\n    {lines}\n  ]\n}}\n'


def measure(name: str) -> list[Row]:
    argv = [sys.executable, "-m", "dpipe", "bench", name, "--json"]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=True, timeout=_TIMEOUT_S)
    rows: list[Row] = json.loads(done.stdout)
    return rows


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(NAMES))
@click.option("--runs", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--results",
    type=click.Path(file_okay=False, path_type=Path),
    default=ROOT / "scripts/results/bench",
    show_default=True,
)
def main(name: str, runs: int, results: Path) -> None:
    measured = [measure(name) for _ in range(runs)]
    text = as_json(merged(measured), runs)
    results.mkdir(parents=True, exist_ok=True)
    path = results / f"{name}.json"
    path.write_text(text, encoding="utf-8")
    click.echo(text)


if __name__ == "__main__":
    main()
