"""Which layers make a stage: contiguous ones, at least one, with the costliest stage as cheap as
possible. No torch.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from dpipe.errors import ConfigError


def split(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Layers a stage, with the costliest stage as cheap as possible; of several such cuts, the one
    whose stages differ least.

        costs         1 1 1 1 4 1 1
        num_stages 3  [ 4   ][4][2]   ->  (4, 1, 2)

    If two cuts differ as little, the earlier stages get fewer layers: they hold more micro-batches.
    Raises `ConfigError` for fewer layers than stages.
    """
    if len(costs) < num_stages:
        raise ConfigError(
            f"{len(costs)} layers cannot make {num_stages} stages, which need one each at least; "
            f"lower pipeline.stages to {len(costs)} or give the model more layers"
        )
    ends = [0.0, *accumulate(costs)]

    def cost_of(start: int, end: int) -> float:
        return ends[end] - ends[start]

    costliest, _ = _best(len(costs), num_stages, cost_of, max)

    def unevenness(start: int, end: int) -> float:
        # The same subtraction as above: a stage of that very cost compares equal, not a bit above.
        cost = cost_of(start, end)
        return cost**2 if cost <= costliest else math.inf

    # The sum of squares is least where stages differ least: the sum of costs is the same for all.
    _, cut = _best(len(costs), num_stages, unevenness, operator.add)
    return cut


def _best(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, tuple[int, ...]]:
    """The cut with the least `cost(start, end)` of its stages joined, exactly, by dynamic
    programming. Neither `cost` of more layers nor `join` may be less.
    """
    # By where the layers start: the cost of all from there on, cut into as many stages as the loop
    # has come to.
    least = {start: cost(start, num_layers) for start in range(num_stages - 1, num_layers)}
    first_ends = []
    for stages in range(2, num_stages + 1):
        starts = range(num_stages - stages, num_layers - stages + 1)
        firsts = {start: _cheapest_first(start, least, cost, join) for start in starts}
        least = {start: value for start, (value, _) in firsts.items()}
        first_ends.append({start: end for start, (_, end) in firsts.items()})
    start = 0
    cut = []
    for ends in reversed(first_ends):
        cut.append(ends[start] - start)
        start = ends[start]
    return least[0], (*cut, num_layers - start)


def _cheapest_first(
    start: int,
    rest: Mapping[int, float],
    cost: Callable[[int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, int]:
    """The least cost of a stage from `start` on joined with the `rest` behind it, and where that
    stage ends: of equal ones as early as can be.
    """
    least = math.inf
    chosen = start + 1
    for end in range(start + 1, 1 + max(rest)):
        own = cost(start, end)
        if own > least:
            break  # a longer stage is no cheaper
        whole = join(own, rest[end])
        if whole < least:
            least = whole
            chosen = end
    return least, chosen
