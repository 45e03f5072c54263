"""Schedule "auto" where sequences are cut into slices: the depth at which 1F1B of slices (Seq1F1B,
Sun et al. 2024) is fastest on a given network.

Slices of one sequence depend on each other, which the fast clock of the other search does not know:
so each depth is simulated, from what a rank must hold to all slices of the step.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from dpipe.errors import ScheduleError
from dpipe.network.link import Network
from dpipe.schedule.check import peak_in_flight
from dpipe.schedule.generate import AUTO, one_f_one_b
from dpipe.schedule.schedule import Schedule
from dpipe.search.auto import HeldBytes
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period

_GROWTH = 1.5  # from one depth to the next


def search_slices(
    num_stages: int,
    num_microbatches: int,
    num_slices: int,
    cost: Cost,
    network: Network,
    *,
    memory_limit: int | None = None,
    replicas: Replicas | None = None,
    ballots: Network | None = None,
    held_bytes: HeldBytes | None = None,
    most_bytes: float = math.inf,
) -> Schedule:
    """As `search.auto.search`, with `num_slices` of each sequence; `memory_limit` counts slices.

    Among equals the one that holds least; where none keeps to `most_bytes`, the one that takes
    least. Raises `ScheduleError` where `memory_limit` is too low.
    """
    orders = orders_of_slices(num_stages, num_microbatches, num_slices, memory_limit)
    best = shallowest = next(orders)
    least_us = math.inf
    for order in (shallowest, *orders):
        if held_bytes is not None and max(held_bytes(order)) > most_bytes:
            continue
        scenario = Scenario(order, cost, network, replicas=replicas, ballots=ballots)
        found_us = period(scenario, least_us)
        # A deeper one must be worth its memory.
        if found_us < least_us - 0.5:
            least_us = found_us
            best = order
    return best


def orders_of_slices(
    num_stages: int,
    num_microbatches: int,
    num_slices: int,
    memory_limit: int | None = None,
) -> Iterator[Schedule]:
    """From the shallowest to the deepest that holds at most `memory_limit` slices on any rank.

    Raises `ScheduleError` where the shallowest holds more.
    """
    everything = num_microbatches * num_slices
    limit = everything if memory_limit is None else min(memory_limit, everything)
    if limit < num_slices:
        raise ScheduleError(
            f"the {num_slices} slices of a sequence are held together, and the memory limit is "
            f"{limit}; raise it to {num_slices}, or cut fewer slices"
        )
    depth = num_slices
    while True:
        order = one_f_one_b(num_stages, num_microbatches, depth, num_slices)
        assert max(peak_in_flight(order)) <= limit
        name = f"{AUTO}: 1f1b in_flight={depth}, {num_slices} slices"
        yield replace(order, name=name)
        if depth == limit:
            return
        depth = min(limit, max(depth + 1, int(depth * _GROWTH)))
