"""`dpipe bench`: ratios, both sides measured in one run. Each prints the machine and the date with
its table.
"""

import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
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
from dpipe.schedule.generate import GENERATORS, GPIPE, ONE_F_ONE_B

if TYPE_CHECKING:
    from dpipe.baselines.loopback import Loopback

Row = dict[str, Any]
_STEPS = 5  # of a run; the first is left out: it opens buffers
_ROUNDS = 2


def bench_text(name: str, as_json: bool, hosts: tuple[str, ...] = (), rank: int = 0) -> str:
    """`hosts`: one process on each of them instead of all here; only for all-reduce, of which this
    is `rank`.
    """
    rows = _BENCHES[name]() if not hosts else _on_hosts(name, hosts, rank)
    if as_json:
        return json.dumps(rows, indent=2)
    table = Table(
        *rows[0],
        title=f"{name}: {platform.machine()}, {os.cpu_count()} cores, {date.today().isoformat()}",
    )
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    out = StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue().rstrip()


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)


def bench_engine() -> list[Row]:
    """Four processes, replay stages (forward 10 ms, backward 20 ms, 1 MB messages), 32
    micro-batches, each schedule.

    Simulated on this machine as each transport has it, measured first: its loopback link, and what
    a message costs the cores that all ranks share. What is left above 1.0 is the engine's own.
    """
    from dpipe.baselines.loopback import measure_loopback

    schedules = tuple(GENERATORS)
    transports = ("grpc", "tcp")
    runs: dict[tuple[str, str], list[_Run]] = {
        pair: [] for pair in itertools.product(schedules, transports)
    }
    for _ in range(_ROUNDS):  # what else the machine does falls on all of them
        machines = {transport: measure_loopback(f"{transport} x1") for transport in transports}
        for (schedule, transport), done in runs.items():
            done.append(_replay(schedule, transport, machines[transport]))
    return [_engine_row(schedule, transport, done) for (schedule, transport), done in runs.items()]


@dataclass(frozen=True)
class _Run:
    """The seconds of each step of a run, and those of a simulated one on `machine`."""

    machine: "Loopback"
    simulated_s: float
    measured_s: list[float]


def _engine_row(schedule: str, transport: str, runs: Sequence[_Run]) -> Row:
    ratios = [measured / run.simulated_s for run in runs for measured in run.measured_s]
    low, middle, high = quantiles(ratios, n=4)
    links = [run.machine.link for run in runs]
    delay_ms = median(link.delay_ms for link in links)
    gbps = median(link.bandwidth_gbps for link in links)
    core_us = median(run.machine.message_us + run.machine.us_per_mb for run in runs)
    return {
        "schedule": schedule,
        "transport": transport,
        "link": f"{delay_ms:.2f} ms, {gbps:.1f} Gbit/s, {core_us / 1e3:.2f} ms of a core an end",
        "simulated_s": median(run.simulated_s for run in runs),
        "measured_s": median(step for run in runs for step in run.measured_s),
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
            "train": {"steps": _STEPS, "batch_size": 32, "num_microbatches": 32, "clip_norm": 0},
            "pipeline": {"stages": 4 * per_rank, "stages_per_rank": per_rank, "schedule": schedule},
            "transport": {"kind": transport},
            "run": {"folder": f"{folder}/run", "tensorboard": False, "trace_steps": 0},
        }
        measured = run_quietly(table, Path(folder))
        here = [machine.host(range(4), computes=False)]
        simulated = forecast(build(table), network=Network("loopback", machine.link), hosts=here)
    return _Run(machine, simulated.timeline.duration_us / 1e6, measured)


def run_quietly(table: Mapping[str, Mapping[str, Any]], folder: Path) -> list[float]:
    """Run a configuration with `dpipe launch`; returns its steps' seconds, without the first's."""
    (folder / "empty.toml").touch()
    keys = [
        ("-o", f"{section}.{key}={json.dumps(value)}")
        for section, t in table.items()
        for key, value in t.items()
    ]
    argv = [
        sys.executable,
        "-m",
        "dpipe",
        "launch",
        str(folder / "empty.toml"),
        *(word for pair in keys for word in pair),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300)  # noqa: S603 - our own command line
    if done.returncode != 0:
        raise RunError(f"{' '.join(argv)} failed:\n{done.stdout}{done.stderr}")
    return [row["step_s"] for row in read_rows(Path(table["run"]["folder"]))[1:]]


def bench_transport() -> list[Row]:
    from dpipe.baselines.gloo import compare_transport

    return compare_transport()


def _on_hosts(name: str, hosts: tuple[str, ...], rank: int) -> list[Row]:
    from dpipe.baselines.allreduce import compare_hosts

    if name != "all-reduce" or not rank < len(hosts):
        raise ConfigError(
            f"--hosts goes with all-reduce and a --rank below {len(hosts)}, not {name} and {rank}"
        )
    return compare_hosts(hosts, rank)


def bench_all_reduce() -> list[Row]:
    from dpipe.baselines.allreduce import compare_here

    return compare_here()


def bench_pipelining() -> list[Row]:
    from dpipe.baselines.torch_pipelining import compare_pipelining

    return [
        compare_pipelining(schedule, transport=transport)
        for schedule in (GPIPE.name, ONE_F_ONE_B.name)
        for transport in ("grpc", "tcp")
    ]


def bench_mfu() -> list[Row]:
    from dpipe.baselines.mfu import compare_here

    return compare_here()


_BENCHES: dict[str, Callable[[], list[Row]]] = {
    "engine": bench_engine,
    "transport": bench_transport,
    "all-reduce": bench_all_reduce,
    "pipelining": bench_pipelining,
    "mfu": bench_mfu,
}
