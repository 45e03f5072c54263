#!/usr/bin/env python3
"""Prints how long threads of a run that wake wait for a core, by what the core was at. Needs root,
and perf (Debian's linux-perf).

    scripts/wakes.py --threads gloo -- dpipe launch scripts/quickstart.toml -o pipeline.stages=2

    waking thread  --[waking]                    the kernel's events, by `perf sched record`
    its core       ==== computes ====[switch]    a thread that computes may use up its time slice
                       <-- waits -->

`--threads` is a part of the threads' names: gloo's, which exchange for tensor-parallel groups, are
pt_gloo_runloop and gloo_tcp_loop.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any

import click

_EVENT = re.compile(r"\[(\d+)\]\s+([\d.]+):\s+sched:(\w+):\s+(.*)")
_WAKING = re.compile(r"comm=(.*?) pid=(\d+) ")
_SWITCH = re.compile(r"prev_comm=.*? prev_pid=(\d+) .*next_comm=.*? next_pid=(\d+)")
_FORK = re.compile(r"comm=.*? pid=(\d+) child_comm=.*? child_pid=(\d+)")
_FIELDS = "comm,tid,cpu,time,event,trace"


def waits_ms(events: Iterable[str], root: int, threads: str) -> dict[tuple[str, str], list[float]]:
    """By where a thread was woken and what that core was at, from lines of `perf script`; only
    threads of the process `root` and of what it has started.
    """
    of_run = {root}
    woken: dict[int, tuple[str, float]] = {}  # by thread: on which core, and when
    waits: dict[tuple[str, str], list[float]] = defaultdict(list)
    for line in events:
        event = _EVENT.search(line)
        if event is None:
            continue
        core, time_s, name, rest = event.groups()
        if name == "sched_process_fork" and (fork := _FORK.search(rest)):
            parent, child = map(int, fork.groups())
            if parent in of_run:
                of_run.add(child)
        elif name == "sched_waking" and (waking := _WAKING.search(rest)):
            comm, thread = waking[1], int(waking[2])
            if thread in of_run and threads in comm:
                woken[thread] = (core, float(time_s))
        elif name == "sched_switch" and (switch := _SWITCH.search(rest)):
            before, after = map(int, switch.groups())
            if after in woken:
                from_core, since_s = woken.pop(after)
                where = "the same core" if from_core == core else "another core"
                waits[where, _was_at(before, of_run)].append((float(time_s) - since_s) * 1e3)
    return dict(waits)


def _was_at(thread: int, of_run: set[int]) -> str:
    if thread == 0:
        return "nothing"
    return "the run" if thread in of_run else "other work"


def rows(waits: dict[tuple[str, str], list[float]]) -> list[dict[str, Any]]:
    return [
        {
            "woken on": where,
            "which was at": at,
            "wakes": len(each),
            "mean_ms": round(mean(each), 3),
            "median_ms": round(median(each), 3),
            "one of ten_ms": round(quantiles(each, n=10)[-1], 3),
        }
        for (where, at), each in sorted(waits.items())
        if len(each) > 1
    ]


def record(command: Sequence[str], folder: Path) -> tuple[Iterable[str], int]:
    """The kernel's events while `command` runs, and its process."""
    data = folder / "perf.data"
    started = folder / "pid"
    script = 'echo $$ > "$0"; exec "$@"'
    argv = ["perf", "sched", "record", "-m", "8M", "-o", str(data), "--"]
    subprocess.run([*argv, "sh", "-c", script, str(started), *command], check=True)
    argv = ["perf", "script", "-i", str(data), "-F", _FIELDS]
    text = subprocess.run(argv, check=True, capture_output=True, text=True).stdout
    return text.splitlines(), int(started.read_text())


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.option("--threads", default="", help="A part of the threads' names.")
@click.argument("command", nargs=-1, required=True)
def main(threads: str, command: tuple[str, ...]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            events, root = record(command, Path(folder))
        except (OSError, subprocess.CalledProcessError) as error:
            sys.exit(f"wakes: {error}; it needs root and perf: apt-get install linux-perf")
        for row in rows(waits_ms(events, root, threads)):
            click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
