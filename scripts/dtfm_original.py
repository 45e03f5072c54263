#!/usr/bin/env python3
"""The search of scripts/dtfm.py beside DT-FM's own solver, which is run as it was published.

    scripts/dtfm_original.py --solver DT-FM/scheduler/heuristic_evolutionary_solver

The folder is that of a checkout of https://github.com/DS3Lab/DT-FM (MIT; here at commit 69f05e5):
none of its code is in this repository. One JSON line a case, of 64 machines in AWS regions: what
its genetic search finds (population 100 as its own main program has it, and 14,900 offspring where
that has 4,900, so that it takes more than the 320 seconds of the paper), and what dtfm.py finds in
three seconds. Both are priced by its cost function and by `dtfm.cost_s`,
which must agree.
"""

import importlib
import itertools
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import aws_profiles
import click
import dtfm
import numpy as np
import placement_cases

_FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
_POPULATION = 100
_OFFSPRING = 14_900
_STAGES = 8  # the solver's own constants
_REPLICAS = 8
_GRADIENT_GB = 0.65
_ACTIVATION_GB = 0.47
CASES = {
    "four regions": ("Oregon", "Ohio", "Virginia", "Ireland"),
    "eight regions": placement_cases.WORLD,
}


@dataclass(frozen=True)
class Row:
    case: str
    seed: int
    found_s: float  # the cost of dtfm.search's placement
    found_within_s: float  # how long it had
    original_s: float  # the cost of the solver's placement
    original_took_s: float
    candidates: int  # that the solver priced


@click.command(help=__doc__)
@click.option("--solver", type=_FOLDER, required=True)
@click.option("--case", "names", type=click.Choice(list(CASES)), multiple=True, help="default: all")
@click.option("--seconds", type=click.FloatRange(min=0.1), default=3, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--offspring", type=click.IntRange(min=1), default=_OFFSPRING, show_default=True)
def main(solver: Path, names: tuple[str, ...], seconds: float, seed: int, offspring: int) -> None:
    original = load_solver(solver)
    for name in names or CASES:
        problem = problem_of(CASES[name])
        row = compared(original, name, problem, seconds, seed, offspring)
        print(json.dumps(rounded(row)), flush=True)


def load_solver(folder: Path) -> ModuleType:
    """Its module `scheduler`, with the sizes of `problem_of`. Both of its files have names that
    are looked up on the path.
    """
    if not (folder / "scheduler.py").is_file():
        raise click.UsageError(f"{folder} has no scheduler.py: give the solver's own folder")
    sys.path.insert(0, str(folder))
    try:
        original = importlib.import_module("scheduler")
    finally:
        sys.path.remove(str(folder))
    original.config.send_gradient_size = _GRADIENT_GB
    original.config.send_activation_size = _ACTIVATION_GB
    return original


def problem_of(regions: Sequence[str]) -> dtfm.Problem:
    """64 machines, dealt out over `regions` in turn."""
    count = _STAGES * _REPLICAS
    between = aws_profiles.published()
    delay_ms = np.zeros((count, count))
    bandwidth_gbps = np.ones((count, count))
    for here, there in itertools.permutations(range(count), 2):
        ends = frozenset((regions[here % len(regions)], regions[there % len(regions)]))
        link = between[ends] if len(ends) == 2 else aws_profiles.WITHIN_A_REGION
        delay_ms[here, there], bandwidth_gbps[here, there] = link
    return dtfm.Problem(delay_ms, bandwidth_gbps, _STAGES, _REPLICAS, _GRADIENT_GB, _ACTIVATION_GB)


def compared(
    original: ModuleType,
    name: str,
    problem: dtfm.Problem,
    seconds: float,
    seed: int,
    offspring: int,
) -> Row:
    found = dtfm.search(problem, seconds, seed)
    original.peer_delay = problem.delay_ms
    original.peer_bandwidth = problem.bandwidth_gbps
    check_costs_agree(original, found)
    # It means to set seeds, but overwrites the functions that would.
    random_seed, numpy_seed = random.seed, np.random.seed
    random_seed(seed)
    numpy_seed(seed)
    began_s = time.monotonic()
    try:
        machines = list(range(len(problem.delay_ms)))
        partitions, costs, _ = original.GCMA(machines, _POPULATION, offspring)
    finally:
        random.seed, np.random.seed = random_seed, numpy_seed
    took_s = time.monotonic() - began_s
    best = partitions[int(np.argmin(costs))]
    groups = [best[first : first + _REPLICAS] for first in range(0, len(best), _REPLICAS)]
    return Row(
        case=name,
        seed=seed,
        found_s=found.cost_s,
        found_within_s=seconds,
        original_s=dtfm.cost_s(problem, groups),
        original_took_s=took_s,
        candidates=len(costs),
    )


def check_costs_agree(original: ModuleType, found: dtfm.Placement) -> None:
    """Raises `click.ClickException` where the solver's own function prices it otherwise."""
    groups = [list(stage) for stage in found.stages]
    exchange_s = original.compute_data_parallel_cost(groups)
    path_s = original.compute_pipeline_parallel_cost(groups)[0]
    theirs_s = exchange_s + 2 * path_s
    if abs(theirs_s - found.cost_s) > 1e-6 * theirs_s:
        raise click.ClickException(
            f"dtfm.py says {found.cost_s} s, DT-FM's own function {theirs_s} s"
        )


def rounded(row: Row) -> dict[str, object]:
    """Four digits."""
    values: dict[str, object] = {}
    for key, value in asdict(row).items():
        values[key] = float(f"{value:.4g}") if isinstance(value, float) else value
    return values


def as_table(rows: Sequence[Mapping[str, object]]) -> str:
    """Markdown, of kept rows."""
    lines = [
        "| 64 machines in | dpipe's, in 3 s | DT-FM's own | candidates | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        costs = f"{row['found_s']} | {row['original_s']}"
        effort = f"{row['candidates']:,} | {row['original_took_s']:,.0f}"
        lines.append(f"| {row['case']} | {costs} | {effort} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
