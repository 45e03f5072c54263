"""Schedule "auto": the generator and the parameters that the simulator finds fastest on a given
network.

Besides the generators there is `greedy`, which follows the network's clock. On the published
networks (12 stages, 64 micro-batches) it reaches what compute and egress allow:
tests/timeline/test_greedy.py.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from dpipe.errors import ScheduleError
from dpipe.network.link import Network
from dpipe.schedule.check import peak_in_flight
from dpipe.schedule.generate import (
    AUTO,
    GENERATORS,
    Generator,
    generate,
    gpipe,
    least_in_flight,
)
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.greedy import greedy
from dpipe.timeline.simulate import period

_GROWTH = 1.5  # from one candidate depth to the next; finer steps change the time by little


def search(
    num_stages: int,
    num_microbatches: int,
    cost: Cost,
    network: Network,
    *,
    memory_limit: int | None = None,
    stages_per_rank: int = 1,
    replicas: Replicas | None = None,
    ballots: Network | None = None,
    held_bytes: Callable[[Schedule], int] | None = None,
    most_bytes: float = math.inf,
) -> Schedule:
    """The compute-only schedule with the shortest step time (`simulate.period`); among equals the
    one that holds least.

    `replicas` and `ballots` are as in `simulate`: with replicas one is found which leaves the
    network free for their exchange. `memory_limit` is the most activations (stage x micro-batch)
    that any rank may hold. Where `held_bytes` says what a schedule takes, it takes at most
    `most_bytes`; where none does, the result is the one that takes least. Its name says what was
    chosen. Deterministic, so that every rank of a run finds the same. Raises `ScheduleError` where
    `memory_limit` is too low, saying what would do.
    """
    least, limit = _bounds(num_stages, num_microbatches, memory_limit, stages_per_rank)
    shallowest = least if math.isfinite(most_bytes) else max(least, min(num_stages, limit))

    candidates = chain(
        _candidates(num_stages, num_microbatches, stages_per_rank, shallowest, limit),
        _greedy_candidates(num_stages, num_microbatches, cost, network, limit)
        if stages_per_rank == 1
        else (),
    )
    found = [c for c in candidates if max(peak_in_flight(c)) <= limit]
    if held_bytes is not None:
        found = [c for c in found if held_bytes(c) <= most_bytes] or [min(found, key=held_bytes)]
    return _best(
        found, partial(period, cost=cost, network=network, replicas=replicas, ballots=ballots)
    )


def _best(candidates: Sequence[Schedule], period_us: Callable[..., float]) -> Schedule:
    """The last ones are tried first: they follow the network's clock, and the others soon fall
    behind them.
    """
    best: tuple[float, int, int] = (math.inf, 0, 0)
    for number, candidate in reversed([*enumerate(candidates)]):
        held = max(peak_in_flight(candidate))
        found_us = period_us(candidate, most_us=best[0] + 0.5)
        rounded_us = math.inf if found_us == math.inf else round(found_us)
        best = min(best, (rounded_us, held, number))
    return candidates[best[2]]


def first_fit(
    num_stages: int,
    num_microbatches: int,
    *,
    memory_limit: int | None = None,
    stages_per_rank: int = 1,
) -> Schedule:
    """Some schedule that `search` would weigh, at once: it raises what `search` would, before the
    time is spent.
    """
    least, limit = _bounds(num_stages, num_microbatches, memory_limit, stages_per_rank)
    shallowest = max(least, min(num_stages, limit))
    candidates = _candidates(num_stages, num_microbatches, stages_per_rank, shallowest, limit)
    return next(c for c in candidates if max(peak_in_flight(c)) <= limit)


def _bounds(
    num_stages: int, num_microbatches: int, memory_limit: int | None, stages_per_rank: int
) -> tuple[int, int]:
    """The least activations that a rank must be able to hold, and the most that it may."""
    everything = num_microbatches * stages_per_rank
    limit = everything if memory_limit is None else min(memory_limit, everything)
    gpipe(num_stages, num_microbatches, stages_per_rank)  # refuses sizes that make no sense
    least = least_in_flight(num_stages // stages_per_rank, stages_per_rank, num_microbatches)
    if limit < least:
        raise ScheduleError(
            f"no schedule of {num_stages} stages, {stages_per_rank} a rank, and {num_microbatches} "
            "micro-batches holds"
            f" at most {limit} activations a rank; raise the memory limit to {least}"
            + (", or put fewer stages on a rank" if stages_per_rank > 1 else "")
        )
    return least, limit


def _candidates(
    num_stages: int, num_microbatches: int, stages_per_rank: int, shallowest: int, limit: int
) -> Iterator[Schedule]:
    """What every generator makes for so many stages a rank, with depths that grow geometrically
    from `shallowest` up to what fits.
    """

    def made_by(generator: Generator, **parameters: int) -> Schedule:
        several = {"stages_per_rank": stages_per_rank} if generator.takes_several_stages else {}
        schedule = generate(generator.name, num_stages, num_microbatches, **several, **parameters)
        values = ", ".join(f"{key}={value}" for key, value in parameters.items())
        return replace(schedule, name=f"{AUTO}: {generator.name} {values}".rstrip())

    usable = [
        generator
        for generator in GENERATORS.values()
        if (stages_per_rank > 1 and generator.takes_several_stages)
        or (stages_per_rank == 1 and not generator.needs_several_stages)
    ]
    for generator in usable:
        if "in_flight" not in generator.takes:
            yield made_by(generator)
    for depth in _depths(shallowest, limit):
        for generator in usable:
            if "in_flight" not in generator.takes:
                continue
            make = partial(made_by, generator, in_flight=depth)
            if "memory_limit" in generator.takes:
                yield from _until_unlimited(make, _held(depth, limit))
            else:
                yield make()


def _until_unlimited(
    make: Callable[..., Schedule], memory_limits: Sequence[int]
) -> Iterator[Schedule]:
    for memory_limit in memory_limits:
        schedule = make(memory_limit=memory_limit)
        yield schedule
        if max(peak_in_flight(schedule)) < memory_limit:
            break  # a higher limit changes nothing


def _greedy_candidates(
    num_stages: int, num_microbatches: int, cost: Cost, network: Network, limit: int
) -> Iterator[Schedule]:
    def made(in_flight: int, memory_limit: int) -> Schedule:
        schedule = greedy(num_stages, num_microbatches, cost, network, in_flight, memory_limit)
        values = f"in_flight={in_flight}, memory_limit={memory_limit}"
        return replace(schedule, name=f"{AUTO}: greedy {values}")

    for depth in _depths(min(num_stages, limit), limit):
        yield from _until_unlimited(partial(made, depth), _held(depth, limit))


def _held(depth: int, limit: int) -> list[int]:
    """How many micro-batches a rank with `depth` in flight may hold: weight gradients soon, later,
    or at the end.
    """
    return sorted({min(limit, depth), min(limit, 2 * depth), limit})


def _depths(shallowest: int, deepest: int) -> Iterator[int]:
    depth = shallowest
    while depth < deepest:
        yield depth
        depth = max(depth + 1, int(depth * _GROWTH))
    yield deepest
