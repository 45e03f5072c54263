#!/usr/bin/env python3
"""How good the schedules of "auto" are: GPT-3 XL in 12 stages on every network profile, simulated.

\b
    scripts/schedules.py bound
        beside the lower bound and the best published schedule; takes a quarter of an hour
    scripts/schedules.py memory
        beside 1F1B, where both may hold as many activations as 1F1B does

Each writes scripts/results/sim/schedules_NAME.jsonl, and prints it as a table. With --print it only
prints what is there.
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from dpipe.network.link import Network
from dpipe.network.profile import load_network
from dpipe.schedule.generate import generate
from dpipe.schedule.schedule import Schedule
from dpipe.search.auto import pipeline_on, search
from dpipe.search.bound import lower_bound_us
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "netem" / "profiles"
RESULTS = ROOT / "scripts" / "results" / "sim"
NUM_STAGES = 12
FORWARD_US, BACKWARD_US = 66_000.0, 132_000.0
MESSAGES_MIB = (16, 8)  # a micro-batch's activation in fp32 and in bf16
MICROBATCHES = (8, 12, 16, 32, 64)

Row = dict[str, Any]


def networks() -> Iterator[tuple[str, Network]]:
    for path in sorted(PROFILES.glob("*.toml")):
        yield path.stem, load_network(path)


def cost_of(message_mib: int) -> Cost:
    return Cost.uniform(NUM_STAGES, FORWARD_US, BACKWARD_US, message_bytes=message_mib << 20)


def published(num_microbatches: int) -> Iterator[Schedule]:
    yield generate("gpipe", NUM_STAGES, num_microbatches)
    yield generate("1f1b", NUM_STAGES, num_microbatches)
    yield generate("zero-bubble", NUM_STAGES, num_microbatches, memory_limit=NUM_STAGES)  # ZB-H1
    yield generate("zero-bubble", NUM_STAGES, num_microbatches, in_flight=2 * NUM_STAGES - 1)


def bound_rows() -> Iterator[Row]:
    for name, network in networks():
        for mib in MESSAGES_MIB:
            for ballots in (network, None):
                for count in MICROBATCHES:
                    yield _beside_bound(name, network, mib, ballots, count)


def _beside_bound(
    name: str, network: Network, mib: int, ballots: Network | None, count: int
) -> Row:
    cost = cost_of(mib)
    began_s = time.process_time()
    schedule = search(NUM_STAGES, count, cost, network, ballots=ballots)
    searched_s = time.process_time() - began_s
    pipeline = pipeline_on(network, cost, count, NUM_STAGES, ballots=ballots)
    best_us = min(
        period(Scenario(plan, cost, network, ballots=ballots)) for plan in published(count)
    )
    return {
        "network": name,
        "message_mib": mib,
        "votes": ballots is not None,
        "micro_batches": count,
        "auto_s": round(period(Scenario(schedule, cost, network, ballots=ballots)) / 1e6, 4),
        "bound_s": round(lower_bound_us(pipeline) / 1e6, 4),
        "published_s": round(best_us / 1e6, 4),
        "searched_s": round(searched_s, 1),
    }


def memory_rows() -> Iterator[Row]:
    for name, network in networks():
        for mib in MESSAGES_MIB:
            for count in (16, 64):
                cost = cost_of(mib)
                plan = generate("1f1b", NUM_STAGES, count)
                schedule = search(
                    NUM_STAGES, count, cost, network, memory_limit=NUM_STAGES, ballots=network
                )
                whole, auto = (
                    round(period(Scenario(each, cost, network, ballots=network)) / 1e6, 4)
                    for each in (plan, schedule)
                )
                yield {
                    "network": name,
                    "message_mib": mib,
                    "micro_batches": count,
                    "one_f_one_b_s": whole,
                    "auto_s": auto,
                }


def bound_table(rows: list[Row]) -> Iterator[str]:
    heads = " | ".join(f"M = {count}" for count in MICROBATCHES)
    yield f"| network, message | steps | {heads} |"
    yield "| --- " * (2 + len(MICROBATCHES)) + "|"
    for begin in range(0, len(rows), len(MICROBATCHES)):
        group = rows[begin : begin + len(MICROBATCHES)]
        first = group[0]
        cells = " | ".join(
            f"{row['auto_s']:.2f} (+{100 * row['auto_s'] / row['bound_s'] - 100:.1f} %)"
            for row in group
        )
        steps = "vote" if first["votes"] else "overlap"
        yield f"| {first['network']}, {first['message_mib']} MiB | {steps} | {cells} |"


def memory_table(rows: list[Row]) -> Iterator[str]:
    yield "| network, message | M | 1F1B | auto | less |"
    yield "| --- | --- | --- | --- | --- |"
    for row in rows:
        less = 100 - 100 * row["auto_s"] / row["one_f_one_b_s"]
        yield (
            f"| {row['network']}, {row['message_mib']} MiB | {row['micro_batches']} "
            f"| {row['one_f_one_b_s']:.2f} | {row['auto_s']:.2f} | {less:.1f} % |"
        )


TABLES: dict[str, tuple[Callable[[], Iterator[Row]], Callable[[list[Row]], Iterator[str]]]] = {
    "bound": (bound_rows, bound_table),
    "memory": (memory_rows, memory_table),
}


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(tuple(TABLES)))
@click.option("--print", "only_print", is_flag=True, help="Print the results that are there.")
def main(name: str, only_print: bool) -> None:
    make, table = TABLES[name]
    path = RESULTS / f"schedules_{name}.jsonl"
    if not only_print:
        path.write_text("".join(json.dumps(row) + "\n" for row in make()))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    click.echo("\n".join(table(rows)))


if __name__ == "__main__":
    main()
