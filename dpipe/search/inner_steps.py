"""`data_parallel.inner_steps = "auto"`: how seldom replicas have to average, on their network.

apart    |-------|-------|-------|-------|               H steps
agreeing |-------|-------|-------|-------~~~~|           the exchange of one average: H * 2 %
"""

import math

LEAST = 10  # fewer are no local steps: "all-reduce" is exact then
_MOST = 1000  # beyond, replicas drift apart (Douillard et al. 2023 tried so many)
_MOST_SHARE = 0.02  # of the time, for averaging


def fewest_inner_steps(apart_us: float, agreeing_us: float, fragments: int) -> int:
    """Of a step without an exchange and one with that of one fragment, of which there are
    `fragments` in turn.
    """
    exchange_us = max(0.0, agreeing_us - apart_us) * fragments
    needed = math.ceil(exchange_us / (_MOST_SHARE * apart_us))
    return min(max(LEAST, fragments, needed), _MOST)
