#!/usr/bin/env python3
"""Where to put the stages of a pipeline, by a published objective or by dpipe's own.

    scripts/placement.py --delay D.csv --bandwidth B.csv --stages 8 --replicas 8
        --gradient-gb 0.65 --activation-gb 0.47 --seconds 3 --json

The matrices are square, by sending and receiving machine: milliseconds and Gbit/s, a line a row,
without a header. Objective "dtfm" is that of DT-FM (NeurIPS 2022): see scripts/dtfm.py.

    scripts/placement.py --objective step > scripts/results/placement.jsonl

Objective "step" takes the cases of scripts/placement_cases.py: the planner's search beside other
ways to place them, one JSON line a case.

    scripts/placement.py --objective plan --machines build/fleets

Objective "plan" decides everything for 64, 128 and 512 machines: one JSON line each, with the
processor time that it takes. With --machines each is also written as a file, which `dpipe plan`
takes.
"""

import json
import sys
from pathlib import Path
from typing import Any

import click
import dtfm
import numpy as np
import placement_cases

from dpipe.errors import ConfigError, DpipeError
from dpipe.machines.file import save_machines

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SIZE = click.IntRange(min=1, max=4096)
_GIGABYTES = click.FloatRange(min=0, max=1e6)


@click.command(help=__doc__)
@click.option(
    "--objective", type=click.Choice(["dtfm", "step", "plan"]), default="dtfm", show_default=True
)
@click.option("--delay", "delay_file", type=_FILE, help="ms, one way")
@click.option("--bandwidth", "bandwidth_file", type=_FILE, help="Gbit/s")
@click.option("--stages", type=_SIZE)
@click.option("--replicas", type=_SIZE)
@click.option("--gradient-gb", type=_GIGABYTES, help="a stage's gradients")
@click.option("--activation-gb", type=_GIGABYTES, help="one hop's, of a step")
@click.option("--seconds", type=click.FloatRange(min=0.1, max=86400), default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--machines",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="with objective plan: keep the machines as files here",
)
@click.option("--json", "as_json", is_flag=True, help="one line of JSON")
def main(
    objective: str,
    delay_file: Path | None,
    bandwidth_file: Path | None,
    seconds: float,
    seed: int,
    as_json: bool,
    folder: Path | None,
    **sizes: Any,
) -> None:
    if objective == "step":
        for case in placement_cases.CASES:
            row = placement_cases.row_of(case, seconds)
            print(json.dumps(placement_cases.as_dict(row)), flush=True)
        return
    if objective == "plan":
        for fleet in placement_cases.FLEETS:
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                machines = placement_cases.cluster_of(fleet)
                save_machines(machines, folder / f"machines-{fleet.count}.toml")
            planned = placement_cases.fleet_row(fleet)
            print(json.dumps(placement_cases.as_dict(planned)), flush=True)
        return
    if delay_file is None or bandwidth_file is None or None in sizes.values():
        raise click.UsageError(
            "Objective dtfm takes --delay, --bandwidth, --stages, --replicas, --gradient-gb and "
            "--activation-gb."
        )
    try:
        problem = dtfm.Problem(_matrix(delay_file), _matrix(bandwidth_file), **sizes)
        placement = dtfm.search(problem, seconds, seed)
    except DpipeError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    if as_json:
        print(json.dumps({"cost": placement.cost_s, "stages": placement.stages}))
        return
    print(f"cost {placement.cost_s:.3f} s ({objective})")
    for number, machines in enumerate(placement.stages):
        print(f"stage {number}: machines {' '.join(map(str, machines))}")


def _matrix(path: Path) -> dtfm.Matrix:
    """The numbers of a CSV file. Raises `ConfigError` naming the file."""
    rows = path.read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        return np.array([[float(value) for value in row.split(",")] for row in rows if row.strip()])
    except ValueError as error:
        raise ConfigError(f"{path} is not a matrix of numbers with commas: {error}") from None


if __name__ == "__main__":
    main()
