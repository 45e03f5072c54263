"""Which layers make a stage: contiguous ones, at least one, with the costliest stage as cheap as
possible. No torch.
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate

from dpipe.errors import ConfigError

Cut = tuple[int, ...]  # layers a stage


def split(costs: Sequence[float], num_stages: int) -> Cut:
    """As `split_by_stage`, where a layer costs the same on every stage."""
    return split_by_stage([costs] * num_stages)


def split_by_stage(costs: Sequence[Sequence[float]]) -> Cut:
    """`costs` are those of all layers, by the stage that would hold them: stages may be on machines
    that are not alike.

    Layers a stage, with the costliest stage as cheap as possible; of several such cuts, the one
    whose stages differ least.

        costs on each of three stages   1 1 1 1 4 1 1
                                        [ 4   ][4][2]   ->  (4, 1, 2)

    If two cuts differ as little, the earlier stages get fewer layers: they hold more micro-batches.
    Raises `ConfigError` for fewer layers than stages.
    """
    num_stages = len(costs)
    num_layers = len(costs[0])
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot make {num_stages} stages, which need one each at least; "
            f"lower pipeline.stages to {num_layers} or give the model more layers"
        )
    summed = [[0.0, *accumulate(of_stage)] for of_stage in costs]

    def cost_of(stage: int, start: int, end: int) -> float:
        return summed[stage][end] - summed[stage][start]

    costliest, _ = _best(num_layers, num_stages, cost_of, max)

    def unevenness(stage: int, start: int, end: int) -> float:
        # The same subtraction as above: a stage of that very cost compares equal, not a bit above.
        cost = cost_of(stage, start, end)
        return cost**2 if cost <= costliest else math.inf

    # The sum of squares is least where stages differ least: on machines that are alike, the sum of
    # costs is the same for all cuts.
    _, cut = _best(num_layers, num_stages, unevenness, operator.add)
    return cut


def _best(
    num_layers: int,
    num_stages: int,
    cost: Callable[[int, int, int], float],
    join: Callable[[float, float], float],
) -> tuple[float, Cut]:
    """The cut with the least `cost(stage, start, end)` of its stages joined, exactly, by dynamic
    programming. Neither `cost` of more layers nor `join` may be less.
    """
    # By where the layers start: the cost of all from there on, cut into as many stages as the loop
    # has come to.
    last = num_stages - 1
    least = {start: cost(last, start, num_layers) for start in range(last, num_layers)}
    first_ends = []
    for stage in reversed(range(last)):
        stages = num_stages - stage
        last_start = num_layers - stages
        starts = range(stage, last_start + 1)
        of_stage = partial(cost, stage)
        firsts = {start: _cheapest_first(start, least, of_stage, join) for start in starts}
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
