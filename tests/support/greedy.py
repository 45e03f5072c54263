"""A schedule of `search.greedy` with one stage a rank, for tests."""

import math

from dpipe.network.link import Network
from dpipe.schedule.schedule import Schedule
from dpipe.search.clock import Pipeline, schedule_of
from dpipe.search.greedy import Greedy, Rule
from dpipe.timeline.cost import Cost


def greedy(
    num_stages: int,
    num_microbatches: int,
    cost: Cost,
    network: Network,
    in_flight: int | None = None,
    memory_limit: int | None = None,
) -> Schedule:
    """Parameters as in `schedule.generate.zero_bubble`."""
    pipeline = Pipeline(cost, network, num_microbatches, num_stages, (0.0,) * num_stages)
    first = in_flight or num_stages
    depths = (math.ceil(first * (num_stages - stage) / num_stages) for stage in range(num_stages))
    limit = memory_limit or num_microbatches
    times = Greedy(pipeline, Rule(tuple(depths), (limit,) * num_stages)).run()
    return schedule_of(pipeline, times.programs, "greedy")
