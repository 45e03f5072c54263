#!/usr/bin/env python3
"""Predicts a step of GPT-3 XL in 12 stages on narrow links, by bits a value on the wire.

    scripts/narrow.py                 all networks and formats; minutes
    scripts/narrow.py --quick         with 1f1b instead of a search
    scripts/narrow.py --by-slices     by pipeline.sequence_slices (Seq1F1B); minutes

The stages are those of `scripts/table.py gpt3xl_gpipe_network`, calibrated on published steps, the
schedule is "auto", and the rates include the headers of ordinary frames, as a lab's do. The first
columns are formats of dpipe; the last is a model made for narrow links: `model.bottleneck_width` is
a 64th of its width, in fp32, and both ends of a bottleneck take their time.
"""

import json
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product

import click
from table import BACKWARD_US, FORWARD_US, MESSAGE_VALUES, NUM_MICROBATCHES, NUM_STAGES

from dpipe.network.profile import parse_network
from dpipe.schedule.generate import generate
from dpipe.search.auto import search
from dpipe.search.slices import search_slices
from dpipe.timeline.cost import Cost
from dpipe.timeline.simulate import simulate
from dpipe.wire.format import wire_bytes

# Of GPT-3 XL, whose 24 blocks make 12 stages.
WIDTH = 2048
CONTEXT = 2048
BLOCKS_A_STAGE = 2
NETWORKS = ((50, 0.3), (25, 0.1), (25, 0.03))  # one-way ms, Gbit/s
SLICES = (1, 2, 4)
# Network, micro-batches, format.
BY_SLICES = (
    ((50, 1), 16, "none"),
    ((50, 1), 16, "bf16"),
    ((50, 1), 16, "int8"),
    ((50, 0.3), NUM_MICROBATCHES, "int4"),
    ((25, 0.1), NUM_MICROBATCHES, "int4"),
)
FORMATS = ("none", "bf16", "int8", "int6", "int4", "int3")
# The model made for narrow links: numbers a token of 4 bytes each and, forward, the word itself.
BOTTLENECK_WIDTH = WIDTH // 64
WORD_BYTES = 4
NARROW = f"{BOTTLENECK_WIDTH} numbers a token"
COLUMNS = (*FORMATS, NARROW)
HEAD = ("delay_ms", "bandwidth_gbps", "format", "bits", "step_s")
Row = tuple[float, float, str, float, float]
Cell = tuple[tuple[float, float], str]


def message_bytes(name: str, num_slices: int = 1) -> tuple[int, int]:
    """Of an activation, and of its gradient."""
    num_values = MESSAGE_VALUES // num_slices
    if name == NARROW:
        num_tokens = num_values // WIDTH
        num_bytes = num_tokens * BOTTLENECK_WIDTH * 4
        return num_bytes + num_tokens * WORD_BYTES, num_bytes
    num_bytes = wire_bytes(name, num_values)
    return num_bytes, num_bytes


def bottleneck_share() -> float:
    """What the two projections of a bottleneck add to the arithmetic of a stage's blocks."""
    block = 24 * WIDTH**2 + 4 * CONTEXT * WIDTH
    return 4 * WIDTH * BOTTLENECK_WIDTH / (BLOCKS_A_STAGE * block)


def cost_of(name: str, num_slices: int) -> Cost:
    # Every slice as long as every other: what attention leaves out is not counted.
    longer = (1 + bottleneck_share() if name == NARROW else 1) / num_slices
    activation_bytes, gradient_bytes = message_bytes(name, num_slices)
    cost = Cost.uniform(NUM_STAGES, FORWARD_US * longer, BACKWARD_US * longer, activation_bytes)
    return replace(cost, gradient_bytes=(gradient_bytes,) * (NUM_STAGES - 1))


