"""GPT-3 XL in 12 stages under GPipe by micro-batch and network: rows that the simulator was not
fitted to.

The system is that of gpt3xl_gpipe_network, some months earlier: the same time per sequence and
stage, and the same networks (tcp.py).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpipe.network.link import Link, Network
from dpipe.schedule.generate import generate
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from tables import tcp
from tables.form import Parameter

MODES = ("sim",)
NUM_STAGES = 12
BATCH = 48
MESSAGE_BYTES = 2048 * 2048 * 4  # sequence x width in fp32, of one sequence

FORWARD_MS = Parameter(
    "forward of a stage, a sequence", 66, "ms", "fitted on the first row of gpt3xl_gpipe_network"
)
BACKWARD_MS = Parameter(
    "backward", 132, "ms", "assumed: twice the forward, as many times the multiplications"
)
PARAMETERS = (FORWARD_MS, BACKWARD_MS, *tcp.PARAMETERS)


@dataclass(frozen=True)
class Row:
    """Seconds per step."""

    delay_ms: float
    bandwidth_gbps: float
    micro_batch: int
    published_s: float
    predicted_s: float
    error_percent: float


def simulated(source: Path) -> list[Row]:
    with source.open(encoding="utf-8") as lines:
        return [_row(line) for line in csv.DictReader(lines)]


def _row(line: dict[str, str]) -> Row:
    micro_batch = int(line["micro_batch"])
    link = Link(float(line["delay_ms"]), float(line["bandwidth_gbps"]))
    published = float(line["seconds"])
    predicted = step_s(link, micro_batch)
    return Row(
        link.delay_ms,
        link.bandwidth_gbps,
        micro_batch,
        published,
        round(predicted, 2),
        round((predicted / published - 1) * 100, 1) + 0.0,  # no minus zero
    )


def step_s(link: Link, micro_batch: int) -> float:
    message_bytes = MESSAGE_BYTES * micro_batch
    cost = Cost.uniform(
        NUM_STAGES,
        FORWARD_MS.value * 1e3 * micro_batch,
        BACKWARD_MS.value * 1e3 * micro_batch,
        message_bytes,
    )
    network = Network("published", tcp.after_quiet(link, message_bytes))
    schedule = generate("gpipe", NUM_STAGES, BATCH // micro_batch)
    return simulate_alone(Scenario(schedule, cost, network)).duration_us / 1e6


def computing_s(micro_batch: int) -> float:
    """A step without a network: the least that any row of this micro-batch may be predicted."""
    pipeline_us = (FORWARD_MS.value + BACKWARD_MS.value) * 1e3 * micro_batch
    return (BATCH // micro_batch + NUM_STAGES - 1) * pipeline_us / 1e6


def note(rows: Sequence[Row]) -> str:
    largest = max(row.micro_batch for row in rows)
    without = [row for row in rows if row.micro_batch < largest and row.bandwidth_gbps > 1]
    computing = computing_s(largest)
    quickest = min(row.published_s for row in rows if row.micro_batch == largest)
    more = (computing / quickest - 1) * 100
    return (
        f"{len(rows)} rows, none of them fitted: {_errors(rows)}. Computing alone is predicted to "
        f"take {computing:.2f} s with micro-batch {largest}, {more:.1f} % more than its quickest "
        f"row took with a network. Without that micro-batch, and above 1 Gbit/s: {len(without)} "
        f"rows, {_errors(without)}."
    )


def _errors(rows: Sequence[Row]) -> str:
    errors = [abs(row.error_percent) for row in rows]
    return f"mean error {sum(errors) / len(errors):.1f} %, largest {max(errors):.1f} %"


def draw(rows: Sequence[Row], figure: Any) -> None:
    """One line per micro-batch over the networks; crosses are published."""
    axes = figure.subplots()
    for number, micro_batch in enumerate(dict.fromkeys(row.micro_batch for row in rows)):
        ours = [row for row in rows if row.micro_batch == micro_batch]
        names = [f"{row.delay_ms:g} ms\n{row.bandwidth_gbps:g} Gbit/s" for row in ours]
        predicted = [row.predicted_s for row in ours]
        published = [row.published_s for row in ours]
        label = f"micro-batch {micro_batch}, predicted"
        axes.plot(names, predicted, "-", color=f"C{number}", label=label)
        axes.plot(names, published, "x", color=f"C{number}", label="published")
    axes.set_ylabel("seconds a step")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize="small")
