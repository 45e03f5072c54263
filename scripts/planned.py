#!/usr/bin/env python3
"""A plan's step beside that of an even cut, predicted and measured, on machines that are not alike.

    scripts/planned.py lab      six hosts of three speeds in a `netem lab` (root), replayed
    scripts/planned.py cores    a GPT, trained by four processes of which two have less of a core
    scripts/planned.py table    what has been measured, as a table

The even cut has all machines in the order of their file, equal stages as dpipe makes them where
nobody says that machines differ, and the same search for a schedule. Both are predicted from one
file of machines; both run one after the other. A line of JSON for each run is appended to the
results.
"""

import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from itertools import permutations
from pathlib import Path
from statistics import median
from typing import Any

import click
import core_shares
from sweep import as_profile, scaled
from table import ROOT
from trials import append, commit_of_tree, run_to_end, whole_lines
from venue import InLab, Venue, lab_up

from dpipe.config.load import Config, load
from dpipe.errors import DpipeError, RunError
from dpipe.machines.file import load_machines, save_machines
from dpipe.machines.machine import Cluster, Machine, Pair
from dpipe.machines.seats import network_of
from dpipe.network.link import Link, Network
from dpipe.network.profile import load_network
from dpipe.placement.choices import choices_of
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.plan.costs import transformer_costs
from dpipe.plan.forecast import Forecast, forecast
from dpipe.plan.on_machines import layers_on
from dpipe.planner.decide import decide
from dpipe.planner.fits import planned
from dpipe.planner.plan_file import dump_plan
from dpipe.processes.launch import free_port
from dpipe.schedule.action import COMPUTE
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.text import to_csv
from dpipe.toml import to_toml

RESULTS = ROOT / "scripts/results/planned.jsonl"
WORK = ROOT / "build/planned"
PLAN = "plan"
EVEN = "even cut"

# Six machines of the profile, every other one, so that each of its sites has some.
NODES = (0, 2, 4, 6, 8, 10)
PROFILES = ("two-sites", "regional", "worldwide")
SPEEDS = (1.0, 0.5, 0.25)  # of machines in turn
_GFLOPS = 15_000.0
# Of messages and bandwidths alike, so that a step takes as long as at full size.
_SCALE = 32
_LAB_STEPS = 4
_TCP = (
    "net.ipv4.tcp_congestion_control=reno",
    "net.ipv4.tcp_slow_start_after_idle=0",
    "net.ipv4.tcp_timestamps=0",
)
_RUN_S = 900.0


@dataclass(frozen=True)
class Side:
    """One of the two that are compared: a configuration and the machine of each rank."""

    name: str
    config: Config
    overrides: tuple[str, ...]
    seats: tuple[str, ...]
    forecast: Forecast

    @property
    def step_s(self) -> float:
        return self.forecast.step_us / 1e6


@dataclass(frozen=True)
class Row:
    """One run. Seconds of a step."""

    case: str
    side: str
    machines: tuple[str, ...]  # by rank
    layers: tuple[int, ...]  # by stage
    predicted_s: float
    measured_s: float
    # All machines computing all the time, at their speeds: no cut, order or network is below it.
    bound_s: float


def sides(job: Path, machines: Path, folder: Path) -> list[Side]:
    """The plan of `job` on `machines`, and the even cut with as many micro-batches."""
    cluster = load_machines(machines)
    here = (f"predict.machines={to_toml(str(machines))}",)
    config = load(job)
    problem = PlanProblem(config, cluster, choices_of(config, ("none",)))
    plan = decide(problem, Objective()).plan
    plan_path = folder / "plan.toml"
    plan_path.write_text(dump_plan(plan), encoding="utf-8")
    of_plan = planned(job, here, plan_path)
    stages = len(cluster.machines)
    number = plan.settings["train"]["num_microbatches"]
    stated = (f"pipeline.stages={stages}", f"train.num_microbatches={number}")
    open_keys = ('pipeline.schedule="auto"', *stated)
    alike = forecast(load(job, open_keys))
    even = (*here, *open_keys, f"pipeline.split={to_toml(list(alike.split))}")
    return [
        _side(PLAN, job, of_plan, plan.seats),
        _side(EVEN, job, even, cluster.names),
    ]


