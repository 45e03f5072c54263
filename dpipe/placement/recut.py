"""Replicas cut each by the speed of its own machines: where the machines of a stage are not alike,
one cut for all lets the fast ones wait for the slowest.

    speeds      replica 0   4 1        one cut    [7 layers][7]     each replica by the slower
                replica 1   1 4        each its   [11][3]           machine of a stage
                                       own        [3][11]

Gradients are then exchanged by layer, between whoever holds it.
"""

from itertools import product
from operator import attrgetter

import numpy as np

from dpipe.dataparallel.kinds import KINDS
from dpipe.placement.balance import balanced
from dpipe.placement.climb import Placed, best_of, seats_of
from dpipe.placement.estimate import estimate
from dpipe.placement.fleet import Ints
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.placement.shape import PlanShape

_ROUNDS = 24
_MOST_SWAPS = 64  # that a round tries
_BRINGS = 0.01  # of the value, at least: to run it, a layer is exchanged apart from its stage


def recut(problem: PlanProblem, objective: Objective, placed: Placed) -> Placed | None:
    """`placed` with a cut for each replica; None where that brings little, or may not be."""
    shape = placed.shape
    synchronous = KINDS[shape.kind].synchronous
    own_exchange = problem.config.data_parallel.group == "dpipe"
    if problem.choices.split is not None or not synchronous or not own_exchange:
        return None
    if shape.stages == 1 or shape.replicas == 1:
        return None
    # The placement is one for a common cut. What is best for cuts of their own may have other
    # machines in each replica, so that both are changed together from here on.
    orders = placed.order[None]
    cuts = _balanced(problem, shape, orders)
    best = best_of(problem, shape, objective, orders, cuts)
    for number in range(_ROUNDS):
        better = _best_neighbour(problem, objective, best, number)
        if better.value >= best.value:
            break
        best = better
    if best.value >= (1 - _BRINGS) * placed.value:
        return None
    return best


def _balanced(problem: PlanProblem, shape: PlanShape, orders: Ints) -> Ints:
    """Each replica cut by itself: [candidate, replica, stage + 1]."""
    # One replica more is one candidate more: balancing takes them all at once.
    seats = seats_of(shape, orders)
    alone = seats.reshape(-1, 1, shape.stages)
    ends = balanced(problem, shape, alone)
    cuts: Ints = ends.reshape(len(orders), shape.replicas, -1)
    return cuts


def _best_neighbour(
    problem: PlanProblem, objective: Objective, placed: Placed, number: int
) -> Placed:
    """Another machine in the slowest replica, or a layer of its slowest stage elsewhere."""
    shape = placed.shape
    seats = placed.seats[None]
    ends = placed.ends[None]
    found = estimate(problem, shape, seats, ends)
    replica = int(np.argmax(found.replica_s[0]))
    swapped = _swapped(problem, placed, replica, number)
    cuts = _balanced(problem, shape, swapped)
    best = best_of(problem, shape, objective, swapped, cuts)
    slowest = np.argmax(found.seats_s[0, replica])
    moved = _moved(placed, replica, int(slowest))
    if len(moved):
        order = placed.order[None]
        orders = np.repeat(order, len(moved), axis=0)
        other = best_of(problem, shape, objective, orders, moved)
        best = min(best, other, key=attrgetter("value"))
    return best


def _swapped(problem: PlanProblem, placed: Placed, replica: int, number: int) -> Ints:
    """Orders in which a machine of `replica` has changed places with one of another. One cut for
    all gathers fast machines in one replica: it does not matter there.
    """
    stages = placed.shape.stages
    first = replica * stages
    own = range(first, first + stages)
    seats = range(placed.shape.num_seats)
    others = [seat for seat in seats if seat not in own]
    pairs = list(product(own, others))
    # Of many, others in each round.
    stride = -(-len(pairs) // _MOST_SWAPS)
    orders = []
    for here, there in pairs[number % stride :: stride]:
        order = placed.order.copy()
        order[[here, there]] = order[[there, here]]
        orders.append(order)
    size = placed.shape.tensor_parallel
    candidates = np.array(orders)
    return problem.led(candidates, size)


def _moved(placed: Placed, replica: int, source: int) -> Ints:
    """Cuts in which stage `source` of `replica` has given a layer to another one."""
    boundary = np.arange(placed.shape.stages + 1)
    cut = placed.ends_of(replica)
    cuts = []
    for target in range(placed.shape.stages):
        up = (boundary > target) & (boundary <= source)
        down = (boundary > source) & (boundary <= target)
        shifted = cut + up - down
        fewest = np.diff(shifted).min()
        if target == source or fewest < 1:
            continue
        ends = placed.ends.copy()
        ends[replica] = shifted
        cuts.append(ends)
    return np.array(cuts)
