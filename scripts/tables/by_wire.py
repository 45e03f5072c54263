"""Measured steps of one system in several wire formats, beside what was predicted."""

from collections.abc import Sequence
from typing import Any


def as_markdown(rows: Sequence[Any]) -> str:
    """Of table.py's rows: a line per network, a column per system and format, each predicted on
    that day, then measured; seconds per step.
    """
    ours = [row for row in rows if row.measured_s is not None]
    systems = list(dict.fromkeys(row.label for row in ours))
    cells = {(row.network, row.label): _beside(row) for row in ours}
    lines = [["one-way delay, bandwidth", *(f"{each}: predicted, measured" for each in systems)]]
    lines.append(["---"] * len(lines[0]))
    for network in dict.fromkeys(row.network for row in ours):
        values = [cells.get((network, system), "") for system in systems]
        lines.append([network.replace("\n", ", "), *values])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _beside(row: Any) -> str:
    return f"{row.predicted_that_day_s or 0.0:.2f}, {row.measured_s:.2f}"
