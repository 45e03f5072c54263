"""`dpipe bench`: ratios, both sides measured in one run.

Each table names the machine and the date. Progress goes to stderr.
"""

import itertools
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from io import StringIO
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from dpipe.config.load import build
from dpipe.errors import ConfigError, RunError
from dpipe.network.link import Network
from dpipe.plan.forecast import forecast
from dpipe.report.metrics import read_rows
from dpipe.report.pace import QUICK_S, Pace
from dpipe.schedule.generate import GENERATORS, GPIPE, ONE_F_ONE_B

if TYPE_CHECKING:
    from dpipe.bench.loopback import Loopback

Row = dict[str, Any]
_TRANSPORTS = ("grpc", "tcp")  # those that need no GPU
_STEPS = 5  # of a run; the first is left out: it opens buffers
_ROUNDS = 2  # of all runs, so that other work on the machine affects every pair


@dataclass(frozen=True)
class Bench:
    """`part_s`: the seconds that one of its parts takes on two idle cores."""

    run: Callable[[Pace], list[Row]]
    part_s: float


def bench_text(
    name: str,
    as_json: bool,
    hosts: tuple[str, ...] = (),
    rank: int = 0,
    *,
    quick: bool = False,
) -> str:
    """The table of a bench, or its rows as JSON.

    `hosts`: one process on each of them, of which this is `rank`, instead of all here; for
    all-reduce only. `quick`: about a minute, with fewer rounds and perhaps fewer rows.
    """
    bench = _BENCHES[name]
    pace = Pace(name, bench.part_s, QUICK_S if quick else math.inf)
    rows = _on_hosts(name, hosts, rank, pace) if hosts else bench.run(pace)
    if as_json:
        return json.dumps(rows, indent=2)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    table = Table(*rows[0], title=f"{name}: {machine}, {date.today().isoformat()}")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    out = StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue().rstrip()


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}"
    return str(value)


def bench_engine(pace: Pace) -> list[Row]:
    """Four processes, replay stages (forward 10 ms, backward 20 ms, 1 MB messages), 32
    micro-batches; each schedule over each transport, in quick benches over TCP alone.

    A step is simulated on this machine as the transport sees it: on its loopback link, and with the
    processor time of its messages, both measured in the same round. What is left above 1.0 is the
    engine's own.
    """
    from dpipe.bench.loopback import measure_loopback

    transports = ("tcp",) if pace.quick else _TRANSPORTS
    rounds = range(1 if pace.quick else _ROUNDS)
    parts = list(itertools.product(rounds, GENERATORS, transports))
    machines: dict[tuple[int, str], Loopback] = {}
    runs: dict[tuple[str, str], list[_Run]] = defaultdict(list)
    for part in pace.parts(parts, lambda part: f"{part[1]} over {part[2]}"):
        number, schedule, transport = part
        # Anew each round: whatever else keeps this machine busy changes its link from one to the
        # next.
        machine = machines.get((number, transport))
        if machine is None:
            machine = measure_loopback(f"{transport} x1")
            machines[number, transport] = machine
        run = _replay(schedule, transport, machine)
        done = runs[schedule, transport]
        done.append(run)
    rows = []
    for (schedule, transport), done in runs.items():
        row = _engine_row(schedule, transport, done)
        rows.append(row)
    return rows


@dataclass(frozen=True)
class _Run:
    """The seconds of each step of a run, and those of a simulated one on `machine`."""

    machine: "Loopback"
    simulated_s: float
    measured_s: list[float]


def _engine_row(schedule: str, transport: str, runs: Sequence[_Run]) -> Row:
    ratios: list[float] = []
    measured_s: list[float] = []
    links = []
    ends_us = []
    for run in runs:
        measured_s += run.measured_s
        ratios += [step_s / run.simulated_s for step_s in run.measured_s]
        machine = run.machine
        links.append(machine.link)
        ends_us.append(machine.message_us + machine.us_per_mb)
    low, middle, high = quantiles(ratios, n=4)
    delay_ms = median(link.delay_ms for link in links)
    gbps = median(link.bandwidth_gbps for link in links)
    core_ms = median(ends_us) / 1e3
    return {
        "schedule": schedule,
        "transport": transport,
        "link": f"{delay_ms:.2f} ms, {gbps:.1f} Gbit/s, {core_ms:.2f} ms of a core an end",
        "simulated_s": median(run.simulated_s for run in runs),
        "measured_s": median(measured_s),
        "measured / simulated": middle,
        "middle half": f"{low:.3f} to {high:.3f}",
    }


