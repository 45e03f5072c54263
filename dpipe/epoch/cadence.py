"""How far apart copies are taken, where guard.every is left out: as close as costs next to nothing.

step    |--compute--send--compute--send--| |------| |------| |------|
taking  |==|                                       at most 1 % of the steps between two
sending |   ~~~~~        ~~~~~        ~~~| |~~~~|  while links are idle, before the next
"""

import math

from dpipe.config.load import Config
from dpipe.memory.copies import state_bytes
from dpipe.network.link import Network
from dpipe.plan.forecast import Forecast
from dpipe.timeline.span import Lane

_SHARE = 0.01  # of the time of a run, that taking copies may cost
# The processor's time for a copy: packed, hashed, sent, taken in, hashed again. Where ranks share
# cores, all of it is time that steps lack. Twice what it takes on a core of 2 GHz.
_TAKEN_US = 4000.0
_TAKEN_BYTES_US = 200.0
_LEAST_IDLE = 0.01  # of a step: a link that is never idle gives so much all the same


def steps_between(config: Config, forecast: Forecast) -> int:
    """The same on all ranks, because it follows from what they agree on."""
    if config.guard.every is not None:
        return config.guard.every
    schedule = forecast.schedule
    longest_steps = 1.0
    for pp_rank in range(len(schedule.programs)):
        stages = [s for s, owner in enumerate(schedule.rank_of_stage) if owner == pp_rank]
        parameter_bytes = sum(forecast.cost.reduce_bytes[stage] for stage in stages)
        copied = state_bytes(parameter_bytes, config.train.optimizer)
        taking_us = _TAKEN_US + max(1, config.guard.copies) * copied / _TAKEN_BYTES_US
        sending_us = config.guard.copies * _bytes_us(forecast.network, pp_rank, copied)
        busy_us = sum(span.duration_us for span in forecast.timeline.on(pp_rank, Lane.SEND))
        idle_us = max(_LEAST_IDLE * forecast.step_us, forecast.step_us - busy_us)
        longest_steps = max(
            longest_steps, taking_us / (_SHARE * forecast.step_us), sending_us / idle_us
        )
    return math.ceil(longest_steps)


def _bytes_us(network: Network, rank: int, num_bytes: int) -> float:
    gbps = network.egress_gbps(rank)
    return num_bytes * 8 / (gbps * 1e3) if gbps > 0 else 0.0
