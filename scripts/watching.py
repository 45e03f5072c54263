#!/usr/bin/env python3
"""What it costs a run to be watched: a step with pages of `dpipe watch` open, against without.

    scripts/watching.py                       some five minutes; prints a table and writes --out
    scripts/watching.py --turns 2 --steps 10  a short look

    turn      not watched | 1 page | not watched | 5 pages | not watched | 1 page | ...
    compared              `-------------- with both neighbours ---------'

Four ranks of scripts/quickstart.toml train on this machine, with `node.metrics_port` open. A turn
is so many steps; while pages are open, Prometheus's port is scraped once a second as well. Each
page reads the events of `dpipe watch`, a process of its own, as a browser does. A turn's step is
the mean of `step_s` of its rows of metrics; its processor time is that of all threads of all ranks
between the first row and the last. Ratios are to the mean of the two turns beside it without a
page, so that a machine that slows down is not taken for a cost.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from statistics import mean, median, quantiles
from threading import Event, Thread
from typing import Any
from urllib.request import urlopen

import click
import psutil

import dpipe

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = 4
PAGES = (1, 5)
_SETTLING = 5  # steps at the beginning of a turn that do not count: pages are opened
_WARM_UP = 20  # steps before the first turn
_SCRAPE_S = 1.0
_WAIT_S = 30.0


@dataclass(frozen=True)
class Turn:
    """Means over its steps."""

    pages: int
    step_s: float
    processor_s: float  # of all ranks
    watcher_s: float  # of the process `dpipe watch`


def turns_of(count: int) -> list[int]:
    """Pages that are open, by turn: `count` turns with each of `PAGES`, none before and after."""
    turns = [0]
    for pages in islice(cycle(PAGES), count * len(PAGES)):
        turns += [pages, 0]
    return turns


def ratios(turns: Sequence[Turn], pages: int, of: Callable[[Turn], float]) -> list[float]:
    """Of each turn with so many pages to the mean of its neighbours."""
    found = []
    for before, here, after in zip(turns, turns[1:], turns[2:], strict=False):
        if here.pages != pages:
            continue
        beside = mean([of(before), of(after)])
        ratio = of(here) / beside
        found.append(ratio)
    return found


def rows_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """One for each number of pages."""
    alone_s = [turn.step_s for turn in turns if not turn.pages]
    rows = []
    for pages in PAGES:
        here = [turn for turn in turns if turn.pages == pages]
        row: dict[str, Any] = {}
        row["pages"] = pages
        row["turns"] = len(here)
        row["step_s"] = round(median(alone_s), 4)
        row |= spread("time", ratios(turns, pages, _step_s))
        row |= spread("processor_time", ratios(turns, pages, _processor_s))
        took_s = sum(map(_step_s, here))
        watcher_s = sum(turn.watcher_s for turn in here)
        row["watcher_share_of_a_core"] = round(watcher_s / took_s, 5)
        rows.append(row)
    return rows


def spread(name: str, found: Sequence[float]) -> dict[str, Any]:
    """The median and the quartiles, which of a single turn are the same."""
    first = median(found)
    third = first
    if len(found) > 1:
        first, _, third = quantiles(found, n=4)
    quartiles = [round(first, 5), round(third, 5)]
    return {name: round(median(found), 5), f"{name}_quartiles": quartiles}


def _step_s(turn: Turn) -> float:
    return turn.step_s


def _processor_s(turn: Turn) -> float:
    return turn.processor_s


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "pages  turns  time of a step (quartiles)  processor time of a step   dpipe watch"
    for row in rows:
        cells = []
        for name in ("time", "processor_time"):
            first, third = row[f"{name}_quartiles"]
            cells.append(f"{row[name]:.4f} ({first:.4f}, {third:.4f})")
        share = f"{row['watcher_share_of_a_core']:.1%} of a core"
        yield f"{row['pages']:5}  {row['turns']:5}  {cells[0]:27} {cells[1]:26} {share}"


def processor_s(pids: Sequence[int]) -> float:
    """Of all their threads, those that have ended among them."""
    total_ns = 0
    for pid in pids:
        # The clock of another process, as clock_getcpuclockid makes its number on Linux.
        clock = (~pid << 3) | 2
        total_ns += time.clock_gettime_ns(clock)
    return total_ns / 1e9


class Watchers:
    """Whoever watches: `open` as many pages as shall be, and a scrape a second beside them."""

    def __init__(self, address: str, metrics_port: int) -> None:
        self._events = f"{address}events"
        self._metrics = f"http://127.0.0.1:{metrics_port}/metrics"
        self._over = Event()
        self._threads: list[Thread] = []
        self.failed: list[str] = []

    def open(self, pages: int) -> None:
        self.close()
        self._over = Event()
        if pages:
            self._start(self._scrape)
        for _ in range(pages):
            self._start(self._read)

    def _start(self, read: Callable[[Event], None]) -> None:
        thread = Thread(target=self._try, args=(read,))
        thread.start()
        self._threads.append(thread)

    def close(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_WAIT_S)
        self._threads = []

    def _try(self, read: Callable[[Event], None]) -> None:
        try:
            read(self._over)
        except OSError as error:
            self.failed.append(f"{read.__name__}: {error}")

    def _read(self, over: Event) -> None:
        with urlopen(self._events, timeout=_WAIT_S) as events:  # noqa: S310 - http
            while not over.is_set():
                if not events.readline():
                    raise OSError("the page's events ended")

    def _scrape(self, over: Event) -> None:
        while not over.wait(_SCRAPE_S):
            with urlopen(self._metrics, timeout=_WAIT_S) as answer:  # noqa: S310 - http
                answer.read()


class Measuring:
    """Is told of each row; turns begin and end with a step."""

    def __init__(self, turns: Sequence[int], steps: int, watchers: Watchers, watcher: int) -> None:
        self.turns: list[Turn] = []
        self._left = list(turns)
        self._steps = steps
        self._watchers = watchers
        self._watcher = watcher
        self._ranks: list[int] = []
        self._steps_s: list[float] = []
        self._since = (0.0, 0.0)
        self._begins_at = _WARM_UP

    def take(self, row: dict[str, Any]) -> None:
        # A held-out loss has a row of its own.
        if "step_s" not in row or not self._left:
            return
        step = row["step"]
        if step == self._begins_at:
            self._ranks = self._ranks or ranks_of_this_run()
            self._watchers.open(self._left[0])
        first = self._begins_at + _SETTLING
        last = first + self._steps
        if step == first:
            self._since = self._used()
            self._steps_s = []
        elif step > first:
            self._steps_s.append(row["step_s"])
        if step == last:
            self._end()
            self._begins_at = step + 1

    def _used(self) -> tuple[float, float]:
        return processor_s(self._ranks), processor_s([self._watcher])

    def _end(self) -> None:
        ranks_s, watcher_s = self._used()
        before_s, watcher_before_s = self._since
        by_ranks_s = ranks_s - before_s
        by_watcher_s = watcher_s - watcher_before_s
        turn = Turn(
            pages=self._left.pop(0),
            step_s=mean(self._steps_s),
            processor_s=by_ranks_s / self._steps,
            watcher_s=by_watcher_s / self._steps,
        )
        self.turns.append(turn)
        click.echo(
            f"{turn.pages} pages: {turn.step_s * 1e3:.1f} ms a step, "
            f"{turn.processor_s * 1e3:.1f} ms of the ranks' processors",
            err=True,
        )


def ranks_of_this_run() -> list[int]:
    found = []
    for child in psutil.Process().children(recursive=True):
        if "train" in child.cmdline():
            found.append(child.pid)
    if len(found) != NUM_RANKS:
        raise click.ClickException(f"{NUM_RANKS} ranks should run, found {len(found)}")
    return found


def watch(folder: Path, stack: ExitStack) -> tuple[str, int]:
    """The address of its page, and the process."""
    argv = [sys.executable, "-m", "dpipe", "watch", str(folder), "--bind", "127.0.0.1:0"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait, _WAIT_S)
    stack.callback(process.terminate)
    assert process.stdout is not None
    line = process.stdout.readline()
    return line.split()[1], process.pid


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def measured(turns: Sequence[int], steps: int, job: Path, overrides: Sequence[str]) -> list[Turn]:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch) / "run"
        folder.mkdir()
        port = free_port()
        num_steps = _WARM_UP + len(turns) * (_SETTLING + steps + 1)
        never = 2 * num_steps
        settings = [
            f"train.steps={num_steps}",
            f"train.eval_every={never}",
            f"run.checkpoint_every={never}",
            f"run.folder={folder}",
            f"node.metrics_port={port}",
            *overrides,
        ]
        config = dpipe.load(job, tuple(settings))
        address, watcher = watch(folder, stack)
        watchers = Watchers(address, port)
        stack.callback(watchers.close)
        measuring = Measuring(turns, steps, watchers, watcher)
        dpipe.launch(config, on_row=measuring.take)
        if watchers.failed:
            raise click.ClickException(f"not watched all the time: {'; '.join(watchers.failed)}")
    return measuring.turns


@click.command(help=__doc__)
@click.option("--turns", default=12, show_default=True, help="With each number of pages.")
@click.option("--steps", default=60, show_default=True, help="Of a turn.")
@click.option("--job", type=click.Path(path_type=Path), default=ROOT / "scripts/quickstart.toml")
@click.option("-o", "overrides", multiple=True, metavar="KEY=VALUE")
@click.option("--out", type=click.Path(path_type=Path), help="Where the rows are written.")
def main(turns: int, steps: int, job: Path, overrides: tuple[str, ...], out: Path | None) -> None:
    planned = turns_of(turns)
    taken = measured(planned, steps, job, overrides)
    rows = rows_of(taken)
    for line in table(rows):
        click.echo(line)
    if out is None:
        return
    lines = []
    for row in rows:
        row["steps"] = steps
        row["cores"] = os.cpu_count()
        row["date"] = time.strftime("%Y-%m-%d")
        lines.append(json.dumps(row) + "\n")
    out.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
