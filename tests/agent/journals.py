"""What an elastic run in `forks.folder` has written of itself."""

import json
import sqlite3

from agent.forks import Forks

from dpipe.elastic.journal import NAME
from dpipe.report.metrics import read_rows


def step(forks: Forks) -> int:
    """The newest in the run's metrics."""
    folder = forks.folder / "runs" / "run"
    rows = read_rows(folder) if (folder / "metrics.jsonl").exists() else []
    return max((row["step"] for row in rows), default=-1)


def losses_of(forks: Forks) -> list[tuple[int, float]]:
    rows = read_rows(forks.folder / "runs" / "run")
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def epochs(forks: Forks) -> list[tuple[int, int]]:
    """The step at which each resumed, and how many ranks it has."""
    database = sqlite3.connect(forks.folder / "runs" / "run" / NAME, timeout=10)
    try:
        rows = database.execute("SELECT resume_step, seats FROM epochs ORDER BY number")
        return [(step, len(json.loads(seats))) for step, seats in rows]
    finally:
        database.close()
