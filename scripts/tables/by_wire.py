"""Measured steps of one job on several networks, by wire format, beside their bound and what was
predicted that day.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tables.form import as_text

_OF_PACKETS = {"loss_percent": "loss", "reorder_percent": "out of order"}

NAMES = (
    "gpt3xl_narrow",
    "gpt3xl_home",
    "gpt3xl_stock",  # with TCP as it comes
    "gpt3xl_stock_cubic",
    "gpt3xl_stock_bbr",
    "finetuning_lossy",  # on links that lose and delay packets
    "finetuning_lossy_cubic",
    "finetuning_lossy_bbr",
    "finetuning_lossy_others",
)
HEAD = (
    "one-way delay, bandwidth",
    "system",
    "bound",
    "predicted",
    "measured",
    "measured / predicted",
)


@dataclass(frozen=True)
class Row:
    """One system in one format on one network; seconds per step."""

    network: str
    system: str
    bound_s: float | None  # what no order of the same computations and messages is below
    predicted_s: float
    measured_s: float

    @property
    def label(self) -> str:
        return self.system

    @property
    def seconds(self) -> float:
        return self.measured_s


def rows_of(lines: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Of the lines that scripts/sweep.py wrote; the networks and, on each, the systems stand in the
    order in which they were measured first.
    """
    rows = [_row(line) for line in lines if line["mode"] == "replay"]
    networks = list(dict.fromkeys(row.network for row in rows))
    return sorted(rows, key=lambda row: networks.index(row.network))


def _row(line: Mapping[str, Any]) -> Row:
    return Row(
        network=_named(line["network"]),
        system=", ".join((line["engine"], line["schedule"], line["wire"])),
        bound_s=line.get("bound_s"),
        predicted_s=line["predicted_s"],
        measured_s=line["measured_s"],
    )


def _named(network: Mapping[str, Any]) -> str:
    """By its links, which are all alike."""
    megabits = network["bandwidth_gbps"] * 1e3
    parts = [f"{network['delay_ms']:g} ms", f"{megabits:g} Mbit/s"]
    if network.get("jitter_ms"):
        parts[0] = f"{network['delay_ms']:g} ± {network['jitter_ms']:g} ms"
    for key, name in _OF_PACKETS.items():
        if network.get(key):
            parts.append(f"{network[key]:g} % {name}")
    return ", ".join(parts)


def as_markdown(rows: Sequence[Row]) -> str:
    """A line per network and system."""
    lines: list[Sequence[str]] = [HEAD, ["---"] * len(HEAD)]
    for row in rows:
        bound = "" if row.bound_s is None else f"{row.bound_s:.2f}"
        times = [f"{row.predicted_s:.2f}", f"{row.measured_s:.2f}"]
        ratio = f"{row.measured_s / row.predicted_s:.3f}"
        lines.append([row.network, row.system, bound, *times, ratio])
    return _table(lines)


def as_comparison(rows: Sequence[Row]) -> str:
    """A line per network, and a column for each system that was measured on all of them, the
    slowest first: measured, in brackets predicted.
    """
    seconds = {(row.network, row.system): _compared(row) for row in rows}
    networks = list(dict.fromkeys(row.network for row in rows))
    slowest_first = sorted(rows, key=lambda row: -row.measured_s)
    systems = dict.fromkeys(row.system for row in slowest_first)
    everywhere = [s for s in systems if all((network, s) in seconds for network in networks)]
    lines = [[HEAD[0], *everywhere], ["---"] * (1 + len(everywhere))]
    lines += [[network, *(seconds[network, s] for s in everywhere)] for network in networks]
    return _table(lines)


def _compared(row: Row) -> str:
    return f"{row.measured_s:.2f} ({row.predicted_s:.2f})"


def _table(lines: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# By the form that is asked for.
FORMS = {
    None: as_markdown,
    "compare": as_comparison,
    "csv": partial(as_text, form="csv", note=""),
    "json": partial(as_text, form="json", note=""),
}