def _side(name: str, job: Path, overrides: tuple[str, ...], seats: Sequence[str]) -> Side:
    config = load(job, overrides)
    return Side(name, config, overrides, tuple(seats), forecast(config))


def bound_s(config: Config, cluster: Cluster) -> float:
    """All layers of all micro-batches, shared out over machines that never wait."""
    layers = transformer_costs(config)
    speeds = []
    for machine in cluster.machines:
        own = layers_on(config, layers, machine)
        speeds.append(1 / (sum(own.forward_s) + sum(own.backward_s)))
    passes = config.train.num_microbatches * config.data_parallel.replicas
    return passes / sum(speeds)


# In the lab


LAB_JOB = """\
[model]
num_layers = 24
width = 2048
num_heads = 16
context = 2048
vocab_size = 50304

[train]
batch_size = 16

[pipeline]
recompute = "none"

[data_parallel]
replicas = 1  # a replayed stage takes as long in every replica

[transport]
kind = "tcp"
connections = 1  # at 1/32 of the rate one window is enough
"""


def lab_cluster(profile: str) -> Cluster:
    """Machines `NODES` of a profile of `netem/profiles`, at three speeds in turn."""
    network = load_network(ROOT / f"netem/profiles/{profile}.toml")
    names = [f"host{node}" for node in range(len(NODES))]
    machines = []
    for number, name in enumerate(names):
        speed = SPEEDS[number % len(SPEEDS)]
        machines.append(Machine(name, gflops=_GFLOPS * speed))
    links: dict[Pair, Link] = {}
    for here, there in permutations(range(len(NODES)), 2):
        links[names[here], names[there]] = network.link(NODES[here], NODES[there])
    return Cluster(tuple(machines), links, name=profile)


def replayed(side: Side, profile: Path, folder: Path) -> tuple[str, ...]:
    """The side as waits and messages, in the order that was simulated; `profile` is written."""
    cost = side.forecast.cost
    if side.forecast.costs:
        (cost,) = side.forecast.costs
    network = network_of(load_machines(side.config.predict.machines or ""), side.seats)
    profile.write_text(_profile(network), encoding="utf-8")
    order = _order(side.forecast.schedule)
    return (
        'model.layers="replay"',
        f"replay.forward_ms={_ms(cost.forward_us)}",
        f"replay.backward_ms={_ms(cost.backward_us)}",
        f"replay.message_bytes={cost.activation_bytes[0] // _SCALE}",
        f"train.batch_size={side.config.train.num_microbatches}",
        f"train.num_microbatches={side.config.train.num_microbatches}",
        f"train.steps={_LAB_STEPS}",
        f"pipeline.stages={len(side.seats)}",
        'pipeline.schedule="auto"',
        f"pipeline.programs={to_toml(list(order))}",
        'transport.kind="tcp"',
        "transport.connections=1",
        f"predict.network={to_toml(str(profile))}",
        f"run.folder={to_toml(str(folder / 'run'))}",
        "run.tensorboard=false",
        "run.trace_steps=1",
        'node.bind="0.0.0.0"',
        "timeouts.join=600",
    )


def _order(schedule: Schedule) -> tuple[str, ...]:
    """Of computations alone, as `pipeline.programs` has it."""
    programs = []
    for program in schedule.programs:
        programs.append(tuple(action for action in program if action.op in COMPUTE))
    order = replace(schedule, programs=tuple(programs), lowered=False)
    return tuple(to_csv(order).split())


def _profile(network: Network) -> str:
    """Of interfaces, whose rates count packet headers; those of machines are what messages get."""
    return as_profile(scaled(network.for_interfaces(), _SCALE, windows=False))


def _ms(times_us: Sequence[float]) -> str:
    return json.dumps([us / 1e3 for us in times_us])


