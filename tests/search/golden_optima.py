"""Writes tests/golden/optima.json and optima_of_several.json: small pipelines and their exact
optima (a few minutes).

    PYTHONPATH=tests python tests/search/golden_optima.py

Stages and messages are alike or not, memory is scarce or not. The mixed-integer program has up to 4
stages and 4 micro-batches; where links differ in smaller ones, every order is tried.

Last come 4 stages and 4 micro-batches over links that differ. In half of them a rank's interface is
as wide as its links together; in the others the program knows a lower bound of the optimum alone,
which is the optimum wherever the search reaches it.

The second file has pipelines of two stages a rank, with the backward pass split. Their optimum is
the better one of two placements: stages dealt out in turn, and as ZB-V has them.
"""

import json
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from optimum import enumerated_us, optimum_us

from dpipe.network.link import Link, Network
from dpipe.schedule.generate import interleaved, zb_v
from dpipe.search.bound import lower_bound_us
from dpipe.search.clock import Pipeline, Replay, programs_of
from dpipe.timeline.cost import Cost

PATH = Path(__file__).parent.parent / "golden" / "optima.json"
SEVERAL_PATH = PATH.with_name("optima_of_several.json")
NUM_ALIKE, NUM_ENUMERATED, NUM_UNLIKE = 90, 30, 60
SEVERAL = ((2, 2), (2, 3), (2, 4), (3, 2), (3, 3))  # ranks of two stages, micro-batches
NUM_SEVERAL = 60
WIDE_GBPS = 8.0
MICROSECONDS_A_MB = 8_000  # at 1 Gbit/s

Case = dict[str, Any]


def pipeline_of(case: Case) -> Pipeline:
    """Of a case with times in milliseconds."""

    def each(key: str) -> tuple[float, ...]:
        return tuple(1e3 * time for time in case[key])

    sizes = tuple(round(ms * 1e9 / MICROSECONDS_A_MB) for ms in case["message"])
    cost = Cost(
        forward_us=each("forward"),
        backward_us=tuple(i + w for i, w in zip(each("input"), each("weight"), strict=True)),
        input_us=each("input"),
        weight_us=each("weight"),
        activation_bytes=sizes,
    )
    links = {(a, b): Link(delay, gbps) for a, b, delay, gbps in case["links"]}
    network = Network(default=Link(case["delay"], case.get("interface_gbps", 1.0)), links=links)
    ranks = case.get("ranks", len(case["forward"]))
    return Pipeline(cost, network, case["microbatches"], ranks, (0.0,) * ranks)


def cases() -> Iterator[Case]:
    chance = random.Random(17)
    for number in range(NUM_ALIKE + NUM_ENUMERATED):
        enumerated = number >= NUM_ALIKE
        sizes = [(2, 2), (2, 3), (2, 4), (3, 2), (3, 3), (4, 2)]
        if not enumerated:
            sizes = [(stages, count) for stages in (2, 3, 4) for count in (2, 3, 4)]
        stages, count = sizes[number % len(sizes)]
        yield _case(chance, stages, count, enumerated)
    chance = random.Random(4)
    for number in range(NUM_UNLIKE):
        case = _case(chance, 4, 4, links_differ=True)
        if number % 2 == 0:
            case["interface_gbps"] = WIDE_GBPS
        yield case


def several() -> Iterator[Case]:
    """Two stages a rank; memory is not scarce."""
    chance = random.Random(34)
    for number in range(NUM_SEVERAL):
        ranks, count = SEVERAL[number % len(SEVERAL)]
        case = _case(chance, 2 * ranks, count, links_differ=False)
        case["limit"] = 2 * count
        case["ranks"] = ranks
        yield case


def is_bound(case: Case) -> bool:
    """Whether what is known of its optimum is that it is no less."""
    largest = len(case["forward"]) == case["microbatches"] == 4
    return bool(case["links"]) and largest and "interface_gbps" not in case


def _case(chance: random.Random, stages: int, count: int, links_differ: bool) -> Case:
    alike = chance.random() < 0.4
    forward = [chance.randint(5, 30) for _ in range(stages)]
    message = [chance.choice([0, 3, 10, 25, 40]) for _ in range(stages - 1)]
    if alike:
        forward = [forward[0]] * stages
        message = [message[0]] * (stages - 1)
    delay = chance.choice([0, 5, 20, 60, 100])
    links = []
    if links_differ:
        for stage in range(stages - 1):
            both_ways = chance.choice([5, 20, 60]), chance.choice([0.5, 1.0, 2.0])
            links += [(stage, stage + 1, *both_ways), (stage + 1, stage, *both_ways)]
    return {
        "forward": forward,
        "input": [time * chance.choice([1, 1, 2]) for time in forward],
        "weight": forward,
        "message": message,
        "delay": delay,
        "links": links,
        "microbatches": count,
        "limit": chance.choice([count, count, count - 1]),
    }


def exact_us(case: Case) -> float:
    pipeline = pipeline_of(case)
    if case["links"] and pipeline.num_stages * pipeline.num_microbatches < 16:
        return enumerated_us(pipeline, case["limit"])
    one_by_one = sum(sum(kind) for kind in pipeline.duration_us[:3])
    one_by_one += 2 * sum(hop.alone_us + hop.delay_us for hop in pipeline.hops[0] if hop)
    return optimum_us(pipeline, case["limit"], one_by_one * case["microbatches"])


def exact_of_several_us(case: Case) -> float:
    """The better one of two placements."""
    pipeline = pipeline_of(case)
    num_stages = pipeline.num_stages
    count = pipeline.num_microbatches
    down_and_up = zb_v(num_stages, count)
    dealt_out = interleaved(pipeline.num_ranks, 2, count)
    optima_us = []
    for known in (dealt_out, down_and_up):
        placed = replace(pipeline, placement=known.rank_of_stage)
        enough_us = 1.01 * Replay(placed, programs_of(known)).run().score_us
        optima_us.append(optimum_us(placed, count, enough_us, lower_bound_us(placed)))
    return min(optima_us)


def write(path: Path, rows: Iterable[Case], exact: Callable[[Case], float]) -> None:
    lines = [json.dumps({**row, "optimum_us": round(exact(row), 1)}) for row in rows]
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    write(PATH, cases(), exact_us)
    write(SEVERAL_PATH, several(), exact_of_several_us)
