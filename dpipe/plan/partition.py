"""Which layers make a stage: contiguous ones, at least one, with the costliest stage as cheap as
possible. No torch.
"""

import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
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
    programming.
    """

    @cache
    def rest(start: int, stages: int) -> tuple[float, tuple[int, ...]]:
        if stages == 1:
            return cost(start, num_layers), (num_layers - start,)
        ends = range(start + 1, num_layers - stages + 2)  # a layer is left for each later stage
        # Of equal costs `min` takes the smaller cut: fewer layers in the earlier stages.
        return min(first(start, end, stages) for end in ends)

    def first(
        start: int,
        end: int,
        stages: int,
    ) -> tuple[float, tuple[int, ...]]:
        others, cut = rest(end, stages - 1)
        return join(cost(start, end), others), (end - start, *cut)

    return rest(0, num_stages)
