"""`dpipe bench`: ratios, both sides measured in one run. Each prints the machine and the date with its table."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from datetime import date
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

from dpipe.config import build
from dpipe.engine.forecast import forecast
from dpipe.engine.metrics import read_rows
from dpipe.errors import RunError
from dpipe.topology import Link, Network

Row = dict[str, Any]
_STEPS = 5  # the first is left out: it opens buffers


def bench_text(name: str, as_json: bool) -> str:
    rows = _BENCHES[name]()
    if as_json:
        return json.dumps(rows, indent=2)
    table = Table(*rows[0], title=f"{name}: {platform.machine()}, {os.cpu_count()} cores, {date.today().isoformat()}")
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    out = StringIO()
    Console(file=out, width=120).print(table)
    return out.getvalue().rstrip()


def bench_engine() -> list[Row]:
    """Four processes, replay stages (forward 10 ms, backward 20 ms, 1 MB messages), 32 micro-batches, each schedule.

    Simulated on the loopback link as each transport has it, measured first: what is left above 1.0 is the engine's own.
    """
    from dpipe.baselines.loopback import measure_link

    schedules = ("gpipe", "1f1b", "interleaved", "zero-bubble")
    links = {transport: measure_link(f"{transport} x1") for transport in ("grpc", "tcp")}
    return [_replay(schedule, transport, link) for schedule in schedules for transport, link in links.items()]


def _replay(schedule: str, transport: str, link: Link) -> Row:
    per_rank = 2 if schedule == "interleaved" else 1
    with tempfile.TemporaryDirectory() as folder:
        table: dict[str, dict[str, Any]] = {
            "model": {"layers": "replay"},
            "replay": {"forward_ms": 10 / per_rank, "backward_ms": 20 / per_rank, "message_bytes": 1_000_000},
            "train": {"steps": _STEPS, "batch_size": 32, "num_microbatches": 32, "clip_norm": 0},
            "pipeline": {"stages": 4 * per_rank, "stages_per_rank": per_rank, "schedule": schedule},
            "transport": {"kind": transport},
            "run": {"folder": f"{folder}/run", "tensorboard": False, "trace_steps": 0},
        }
        measured = run_quietly(table, Path(folder))
        predicted = forecast(build(table), network=Network("loopback", link)).timeline.duration_us / 1e6
    return {
        "schedule": schedule,
        "transport": transport,
        "link": f"{link.delay_ms:.2f} ms, {link.bandwidth_gbps:.1f} Gbit/s",
        "simulated_s": predicted,
        "measured_s": measured,
        "measured / simulated": measured / predicted,
    }


def run_quietly(table: Mapping[str, Mapping[str, Any]], folder: Path) -> float:
    """Run a configuration with `dpipe launch`; returns the median of its steps' seconds, without the first."""
    (folder / "empty.toml").touch()
    keys = [("-o", f"{section}.{key}={json.dumps(value)}") for section, t in table.items() for key, value in t.items()]
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
    return float(median(row["step_s"] for row in read_rows(Path(table["run"]["folder"]))[1:]))


def bench_transport() -> list[Row]:
    from dpipe.baselines.gloo import compare_transport

    return compare_transport()


def bench_pipelining() -> list[Row]:
    from dpipe.baselines.torch_pipelining import compare_pipelining

    return [
        compare_pipelining(schedule, transport=transport)
        for schedule in ("gpipe", "1f1b")
        for transport in ("grpc", "tcp")
    ]


def bench_mfu() -> list[Row]:
    from dpipe.baselines.mfu import compare_here

    return compare_here()


_BENCHES: dict[str, Callable[[], list[Row]]] = {
    "engine": bench_engine,
    "transport": bench_transport,
    "pipelining": bench_pipelining,
    "mfu": bench_mfu,
}
