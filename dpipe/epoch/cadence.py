"""How far apart copies are taken, where guard.every is left out: as close as costs next to nothing.

step    |--compute--send--compute--send--| |------| |------| |------|
taking  |==|                                       at most 1 % of the steps between two
sending |   ~~~~~        ~~~~~        ~~~| |~~~~|  while links are idle, before the next

An epoch begins with the step that was predicted, and goes on with the steps that its ranks have
measured: all have heard the same of them.
"""

import math
from collections import Counter
from dataclasses import replace
from statistics import median

from dpipe.config.load import Config
from dpipe.engine.update import Verdict
from dpipe.memory.copies import state_bytes
from dpipe.network.link import Network
from dpipe.plan.forecast import Forecast, server_ranks
from dpipe.timeline.span import Lane

_SHARE = 0.01  # of the time of a run, that taking copies may cost
# The processor's time for a copy: packed, hashed, sent, taken in, hashed again. Where ranks share
# cores, all of it is time that steps lack. Twice what it takes on a core of 2 GHz.
_TAKEN_US = 4000.0
_TAKEN_BYTES_US = 200.0
_FIRST_MEASURED = 8  # steps
_LEAST_IDLE = 0.01  # of a step: a link that is never idle gives so much all the same


class Cadence:
    """`every` is how many steps apart copies are taken: the same on all ranks, because it follows
    from what they agree on and have heard in the same verdicts.
    """

    def __init__(self, config: Config, forecast: Forecast) -> None:
        self.every = steps_between(config, forecast)
        self._config = config
        self._forecast = forecast
        self._seconds: list[float] = []  # of each step of this epoch, on its slowest rank

    def hear(self, verdict: Verdict) -> None:
        seconds = max((report.step_s for report in verdict.reports), default=0.0)
        if seconds > 0:
            self._seconds.append(seconds)
        heard = len(self._seconds)
        # Rarely, so that it stays what it is for long; of the newer half: first steps are slow.
        if heard >= _FIRST_MEASURED and heard.bit_count() == 1:
            step_us = median(self._seconds[heard // 2 :]) * 1e6
            self.every = steps_between(self._config, replace(self._forecast, step_us=step_us))


def steps_between(config: Config, forecast: Forecast) -> int:
    """With steps as long as `forecast` says."""
    if config.guard.every is not None:
        return config.guard.every
    schedule = forecast.schedule
    fetching_us = _fetching_us(config, forecast)
    longest_steps = 1.0
    for pp_rank in range(len(schedule.programs)):
        stages = [s for s, owner in enumerate(schedule.rank_of_stage) if owner == pp_rank]
        parameter_bytes = sum(forecast.cost.reduce_bytes[stage] for stage in stages)
        part_bytes = parameter_bytes // config.tensor_parallel.size
        copied = state_bytes(part_bytes, config.train.optimizer)
        taking_us = _TAKEN_US + max(1, config.guard.copies) * copied / _TAKEN_BYTES_US
        taking_us += fetching_us
        sending_us = config.guard.copies * _bytes_us(forecast.network, pp_rank, copied)
        busy_us = sum(span.duration_us for span in forecast.timeline.on(pp_rank, Lane.SEND))
        idle_us = max(_LEAST_IDLE * forecast.step_us, forecast.step_us - busy_us)
        longest_steps = max(
            longest_steps, taking_us / (_SHARE * forecast.step_us), sending_us / idle_us
        )
    return math.ceil(longest_steps)


def _fetching_us(config: Config, forecast: Forecast) -> float:
    """For replica 0 to ask parameter servers on other machines for what they have: steps wait."""
    asked: Counter[int] = Counter()
    for stage, server in enumerate(server_ranks(config)):
        if server != forecast.schedule.rank_of_stage[stage]:
            parameter_bytes = forecast.cost.reduce_bytes[stage]
            asked[server] += state_bytes(parameter_bytes, config.train.optimizer)
    sending_us = [_bytes_us(forecast.network, server, size) for server, size in asked.items()]
    return max(sending_us, default=0.0)


def _bytes_us(network: Network, rank: int, num_bytes: int) -> float:
    gbps = network.egress_gbps(rank)
    return num_bytes * 8 / (gbps * 1e3) if gbps > 0 else 0.0
