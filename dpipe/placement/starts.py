"""Where a search begins: machines in an order in which near ones follow each other, dealt out to
replicas and stages in several ways.

    pipelines near    0 1 2 | 3 4 5        where activations weigh more than gradients
    stages near       0 2 4 | 1 3 5        where gradients weigh more
    speeds alike      as stages near, of the machines sorted by speed: replicas are cut alike, so
                      that the slowest machine of a stage decides
"""

import numpy as np

from dpipe.placement.fleet import Floats, Ints, Units
from dpipe.placement.problem import PlanProblem
from dpipe.placement.shape import PlanShape

_REFERENCE_GBIT = 0.05  # of a message by which distances are compared: some MB


def starting_orders(problem: PlanProblem, shape: PlanShape, chain: Ints) -> Ints:
    """Orders as `climb.Placed` has them: [start, unit]; `chain` is that of `chained`."""
    units = problem.units(shape.tensor_parallel)
    num_units = len(units)
    times = problem.times(shape)
    takes_s = times.forward + times.backward
    slowness = takes_s[units.kind, -1]
    # The fastest machines, in the order of the chain; of those as fast the first ones of it.
    rank = np.empty(num_units, dtype=np.int64)
    rank[chain] = np.arange(num_units)
    by_speed = np.lexsort((rank, slowness))
    fastest = by_speed[: shape.num_seats]
    by_rank = np.argsort(rank[fastest])
    near = fastest[by_rank]
    as_it_comes = chain[: shape.num_seats]
    starts = [
        near,
        _dealt(shape, near),
        _dealt(shape, fastest),
        as_it_comes,
        _dealt(shape, as_it_comes),
    ]
    orders = [_completed(start, num_units) for start in starts]
    return np.array(orders)


def chained(units: Units) -> Ints:
    """All units, each followed by the nearest that is left, from the one that is nearest to all."""
    distance_s = distances_s(units)
    # The median: one far machine must not decide where the middle is.
    typical_s = np.median(distance_s, axis=1)
    here = int(np.argmin(typical_s))
    chain = [here]
    left = np.ones(len(units), dtype=bool)
    left[here] = False
    while left.any():
        others = np.flatnonzero(left)
        # Where no link reaches any of them, the first in the file: they have to be somewhere.
        nearest = np.argmin(distance_s[here, others])
        here = int(others[nearest])
        chain.append(here)
        left[here] = False
    return np.array(chain)


def distances_s(units: Units) -> Floats:
    """Of a message there and back: [unit, unit]."""
    with np.errstate(divide="ignore"):
        one_way = units.delay_s + _REFERENCE_GBIT / units.gbps
    distance: Floats = one_way + one_way.T
    return distance


def _dealt(shape: PlanShape, machines: Ints) -> Ints:
    """The first ones to the first stage of all replicas, and so on."""
    by_stage = machines.reshape(shape.stages, shape.replicas)
    by_replica = by_stage.T
    return by_replica.ravel()


def _completed(seated: Ints, num_units: int) -> Ints:
    """With those that are left out behind."""
    left = np.ones(num_units, dtype=bool)
    left[seated] = False
    left_out = np.flatnonzero(left)
    return np.concatenate([seated, left_out])
