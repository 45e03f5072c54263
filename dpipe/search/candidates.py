"""Where a search begins: what the generators make, and the rules that `greedy` tries.

Depths grow geometrically, from what fills the pipeline on a fast network to all micro-batches on
every stage, which a slow one may need:

    depths of 4 stages, 8 micro-batches, by the number on the first stage if there were enough
     4:  4 3 2 1          as 1F1B has them
     9:  8 7 5 3
    32:  8 8 8 8          all forwards may go first
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from operator import add, lt

from dpipe.errors import ScheduleError
from dpipe.schedule.check import peak_in_flight
from dpipe.schedule.generate import (
    AUTO,
    GENERATORS,
    ZERO_BUBBLE,
    Generator,
    generate,
    gpipe,
    least_in_flight,
)
from dpipe.schedule.schedule import Schedule
from dpipe.search.clock import FORWARD, INPUT, WEIGHT, Pipeline
from dpipe.search.greedy import Rule

_GROWTH = 1.5  # from one candidate depth to the next; finer steps change the time by little


def bounds(
    num_stages: int,
    num_microbatches: int,
    memory_limit: int | None,
    stages_per_rank: int,
) -> tuple[int, int]:
    """The least activations that a rank must be able to hold, and the most that it may."""
    everything = num_microbatches * stages_per_rank
    limit = everything
    if memory_limit is not None:
        limit = min(memory_limit, everything)
    gpipe(num_stages, num_microbatches, stages_per_rank)  # refuses sizes that make no sense
    num_ranks = num_stages // stages_per_rank
    least = least_in_flight(num_ranks, stages_per_rank, num_microbatches)
    if limit < least:
        raise ScheduleError(
            f"no schedule of {num_stages} stages, {stages_per_rank} a rank, and {num_microbatches} "
            "micro-batches holds"
            f" at most {limit} activations a rank; raise the memory limit to {least}"
            + (", or put fewer stages on a rank" if stages_per_rank > 1 else "")
        )
    return least, limit


def published(num_stages: int, num_microbatches: int, stages_per_rank: int) -> Iterator[Schedule]:
    """What every generator makes for so many stages a rank, with the parameters of its paper."""
    for generator in _usable(stages_per_rank):
        make = _maker(generator, num_stages, num_microbatches, stages_per_rank)
        yield make()
        if generator is ZERO_BUBBLE:
            yield make(memory_limit=num_stages)  # ZB-H1
            yield make(in_flight=2 * num_stages - 1)  # ZB-H2


def generated(
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int,
    shallowest: int,
    limit: int,
) -> Iterator[Schedule]:
    """What those with a depth make, from `shallowest` up to what fits. Stages are dealt out in
    turn.
    """
    deep = [each for each in _usable(stages_per_rank) if "in_flight" in each.takes]
    for depth in _growing(shallowest, limit):
        for generator in deep:
            make = _maker(generator, num_stages, num_microbatches, stages_per_rank)
            made = partial(make, in_flight=depth)
            if "memory_limit" in generator.takes:
                yield from _until_unlimited(made, _held(depth, limit))
            else:
                yield made()


def _usable(stages_per_rank: int) -> list[Generator]:
    """Of those that leave the result as it is."""
    usable = []
    for generator in GENERATORS.values():
        if generator.num_versions == 1 and generator.deals_out(stages_per_rank):
            usable.append(generator)
    return usable


def _maker(
    generator: Generator,
    num_stages: int,
    num_microbatches: int,
    stages_per_rank: int,
) -> Callable[..., Schedule]:
    """What makes schedules of a size from `in_flight` and `memory_limit`, named as "auto" says."""

    def make(**parameters: int) -> Schedule:
        several = {}
        if generator.takes_several_stages:
            several["stages_per_rank"] = stages_per_rank
        schedule = generate(
            generator.name,
            num_stages,
            num_microbatches,
            **several,
            **parameters,
        )
        values = [f"{key}={value}" for key, value in parameters.items()]
        name = f"{AUTO}: {generator.name} {', '.join(values)}"
        return replace(schedule, name=name.rstrip())

    return make


def _until_unlimited(
    make: Callable[..., Schedule], memory_limits: Sequence[int]
) -> Iterator[Schedule]:
    for memory_limit in memory_limits:
        schedule = make(memory_limit=memory_limit)
        yield schedule
        if max(peak_in_flight(schedule)) < memory_limit:
            break  # a higher limit changes nothing


def _held(depth: int, limit: int) -> list[int]:
    """How many micro-batches a rank with `depth` in flight may hold: weight gradients soon, later,
    or at the end.
    """
    return sorted({min(limit, depth), min(limit, 2 * depth), limit})


# The deepest is always there: with it nothing but the memory limit holds a rank back.
def _growing(shallowest: int, deepest: int) -> Iterator[int]:
    depth = shallowest
    while depth < deepest:
        yield depth
        depth = max(depth + 1, int(depth * _GROWTH))
    yield deepest


def rules(pipeline: Pipeline, limits: tuple[int, ...]) -> Iterator[Rule]:
    """Those with few micro-batches under way first."""
    num_microbatches = pipeline.num_microbatches
    by_distance = _by_distance(pipeline)
    by_time = _by_time(pipeline)
    # Left whole, a backward pass may take less than its two halves.
    _, made_us, weight_us, whole_us = pipeline.duration_us
    halves_us = map(add, made_us, weight_us)
    is_cheaper_whole = any(map(lt, whole_us, halves_us))
    splits_choices = (True, False) if is_cheaper_whole else (True,)
    # Listed: each depth goes through all of them. Where all hops are alike the two shares make
    # the same rules, which `seen` leaves out.
    variants = list(product((by_distance, by_time), (False, True), splits_choices))
    seen = set()
    for first in _growing(pipeline.num_stages, pipeline.num_stages * num_microbatches):
        for share, forward_first, splits in variants:
            depths = []
            for part in share:
                depth = math.ceil(first * part - _ROUNDING)
                depths.append(min(num_microbatches, depth))
            rule = Rule(tuple(depths), limits, forward_first, splits)
            if rule not in seen:
                seen.add(rule)
                yield rule


def patient(pipeline: Pipeline, rule: Rule) -> Iterator[Rule]:
    """`rule` with weight gradients put off: as many as there is time for behind a stage's last
    gradient, and twice as many.
    """
    numbers = list(_weights_at_the_end(pipeline))
    for times in (1, 2):
        put_off = [times * number for number in numbers]
        yield replace(rule, put_off=tuple(put_off))


def _weights_at_the_end(pipeline: Pipeline) -> Iterator[int]:
    """By stage, how many weight gradients it can make while its gradient goes to the first one."""
    left_us = 0.0
    last = pipeline.num_stages - 1
    for stage in range(pipeline.num_stages):
        weight_us = max(pipeline.duration_us[WEIGHT][stage], _ROUNDING)
        number = int(left_us / weight_us)
        yield min(pipeline.num_microbatches, number)
        left_us += pipeline.duration_us[INPUT][stage]
        following = min(stage + 1, last)
        hop = pipeline.hops[INPUT][following]
        if hop is not None:
            left_us += hop.alone_us + hop.delay_us


# Where hops are long, ranks before a slow one have to hold more than their distance says, and
# those behind it less; where all hops are alike, the two shares are almost the same.
def _by_distance(pipeline: Pipeline) -> tuple[float, ...]:
    """By stage, how far it is from the end, as a share of the first one's distance."""
    stages = pipeline.num_stages
    return tuple((stages - stage) / stages for stage in range(stages))


def _by_time(pipeline: Pipeline) -> tuple[float, ...]:
    """By stage, how long a micro-batch takes from there to the end and back, as a share of the
    first one's time.
    """
    times_us = []
    left_us = 0.0
    for stage in reversed(range(pipeline.num_stages)):
        for kind in (FORWARD, INPUT):
            left_us += pipeline.duration_us[kind][stage]
        times_us.append(left_us)
        for kind, source in ((FORWARD, stage - 1), (INPUT, stage)):
            hop = pipeline.hops[kind][source]
            if hop is not None:
                left_us += hop.alone_us + hop.delay_us
    first_us = max(times_us[-1], _ROUNDING)
    return tuple(time_us / first_us for time_us in reversed(times_us))


_ROUNDING = 1e-9
