"""What the metrics of a run say while it goes on: how far it is, what it made again, and what
faults cost it.
"""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click


@dataclass
class Progress:
    """What the metrics of a run said while it went on."""

    path: Path
    first_at: float | None = None  # when the first step was there
    newest_at: float = 0.0
    newest: int = -1
    best: int = -1
    num_repeated: int = 0
    _read: int = 0  # bytes of the file
    _inode: int = 0

    def look(self) -> None:
        """Only at what is new: what looks on has as little of the machine as can be."""
        rows = self._new_rows()
        newest = max((row["step"] for row in rows if "loss" in row), default=self.newest)
        if newest == self.newest:
            return
        now = time.monotonic()
        if newest >= 0 and self.first_at is None:
            self.first_at = now
        # It goes back where an epoch began at an earlier step.
        self.num_repeated += max(0, self.newest - newest)
        if newest > self.best:
            self.best = newest
            self.newest_at = now
        self.newest = newest

    def _new_rows(self) -> list[dict[str, Any]]:
        """Those of the whole file where an epoch has cut it, or written another."""
        # Of a coordinator that takes over there is no file yet.
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._inode or found.st_size < self._read:
                self._inode = found.st_ino
                self._read = 0
            file.seek(self._read)
            text = file.read()
        # A line may still be written to.
        whole = text[: text.rfind(b"\n") + 1]
        self._read += len(whole)
        return list(rows_in(whole))

    @property
    def seconds(self) -> float:
        """From the first step to the last."""
        return 0.0 if self.first_at is None else self.newest_at - self.first_at


def ended(folder: Path) -> Progress:
    """Of a run that is over, by its own clock. Raises `click.UsageError` where there is none."""
    progress = Progress(folder / "metrics.jsonl")
    progress.look()
    if progress.best < 0:
        raise click.UsageError(f"no step is in {progress.path}; name the folder of a run")
    seconds = values_of(progress.path, "step_s")
    progress.first_at = 0.0
    progress.newest_at = sum(seconds[step] for step in seconds if step > min(seconds))
    return progress


@dataclass
class Fault:
    kind: str
    what: str
    at: float
    step: int  # the newest then
    still_s: float | None = None  # the longest time to a new step, from then to the next fault


def values_of(path: Path, name: str) -> dict[int, float]:
    """By step."""
    text = path.read_bytes() if path.exists() else b""
    return {row["step"]: row[name] for row in rows_in(text) if name in row}


def rows_in(text: bytes) -> Iterator[dict[str, Any]]:
    """A line may still be written to."""
    for line in text.splitlines():
        with suppress(ValueError):
            yield json.loads(line)


def report(faults: Sequence[Fault], calm: Progress, rough: Progress) -> None:
    for fault in faults:
        still = "no new step before the next fault"
        if fault.still_s is not None:
            still = f"{fault.still_s:6.1f} s to a step"
        click.echo(f"{still} after step {fault.step}: {fault.what}")
    by_kind: dict[str, list[float]] = {}
    for fault in faults:
        if fault.still_s is not None:
            by_kind.setdefault(fault.kind, []).append(fault.still_s)
    for kind, stills in sorted(by_kind.items()):
        click.echo(
            f"{kind}: {len(stills)} times, {median(stills):.1f} s to a step in the median, "
            f"{max(stills):.1f} s at most"
        )
    goodput = 100 * calm.seconds / rough.seconds if rough.seconds else 0.0
    click.echo(
        f"{len(faults)} faults in {rough.seconds:.0f} s; {rough.num_repeated} steps repeated; "
        f"goodput {goodput:.1f} % of the undisturbed {calm.seconds:.0f} s"
    )