def predicted(
    cell: Cell,
    *,
    quick: bool = False,
    num_slices: int = 1,
    num_microbatches: int = NUM_MICROBATCHES,
) -> Row:
    """One network, one format."""
    (delay_ms, gbps), name = cell
    plain = parse_network({"delay_ms": delay_ms, "bandwidth_gbps": gbps}, "narrow")
    network = plain.for_payload().over_enough()
    cost = cost_of(name, num_slices)
    sizes = (NUM_STAGES, num_microbatches)
    # Every step waits for a vote, as with the default settings.
    if num_slices > 1:
        schedule = search_slices(*sizes, num_slices, cost, network, ballots=network)
    elif quick:
        schedule = generate("1f1b", *sizes, in_flight=num_microbatches)
    else:
        schedule = search(*sizes, cost, network, ballots=network)
    seconds = simulate(schedule, cost, network, ballots=network).step_us / 1e6
    bits = round(8 * cost.activation_bytes[0] * num_slices / MESSAGE_VALUES, 3)
    return delay_ms, gbps, name, bits, round(seconds, 2)


def as_markdown(rows: list[Row]) -> str:
    """Networks down, formats across."""
    bits = {row[2]: row[3] for row in rows}
    lines = [
        ["one way, bandwidth", *(f"{name}: {bits[name]:g} bits" for name in COLUMNS)],
        ["---"] * (1 + len(COLUMNS)),
    ]
    for delay_ms, gbps in NETWORKS:
        of_network = [row for row in rows if row[:2] == (delay_ms, gbps)]
        label = f"{delay_ms:g} ms, {gbps * 1e3:g} Mbit/s"
        lines.append([label, *(f"{row[4]:g}" for row in of_network)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True)
class SlicedRow:
    """Of one network, number of micro-batches and format: a step by number of slices."""

    delay_ms: float
    bandwidth_gbps: float
    num_microbatches: int
    format: str
    step_s: tuple[float, ...]


def sliced(row: tuple[tuple[float, float], int, str]) -> SlicedRow:
    network, num_microbatches, name = row
    steps = []
    for number in SLICES:
        found = predicted((network, name), num_slices=number, num_microbatches=num_microbatches)
        steps.append(found[-1])
    return SlicedRow(*network, num_microbatches, name, tuple(steps))


def sliced_as_markdown(rows: Sequence[SlicedRow]) -> str:
    columns = ["whole" if number == 1 else f"{number} slices" for number in SLICES]
    lines = [
        ["one way, bandwidth", "micro-batches", "wire", *columns],
        ["---"] * (3 + len(SLICES)),
    ]
    for row in rows:
        label = f"{row.delay_ms:g} ms, {row.bandwidth_gbps * 1e3:g} Mbit/s"
        steps = [f"{step_s:g}" for step_s in row.step_s]
        lines.append([label, str(row.num_microbatches), row.format, *steps])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def show_by_slices(as_json: bool) -> None:
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(sliced, BY_SLICES))
    if as_json:
        click.echo("\n".join(json.dumps(asdict(row)) for row in rows))
    else:
        click.echo(sliced_as_markdown(rows))


def as_lines(rows: list[Row]) -> str:
    return "".join(json.dumps(dict(zip(HEAD, row, strict=True))) + "\n" for row in rows)


@click.command(help=__doc__)
@click.option("--quick", is_flag=True, help="1f1b with all micro-batches in flight, not searched.")
@click.option("--by-slices", is_flag=True, help="By number of slices of each sequence instead.")
@click.option("--json", "as_json", is_flag=True, help="As scripts/results/sim keeps it.")
def main(quick: bool, by_slices: bool, as_json: bool) -> None:
    if by_slices:
        show_by_slices(as_json)
        return
    cells = list(product(NETWORKS, COLUMNS))
    one = partial(predicted, quick=quick)
    with ProcessPoolExecutor() as pool:
        rows = list(pool.map(one, cells))
    click.echo(as_lines(rows) if as_json else as_markdown(rows), nl=not as_json)


if __name__ == "__main__":
    main()