def _replay(schedule: str, transport: str, machine: "Loopback") -> _Run:
    per_rank = 2 if GENERATORS[schedule].needs_several_stages else 1
    with tempfile.TemporaryDirectory() as folder:
        table: dict[str, dict[str, Any]] = {
            "model": {"layers": "replay"},
            "replay": {
                "forward_ms": 10 / per_rank,
                "backward_ms": 20 / per_rank,
                "message_bytes": 1_000_000,
            },
            # Without clipping no step waits for a vote.
            "train": {"steps": _STEPS, "batch_size": 32, "num_microbatches": 32, "clip_norm": 0},
            "pipeline": {"stages": 4 * per_rank, "stages_per_rank": per_rank, "schedule": schedule},
            "transport": {"kind": transport},
            # Nothing is written but the rows that are read below.
            "run": {"folder": f"{folder}/run", "tensorboard": False, "trace_steps": 0},
        }
        measured = run_quietly(table, Path(folder))
        # Replay stages sleep: their compute takes no core from the transports.
        here = machine.host(range(4), computes=False)
        network = Network("loopback", machine.link)
        config = build(table)
        simulated = forecast(config, network=network, hosts=[here])
    simulated_s = simulated.step_us / 1e6
    return _Run(machine, simulated_s, measured)


def run_quietly(table: Mapping[str, Mapping[str, Any]], folder: Path) -> list[float]:
    """Run a configuration with `dpipe launch`; returns its steps' seconds, without the first's."""
    empty = folder / "empty.toml"
    empty.touch()
    argv = [sys.executable, "-m", "dpipe", "launch", str(empty)]
    for section, keys in table.items():
        for key, value in keys.items():
            argv += ["-o", f"{section}.{key}={json.dumps(value)}"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)  # noqa: S603 - our own command line
    if done.returncode != 0:
        raise RunError(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    written = Path(table["run"]["folder"])
    rows = read_rows(written)
    return [row["step_s"] for row in rows[1:]]


def bench_transport(pace: Pace) -> list[Row]:
    from dpipe.bench.gloo import compare_transport

    for _ in pace.parts(["16 MB tensors"], str):
        rows = compare_transport(pace=pace)
    return rows


def _on_hosts(
    name: str,
    hosts: tuple[str, ...],
    rank: int,
    pace: Pace,
) -> list[Row]:
    from dpipe.bench.allreduce import compare_hosts

    if name != "all-reduce" or not rank < len(hosts):
        raise ConfigError(
            f"--hosts goes with all-reduce and a --rank below {len(hosts)}, not {name} and {rank}"
        )
    for _ in pace.parts([f"64 MB on {len(hosts)} hosts"], str):
        rows = compare_hosts(hosts, rank, pace=pace)
    return rows


def bench_all_reduce(pace: Pace) -> list[Row]:
    from dpipe.bench.allreduce import compare_here

    for _ in pace.parts(["64 MB"], str):
        rows = compare_here(pace=pace)
    return rows


def bench_pipelining(pace: Pace) -> list[Row]:
    from dpipe.bench.torch_pipelining import compare_pipelining

    schedules = (GPIPE.name, ONE_F_ONE_B.name)
    pairs = list(itertools.product(schedules, _TRANSPORTS))
    rows = []
    for schedule, transport in pace.parts(pairs, " over ".join):
        row = compare_pipelining(schedule, transport=transport, pace=pace)
        rows.append(row)
    return rows


def bench_mfu(pace: Pace) -> list[Row]:
    from dpipe.bench.mfu import compare_here

    for _ in pace.parts(["steps in turns"], str):
        rows = compare_here(pace)
    return rows


def bench_formats(pace: Pace) -> list[Row]:
    from dpipe.bench.formats import measure_format, names_to_compare

    return [measure_format(name, pace) for name in pace.parts(names_to_compare(), str)]


_BENCHES: dict[str, Bench] = {
    "engine": Bench(bench_engine, 14),
    "transport": Bench(bench_transport, 20),
    "all-reduce": Bench(bench_all_reduce, 45),
    "pipelining": Bench(bench_pipelining, 40),
    "mfu": Bench(bench_mfu, 60),
    "formats": Bench(bench_formats, 2),
}