@dataclass(frozen=True)
class Seated(InLab):
    """Ranks on hosts of a lab, not in their order."""

    places: tuple[int, ...] = ()

    @property
    def coordinator(self) -> str | None:
        return f"{self.lab.addresses[self.places[0]]}:7000"

    def enter(self, rank: int, argv: Sequence[str]) -> list[str]:
        return super().enter(self.places[rank], argv)


def in_lab(profiles: Sequence[str], times: int) -> Iterator[Row]:
    folder = WORK / "lab"
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.toml"
    job.write_text(LAB_JOB, encoding="utf-8")
    with lab_up("planned", len(NODES), _TCP) as venue:
        for profile in profiles:
            machines = folder / f"machines-{profile}.toml"
            save_machines(lab_cluster(profile), machines)
            pair = sides(job, machines, folder)
            yield from compared(pair, times, partial(_measured_in_lab, venue, folder))


def _measured_in_lab(venue: InLab, folder: Path, side: Side) -> float:
    cluster = load_machines(side.config.predict.machines or "")
    of_hosts = folder / "hosts.toml"
    of_hosts.write_text(_profile(network_of(cluster, cluster.names)), encoding="utf-8")
    venue.become(of_hosts)
    overrides = replayed(side, folder / "ranks.toml", folder)
    places = tuple(cluster.names.index(name) for name in side.seats)
    empty = folder / "replay.toml"
    empty.write_text("", encoding="utf-8")
    return _seconds(empty, overrides, Seated(venue.lab, places))


def _seconds(job: Path, overrides: tuple[str, ...], venue: Venue, warm: int = 1) -> float:
    """Of the median step, without the first `warm`."""
    rows = run_to_end(job, overrides, venue, timeout_s=_RUN_S)
    seconds = [row["step_s"] for row in rows if "step_s" in row]
    return median(seconds[warm:])


def compared(pair: Sequence[Side], times: int, measure: Callable[[Side], float]) -> Iterator[Row]:
    """Each side in turn, so many times."""
    for _ in range(times):
        for side in pair:
            cluster = load_machines(side.config.predict.machines or "")
            row = Row(
                case=cluster.name,
                side=side.name,
                machines=side.seats,
                layers=side.forecast.split,
                predicted_s=side.step_s,
                measured_s=measure(side),
                bound_s=bound_s(side.config, cluster),
            )
            click.echo(said(row), err=True)
            yield row


def said(row: Row) -> str:
    off = row.measured_s / row.predicted_s - 1
    return (
        f"{row.case}, {row.side}: {row.measured_s:.3f} s measured, {row.predicted_s:.3f} s "
        f"predicted ({off:+.1%}), bound {row.bound_s:.3f} s; layers "
        f"{' '.join(map(str, row.layers))} on {' '.join(row.machines)}"
    )


# With shares of a core


SHARES = (1.0, 1.0, 0.5, 0.25)
_CORE_STEPS = 14  # two runs, of which one is slow: five minutes at --core 0.6
_WARM = 4
_MEASURE_S = 600.0

CORE_JOB = """\
[model]
num_layers = 16
width = 256
num_heads = 4
context = 128

[train]
batch_size = 32
num_microbatches = 16

[pipeline]
recompute = "none"

[data_parallel]
replicas = 1

[transport]
kind = "tcp"

[data]
files = ["text.txt"]
cache = "cache"

[node]
threads = 1

[run]
tensorboard = false
"""


def on_cores(share: float, times: int) -> Iterator[Row]:
    """`share` of a core is what the fastest processes have."""
    folder = WORK / "cores"
    folder.mkdir(parents=True, exist_ok=True)
    job = folder / "job.toml"
    text = folder / "text.txt"
    text.write_text("four processes, of which two have less of a core\n" * 4_000, encoding="utf-8")
    stated = CORE_JOB.replace('"text.txt"', to_toml(str(text)))
    job.write_text(stated.replace('"cache"', to_toml(str(folder / "cache"))), encoding="utf-8")
    machines = folder / f"shares of {share:g} of a core.toml"
    machines.unlink(missing_ok=True)
    with core_shares.core_shares([share * own for own in SHARES]) as groups:
        _measure_machines(job, machines, groups)
        pair = sides(job, machines, folder)
        yield from compared(pair, times, partial(_measured_on_cores, job, groups, folder))


