#!/usr/bin/env python3
"""What today's simulator predicts for runs that scripts/sweep.py has measured, beside what was
predicted on the day of each.

    scripts/today.py scripts/sweeps/gpt3xl_replicas.toml scripts/sweeps/gpt3xl_overlap.toml

Prints a line of JSON for each measured run, and keeps them with --out FILE. A run with the schedule
"auto" is predicted with the order that it had, which its result line keeps, not with the one that
would be found today.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from sweep import Cell, Sweep, cells
from table import NUM_STAGES, ROOT, lines_of, schedule_in
from trials import read_table

from dpipe.config.load import Config
from dpipe.errors import ConfigError, DpipeError
from dpipe.plan.forecast import ScheduleChoice, choose_schedule, forecast

OUT = ROOT / "scripts/results/sim/today.jsonl"

_Run = tuple[str, str, str, str, int]  # network, system, schedule, wire, tensor-parallel size


def today(path: Path, results: Path | None = None) -> Iterator[dict[str, Any]]:
    """A row for each line of the results of a sweep file, by default those that scripts/sweep.py
    wrote. Raises `ConfigError` for a line of a run that the sweep no longer has.
    """
    sweep = read_table(Sweep, path)
    with TemporaryDirectory() as folder:
        by_run = {_run_of(cell): cell for cell in cells(sweep, Path(folder))}
        for line in lines_of(results or ROOT / f"scripts/results/{sweep.name}.jsonl"):
            run = _measured(line)
            if run not in by_run:
                said = ", ".join(map(str, run))
                raise ConfigError(f"{path} has no run {said}, which its results hold")
            yield _row(sweep.name, line, by_run[run].config)


def _run_of(cell: Cell) -> _Run:
    stages = cell.config.pipeline.stages
    schedule = cell.schedule
    if stages != NUM_STAGES:
        schedule += f", {stages} stages"
    size = cell.config.tensor_parallel.size
    return cell.network.name, cell.system, schedule, cell.wire, size


def _measured(line: Mapping[str, Any]) -> _Run:
    network = line["network"]["name"]
    return network, line["engine"], line["schedule"], line["wire"], line["tensor_parallel"]


def _row(name: str, line: Mapping[str, Any], config: Config) -> dict[str, Any]:
    # The oldest lines have no clip_norm: nothing was clipped, so no rank waited for a vote.
    config = config.with_(train__clip_norm=line.get("clip_norm", 0))
    predicted = forecast(config, choose=_choice(line))
    network, system, schedule, wire, size = _measured(line)
    return {
        "sweep": name,
        "network": network,
        "system": system,
        "schedule": schedule,
        "wire": wire,
        "tensor_parallel": size,
        "predicted_that_day_s": line["predicted_s"],
        "predicted_today_s": round(predicted.step_us / 1e6, 3),
        "measured_s": line["measured_s"],
    }


def _choice(line: Mapping[str, Any]) -> ScheduleChoice:
    order = line.get("order")
    if not order:
        return choose_schedule
    return lambda *_: schedule_in(order)


@click.command(help=__doc__)
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write the lines into this file: scripts/results/sim/today.jsonl.",
)
def main(files: Sequence[Path], out: Path | None) -> None:
    lines = []
    try:
        for path in files:
            for row in today(path):
                lines.append(json.dumps(row))
                click.echo(lines[-1])
    except DpipeError as error:
        click.echo(f"today: {error}", err=True)
        sys.exit(error.exit_code)
    if out is not None:
        out.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
