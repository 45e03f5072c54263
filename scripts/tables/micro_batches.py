"""GPT-3 XL in 12 stages under GPipe by micro-batch and network: rows that the simulator was not
fitted to.

The system is that of gpt3xl_gpipe_network, some months earlier: the same time of a stage with one
sequence, and the same networks (tcp.py), but for their frames. Several sequences at once take less
than as many times that of one (waves.py).
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpipe.network.link import Link, Network
from dpipe.schedule.generate import generate
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from tables import tcp, waves
from tables.form import Parameter

MODES = ("sim",)
NUM_STAGES = 12
BATCH = 48
SEQUENCE = WIDTH = 2048
MESSAGE_BYTES = SEQUENCE * WIDTH * 4  # in fp32, of one sequence

FORWARD_MS = Parameter(
    "forward of a stage, a sequence", 66, "ms", "fitted on the first row of gpt3xl_gpipe_network"
)
BACKWARD_MS = Parameter(
    "backward", 132, "ms", "assumed: twice the forward, as many times the multiplications"
)
STAGE = (FORWARD_MS, BACKWARD_MS)
PARAMETERS = (
    *STAGE,
    *tcp.STANDARD.parameters,
    *tcp.PARAMETERS,
    *waves.V100_FP32.parameters,
)


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
    delay_ms = float(line["delay_ms"])
    bandwidth_gbps = float(line["bandwidth_gbps"])
    published = float(line["seconds"])
    predicted = step_s(Link(delay_ms, bandwidth_gbps), micro_batch)
    return Row(
        delay_ms,
        bandwidth_gbps,
        micro_batch,
        published,
        round(predicted, 2),
        _error(predicted, published),
    )


def _error(predicted: float, published: float) -> float:
    return round((predicted / published - 1) * 100, 1) + 0.0  # no minus zero


def step_s(
    link: Link,
    micro_batch: int,
    *,
    frames: tcp.Frames = tcp.STANDARD,
    in_waves: bool = True,
) -> float:
    """Seconds; without `in_waves`, every sequence of a micro-batch takes as long as one alone."""
    message_bytes = MESSAGE_BYTES * micro_batch
    cost = Cost.uniform(NUM_STAGES, *stage_us(micro_batch, in_waves), message_bytes)
    network = Network("published", tcp.after_quiet(link, message_bytes, frames))
    schedule = generate("gpipe", NUM_STAGES, BATCH // micro_batch)
    return simulate_alone(Scenario(schedule, cost, network)).duration_us / 1e6


def stage_us(micro_batch: int, in_waves: bool) -> tuple[float, float]:
    """Forward and backward."""
    tiles = waves.V100_FP32 if in_waves else None
    one = _layer(1, tiles)
    several = _layer(micro_batch, tiles)
    forward_us = FORWARD_MS.value * 1e3 * several.forward / one.forward
    backward_us = BACKWARD_MS.value * 1e3 * several.backward / one.backward
    return forward_us, backward_us


def _layer(micro_batch: int, tiles: waves.Tiles | None) -> waves.Passes:
    """A layer's time, in that of one product of a sequence."""
    products = waves.products(SEQUENCE * micro_batch, WIDTH, 1, tiles)
    # Scores and mixing are so many products, one a head, that they fill their waves.
    core = 2 * SEQUENCE / WIDTH
    forward = products.forward + core
    backward = products.backward + 2 * core
    return waves.Passes(micro_batch * forward, micro_batch * backward)


def note(rows: Sequence[Row]) -> str:
    jumbo = _otherwise(rows, frames=tcp.JUMBO)
    evenly = _otherwise(rows, in_waves=False)
    neither = _otherwise(rows, frames=tcp.JUMBO, in_waves=False)
    return (
        f"{len(rows)} rows, no number fitted, the frame chosen of two by them: {_errors(rows)}. "
        f"With the frames of the table at the top: {_errors(jumbo)}. With as much time for every "
        f"sequence of a micro-batch: {_errors(evenly)}. With both: {_errors(neither)}."
    )


def _otherwise(rows: Sequence[Row], **differs: Any) -> list[Row]:
    """The same rows as another model predicts them."""
    others = []
    for row in rows:
        link = Link(row.delay_ms, row.bandwidth_gbps)
        predicted = step_s(link, row.micro_batch, **differs)
        error = _error(predicted, row.published_s)
        others.append(replace(row, predicted_s=predicted, error_percent=error))
    return others


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
