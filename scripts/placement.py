#!/usr/bin/env python3
"""Where to put the stages of a pipeline, by published objectives.

    scripts/placement.py --delay D.csv --bandwidth B.csv --stages 8 --replicas 8
        --gradient-gb 0.65 --activation-gb 0.47 --seconds 3 --json

The matrices are square, by sending and receiving machine: milliseconds and Gbit/s, a line a row,
without a header. Objective "dtfm" is that of DT-FM (NeurIPS 2022): see scripts/dtfm.py.
"""

import json
import sys
from pathlib import Path

import click
import dtfm
import numpy as np

from dpipe.errors import ConfigError, DpipeError

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_SIZE = click.IntRange(min=1, max=4096)
_GIGABYTES = click.FloatRange(min=0, max=1e6)


@click.command(help=__doc__)
@click.option("--objective", type=click.Choice(["dtfm"]), default="dtfm", show_default=True)
@click.option("--delay", "delay_file", type=_FILE, required=True, help="ms, one way")
@click.option("--bandwidth", "bandwidth_file", type=_FILE, required=True, help="Gbit/s")
@click.option("--stages", type=_SIZE, required=True)
@click.option("--replicas", type=_SIZE, required=True)
@click.option("--gradient-gb", type=_GIGABYTES, required=True, help="a stage's gradients")
@click.option("--activation-gb", type=_GIGABYTES, required=True, help="one hop's, of a step")
@click.option("--seconds", type=click.FloatRange(min=0.1, max=86400), default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--json", "as_json", is_flag=True, help="one line of JSON")
def main(
    objective: str,
    delay_file: Path,
    bandwidth_file: Path,
    stages: int,
    replicas: int,
    gradient_gb: float,
    activation_gb: float,
    seconds: float,
    seed: int,
    as_json: bool,
) -> None:
    try:
        problem = dtfm.Problem(
            _matrix(delay_file),
            _matrix(bandwidth_file),
            stages=stages,
            replicas=replicas,
            gradient_gb=gradient_gb,
            activation_gb=activation_gb,
        )
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