def _measure_machines(job: Path, machines: Path, groups: tuple[Path, ...]) -> None:
    """`dpipe measure` by hand, in each group."""
    venue = core_shares.CoreShares(groups, tuple(range(len(groups))))
    port = free_port()

    def argv(rank: int) -> list[str]:
        own = [sys.executable, "-m", "dpipe", "measure", str(job), "--out", str(machines)]
        own += ["--rank", str(rank), "--world-size", str(len(groups)), "--name", f"core{rank}"]
        own += ["--coordinator", f"127.0.0.1:{port}"]
        return venue.enter(rank, own)

    processes = [subprocess.Popen(argv(rank)) for rank in range(len(groups))]
    try:
        codes = [process.wait(timeout=_MEASURE_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RunError(f"dpipe measure has failed: exit codes {codes}")


def _measured_on_cores(job: Path, groups: tuple[Path, ...], folder: Path, side: Side) -> float:
    cluster = load_machines(side.config.predict.machines or "")
    places = tuple(cluster.names.index(name) for name in side.seats)
    overrides = (
        *side.overrides,
        f"train.steps={_CORE_STEPS}",
        f"run.folder={to_toml(str(folder / 'run'))}",
    )
    return _seconds(job, overrides, core_shares.CoreShares(groups, places), _WARM)


# What is kept


def as_table(lines: Sequence[dict[str, Any]]) -> str:
    """Markdown: the newest run of each side of each case."""
    newest = {(line["case"], line["side"]): line for line in lines}
    titles = ["machines", "layers a stage", "predicted", "measured", "off", "even cut / plan"]
    rows = [["case", *titles, "bound"]]
    rows.append(["---"] * len(rows[0]))
    for (case, side), line in newest.items():
        off = line["measured_s"] / line["predicted_s"] - 1
        times = "-"
        if side == PLAN and (case, EVEN) in newest:
            times = f"{newest[case, EVEN]['measured_s'] / line['measured_s']:.2f}"
        layers = " ".join(map(str, line["layers"]))
        cells = [f"{case}, {side}", " ".join(line["machines"]), layers]
        cells += [f"{line[key]:.2f}" for key in ("predicted_s", "measured_s")]
        cells += [f"{off:+.1%}".replace("%", " %"), times, f"{line['bound_s']:.2f}"]
        rows.append(cells)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _keep(rows: Iterator[Row], results: Path) -> None:
    for row in rows:
        origin = {
            "machine": f"{os.cpu_count()}-core {platform.machine()}",
            "load": round(os.getloadavg()[0], 1),
            "date": date.today().isoformat(),
            "commit": commit_of_tree(),
        }
        append(results, {**asdict(row), **origin})


@click.command(help=__doc__)
@click.argument("what", type=click.Choice(["lab", "cores", "table"]))
@click.option("--times", type=click.IntRange(min=1), default=1, help="Runs of each side, in turn.")
@click.option("--profile", "profiles", type=click.Choice(PROFILES), multiple=True, default=PROFILES)
@click.option(
    "--core",
    type=click.FloatRange(min=0.05, max=1),
    default=1.0,
    show_default=True,
    help="What a share of 1 is of a core: four processes take 2.75 of it in all.",
)
@click.option(
    "--results",
    type=click.Path(dir_okay=False, path_type=Path),
    default=RESULTS,
    show_default=True,
)
def main(what: str, times: int, profiles: tuple[str, ...], core: float, results: Path) -> None:
    try:
        if what == "lab":
            _keep(in_lab(profiles, times), results)
        if what == "cores":
            _keep(on_cores(core, times), results)
    except DpipeError as error:
        sys.exit(str(error))
    click.echo(as_table(whole_lines(results)))


if __name__ == "__main__":
    main()
