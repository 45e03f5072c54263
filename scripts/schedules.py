#!/usr/bin/env python3
"""How good the schedules of "auto" are: stages of GPT-3 XL on the network profiles, simulated.

\b
    scripts/schedules.py bound
        12 stages beside the lower bound and the best published schedule; takes ten minutes
    scripts/schedules.py few
        few micro-batches, beside what "auto" took when it held no more than the first rank had in
        flight
    scripts/schedules.py interleaved
        12 ranks of two stages each, beside the bound, the best published schedule and "auto" with
        one stage a rank; takes ten minutes
    scripts/schedules.py memory
        beside 1F1B, where both may hold as many activations as 1F1B does
    scripts/schedules.py optimum
        the same for small pipelines, beside the exact optimum
    scripts/schedules.py overlap
        "2bw", whose steps overlap, beside "auto"; it learns by gradients that are a step late
    scripts/schedules.py time
        how long a search of 12 stages x 64 micro-batches keeps a core; nothing else should run

Each writes scripts/results/sim/schedules_NAME.jsonl, and prints it as a table. With --print it only
prints what is there.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from optimum import optimum_us

from dpipe.network.link import Link, Network
from dpipe.network.profile import load_network
from dpipe.schedule.generate import AUTO, TWO_BW, generate
from dpipe.schedule.schedule import Schedule
from dpipe.search.auto import pipeline_on, search
from dpipe.search.bound import lower_bound_us
from dpipe.search.candidates import published
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period, simulate_alone

ROOT = Path(__file__).resolve().parent.parent
PROFILES = ROOT / "netem" / "profiles"
RESULTS = ROOT / "scripts" / "results" / "sim"
NUM_STAGES = 12
FORWARD_US, BACKWARD_US = 66_000.0, 132_000.0  # of a rank
MESSAGES_MIB = (16, 8)  # a micro-batch's activation in fp32 and in bf16
MICROBATCHES = (8, 12, 16, 32, 64)
FEW_AND_MANY = (16, 64)
STAGES_PER_RANK = 2  # of interleaved schedules
SMALL = ((3, 4), (3, 5), (4, 4))  # stages, micro-batches
_TURNS = 2  # of a search that is timed; what else a machine does makes it longer, never shorter
AT_ONCE = Network(default=Link(0, 1))  # a vote takes no time: the step time is that of a step alone

# Seconds that "auto" took on 2026-11-21, with at most as many micro-batches in flight as there are:
# by profile and number of micro-batches, with messages of 16 and of 8 MiB.
BEFORE_S = {
    ("10ms-1gbps", 12): (8.50, 6.26),
    ("10ms-1gbps", 16): (9.58, 6.48),
    ("50ms-1gbps", 12): (9.38, 7.14),
    ("50ms-1gbps", 16): (10.46, 7.94),
    ("regional", 12): (6.99, 5.35),
    ("regional", 16): (7.21, 5.62),
    ("worldwide", 12): (11.92, 7.77),
    ("worldwide", 16): (12.29, 8.80),
}

Row = dict[str, Any]


def networks() -> Iterator[tuple[str, Network]]:
    for path in sorted(PROFILES.glob("*.toml")):
        yield path.stem, load_network(path)


def cost_of(num_ranks: int, message_mib: int, stages_per_rank: int = 1) -> Cost:
    message_bytes = message_mib << 20
    forward_us = FORWARD_US / stages_per_rank
    backward_us = BACKWARD_US / stages_per_rank
    num_stages = num_ranks * stages_per_rank
    return Cost.uniform(num_stages, forward_us, backward_us, message_bytes=message_bytes)


def _period_us(
    schedule: Schedule,
    cost: Cost,
    network: Network,
    ballots: Network | None = None,
) -> float:
    return period(Scenario(schedule, cost, network, ballots=ballots))


def seconds(time_us: float) -> float:
    return round(time_us / 1e6, 4)


def bound_rows() -> Iterator[Row]:
    for name, network in networks():
        for mib in MESSAGES_MIB:
            for ballots in (network, None):
                for count in MICROBATCHES:
                    times = _beside_bound(network, mib, ballots, count)
                    yield {
                        "network": name,
                        "message_mib": mib,
                        "votes": ballots is not None,
                        "micro_batches": count,
                        **times,
                    }


def _beside_bound(network: Network, mib: int, ballots: Network | None, count: int) -> Row:
    cost = cost_of(NUM_STAGES, mib)
    step_us = partial(_period_us, cost=cost, network=network, ballots=ballots)
    schedule = search(NUM_STAGES, count, cost, network, ballots=ballots)
    pipeline = pipeline_on(network, cost, count, NUM_STAGES, ballots=ballots)
    return {
        "auto_s": seconds(step_us(schedule)),
        "bound_s": seconds(lower_bound_us(pipeline)),
        "published_s": seconds(min(map(step_us, published(NUM_STAGES, count, 1)))),
    }


def interleaved_rows() -> Iterator[Row]:
    """Every step waits for the vote."""
    for name, network in networks():
        for mib in MESSAGES_MIB:
            for count in FEW_AND_MANY:
                yield {
                    "network": name,
                    "message_mib": mib,
                    "micro_batches": count,
                    **_several_stages(network, mib, count),
                }


def _several_stages(network: Network, mib: int, count: int) -> Row:
    cost = cost_of(NUM_STAGES, mib, STAGES_PER_RANK)
    whole = cost_of(NUM_STAGES, mib)
    several = search(
        cost.num_stages,
        count,
        cost,
        network,
        stages_per_rank=STAGES_PER_RANK,
        ballots=network,
    )
    single = search(NUM_STAGES, count, whole, network, ballots=network)
    step_us = partial(_period_us, network=network, ballots=network)
    made = published(cost.num_stages, count, STAGES_PER_RANK)
    known = {each.name.removeprefix(f"{AUTO}: "): each for each in made}
    times_us = {name: step_us(each, cost) for name, each in known.items()}
    best = min(times_us, key=times_us.__getitem__)
    # Each placement of the stages has a bound of its own.
    pipeline = pipeline_on(network, cost, count, NUM_STAGES, ballots=network)
    placements = {each.rank_of_stage for each in known.values()}
    bounds_us = [lower_bound_us(replace(pipeline, placement=each)) for each in placements]
    return {
        "published": best,
        "published_s": seconds(times_us[best]),
        "bound_s": seconds(min(bounds_us)),
        "auto_s": seconds(step_us(several, cost)),
        "one_stage_s": seconds(step_us(single, whole)),
    }


def few_rows() -> Iterator[Row]:
    for (name, count), before in BEFORE_S.items():
        network = load_network(PROFILES / f"{name}.toml").over_enough()
        for mib, before_s in zip(MESSAGES_MIB, before, strict=True):
            cost = cost_of(NUM_STAGES, mib)
            schedule = search(NUM_STAGES, count, cost, network)
            yield {
                "network": name,
                "micro_batches": count,
                "message_mib": mib,
                "before_s": before_s,
                "auto_s": seconds(_period_us(schedule, cost, network)),
            }


def overlap_rows() -> Iterator[Row]:
    """Of micro-batches as few as fine-tuning has; the best of three depths."""
    for name in sorted({name for name, _ in BEFORE_S}):
        network = load_network(PROFILES / f"{name}.toml").over_enough()
        for mib in MESSAGES_MIB:
            cost = cost_of(NUM_STAGES, mib)
            step_us = partial(_period_us, cost=cost, network=network, ballots=network)
            for count in (16, 32):
                auto = search(NUM_STAGES, count, cost, network, ballots=network)
                depths = (2 * NUM_STAGES, count, count * 3 // 2)
                made = [generate(TWO_BW.name, NUM_STAGES, count, in_flight=n) for n in depths]
                yield {
                    "network": name,
                    "message_mib": mib,
                    "micro_batches": count,
                    "auto_s": seconds(step_us(auto)),
                    "overlapping_s": seconds(min(map(step_us, made))),
                }


def memory_rows() -> Iterator[Row]:
    for name, network in networks():
        for mib in MESSAGES_MIB:
            for count in FEW_AND_MANY:
                cost = cost_of(NUM_STAGES, mib)
                step_us = partial(_period_us, cost=cost, network=network, ballots=network)
                yield {
                    "network": name,
                    "message_mib": mib,
                    "micro_batches": count,
                    **_at_equal_memory(NUM_STAGES, count, cost, network, step_us),
                }


def _at_equal_memory(
    num_stages: int,
    count: int,
    cost: Cost,
    network: Network,
    step_us: Callable[[Schedule], float],
    ballots: Network | None = None,
) -> Row:
    schedule = search(
        num_stages,
        count,
        cost,
        network,
        memory_limit=num_stages,
        ballots=ballots or network,
    )
    return {
        "one_f_one_b_s": seconds(step_us(generate("1f1b", num_stages, count))),
        "auto_s": seconds(step_us(schedule)),
    }


def optimum_rows() -> Iterator[Row]:
    for name, network in networks():
        network = network.over_enough()
        sample = pipeline_on(network, cost_of(3, 1), 1, 3)
        if network.links or not all(sample.sends_in_turn):
            continue  # there the mixed-integer program knows no more than a bound
        for mib in MESSAGES_MIB:
            for num_stages, count in SMALL:
                yield {
                    "network": name,
                    "message_mib": mib,
                    "stages": num_stages,
                    "micro_batches": count,
                    **_beside_optimum(network, mib, num_stages, count),
                }


def _beside_optimum(network: Network, mib: int, num_stages: int, count: int) -> Row:
    cost = cost_of(num_stages, mib)

    def step_us(schedule: Schedule) -> float:
        return simulate_alone(Scenario(schedule, cost, network)).duration_us

    row = _at_equal_memory(num_stages, count, cost, network, step_us, AT_ONCE)
    pipeline = pipeline_on(network, cost, count, num_stages, ballots=AT_ONCE)
    # The optimum is no more than 1F1B takes; a bound as narrow as that makes it quick to find.
    longest_us = 1.01 * step_us(generate("1f1b", num_stages, count))
    row["optimum_s"] = seconds(optimum_us(pipeline, num_stages, longest_us))
    return row


def time_rows() -> Iterator[Row]:
    count = MICROBATCHES[-1]
    for name, network in networks():
        for mib in MESSAGES_MIB:
            for ballots in (network, None):
                one = partial(_search_s, network, mib, ballots, count)
                yield {
                    "network": name,
                    "message_mib": mib,
                    "votes": ballots is not None,
                    "stages": NUM_STAGES,
                    "micro_batches": count,
                    "cpu_s": round(min(one() for _ in range(_TURNS)), 2),
                }


def _search_s(network: Network, mib: int, ballots: Network | None, count: int) -> float:
    """Of one core."""
    cost = cost_of(NUM_STAGES, mib)
    began_s = time.process_time()
    search(NUM_STAGES, count, cost, network, ballots=ballots)
    return time.process_time() - began_s


def bound_table(rows: list[Row]) -> Iterator[str]:
    counts = [*dict.fromkeys(row["micro_batches"] for row in rows)]
    heads = [f"M = {count}" for count in counts]
    yield from _head("network, message", "steps", *heads)
    for begin in range(0, len(rows), len(counts)):
        group = rows[begin : begin + len(counts)]
        first = group[0]
        steps = "vote" if first["votes"] else "overlap"
        cells = [f"{row['auto_s']:.2f} ({above(row):+.1f} %)" for row in group]
        yield _line(f"{first['network']}, {first['message_mib']} MiB", steps, *cells)


def above(row: Row) -> float:
    """The bound, in percent of it; an order that reaches it may be rounded to less."""
    percent = 100 * row["auto_s"] / row["bound_s"] - 100
    return max(0.0, float(percent))


def few_table(rows: list[Row]) -> Iterator[str]:
    yield from _head("network, message", "M", "before", "auto", "less")
    for row in rows:
        less = _less(row["auto_s"], row["before_s"])
        times = f"{row['before_s']:.2f}", f"{row['auto_s']:.2f}"
        yield _line(_network(row), row["micro_batches"], *times, less)


def overlap_table(rows: list[Row]) -> Iterator[str]:
    yield from _head("network, message", "M", "auto", "2bw", "less")
    for row in rows:
        less = _less(row["overlapping_s"], row["auto_s"])
        times = f"{row['auto_s']:.2f}", f"{row['overlapping_s']:.2f}"
        yield _line(_network(row), row["micro_batches"], *times, less)


def interleaved_table(rows: list[Row]) -> Iterator[str]:
    names = ("best published", "auto", "less", "above the bound", "auto, one stage a rank")
    yield from _head("network, message", "M", *names)
    for row in rows:
        best = f"{row['published_s']:.2f} ({row['published']})"
        less = _less(row["auto_s"], row["published_s"])
        times = best, f"{row['auto_s']:.2f}", less, f"{above(row):.1f} %"
        one_stage = f"{row['one_stage_s']:.2f}"
        yield _line(_network(row), row["micro_batches"], *times, one_stage)


def memory_table(rows: list[Row]) -> Iterator[str]:
    yield from _head("network, message", "M", "1F1B", "auto", "less")
    for row in rows:
        less = _less(row["auto_s"], row["one_f_one_b_s"])
        times = f"{row['one_f_one_b_s']:.2f}", f"{row['auto_s']:.2f}"
        yield _line(_network(row), row["micro_batches"], *times, less)


def optimum_table(rows: list[Row]) -> Iterator[str]:
    yield from _head("network, message", "stages x M", "1F1B", "auto", "optimum", "above it")
    for row in rows:
        keys = "one_f_one_b_s", "auto_s", "optimum_s"
        times = [f"{row[key]:.3f}" for key in keys]
        more = 100 * row["auto_s"] / row["optimum_s"] - 100
        size = f"{row['stages']} x {row['micro_batches']}"
        yield _line(_network(row), size, *times, f"{max(0.0, more):.1f} %")


def time_table(rows: list[Row]) -> Iterator[str]:
    yield from _head("network, message", "vote", "overlap")
    for voting, overlapping in zip(rows[::2], rows[1::2], strict=True):
        times = [f"{row['cpu_s']:.1f}" for row in (voting, overlapping)]
        yield _line(_network(voting), *times)


def _network(row: Row) -> str:
    return f"{row['network']}, {row['message_mib']} MiB"


def _less(now_s: float, before_s: float) -> str:
    percent = round(100 - 100 * now_s / before_s, 1) + 0.0  # no minus zero
    return f"{percent:.1f} %"


def _head(*heads: str) -> Iterator[str]:
    yield _line(*heads)
    yield "| --- " * len(heads) + "|"


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


Rows = Callable[[], Iterable[Row]]
Table = Callable[[list[Row]], Iterable[str]]
TABLES: dict[str, tuple[Rows, Table]] = {
    "bound": (bound_rows, bound_table),
    "few": (few_rows, few_table),
    "interleaved": (interleaved_rows, interleaved_table),
    "memory": (memory_rows, memory_table),
    "overlap": (overlap_rows, overlap_table),
    "optimum": (optimum_rows, optimum_table),
    "time": (time_rows, time_table),
}


def path_of(name: str) -> Path:
    return RESULTS / f"schedules_{name}.jsonl"


def kept(name: str) -> list[Row]:
    lines = path_of(name).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


@click.command(help=__doc__)
@click.argument("name", type=click.Choice(tuple(TABLES)))
@click.option("--print", "only_print", is_flag=True, help="Print the results that are there.")
def main(name: str, only_print: bool) -> None:
    make, table = TABLES[name]
    if not only_print:
        lines = [json.dumps(row) + "\n" for row in make()]
        path_of(name).write_text("".join(lines), encoding="utf-8")
    click.echo("\n".join(table(kept(name))))


if __name__ == "__main__":
    main()
