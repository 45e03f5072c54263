"""Where to cut the model for stages on machines of unequal speed and memory: the slowest stage as
fast as can be.

    speed      2    1    4        layers of one second each, 14 of them
    cut        4    2    8        each stage takes 2 seconds

Of a limit P each stage in turn gets as many layers as it computes in P and has the memory for. The
least P at which all layers are placed is found by bisection. Replicas are cut alike: the slowest
machine of a stage decides.
"""

import numpy as np
import numpy.typing as npt

from dpipe.placement.fleet import Floats, Ints
from dpipe.placement.problem import PlanProblem
from dpipe.placement.shape import PlanShape

_HALVINGS = 6  # of the limit, which is known to a layer at first
Bools = npt.NDArray[np.bool_]

_ROUNDING = 1e-9  # of sums of layers


def balanced(problem: PlanProblem, shape: PlanShape, seats: Ints) -> Ints:
    """For seats [candidate, replica, stage], where the stages' layers begin, and the number of
    layers: [candidate, stage + 1].

    A stage has a layer at least. Where memory does not suffice, so many layers are left over for
    the last stage, which then does not fit.
    """
    filling = _Filling(problem, shape, seats)
    # Bisection and not dynamic programming: a batch of cuts costs as much as one.
    slow, enough = filling.bounds_s()
    _, fits = filling.within(enough)
    halvings = _HALVINGS
    if not fits.all():
        # Memory may allow the fast machines less than their speed does.
        whole_s = filling.takes[:, -1]
        slowest_s = whole_s.max()
        enough = np.where(fits, enough, slowest_s)
        halvings = 2 * _HALVINGS  # from farther apart
    for _ in range(halvings):
        limit = (slow + enough) / 2
        _, fits = filling.within(limit)
        enough = np.where(fits, limit, enough)
        slow = np.where(fits, slow, limit)
    ends, _ = filling.within(enough)
    return ends


class _Filling:
    """Gives each stage in turn as many layers as a limit lets it have."""

    def __init__(self, problem: PlanProblem, shape: PlanShape, seats: Ints) -> None:
        times = problem.times(shape)
        held = problem.held(shape)
        units = problem.units(shape.tensor_parallel)
        self.takes = times.forward + times.backward  # [kind, layer + 1]
        self._num_layers = problem.num_layers
        self._kinds = units.kind[seats]
        # With one micro-batch under way, the least there can be.
        self._needs = held.static + held.held
        # By stage, the bytes that its smallest machine has for layers.
        memory_bytes = units.memory_bytes[seats]
        smallest = memory_bytes.min(axis=1)
        self._room = smallest - held.working
        # By stage the kinds of machine in it, each with the candidates that it is in: there are
        # few kinds, and a search of sorted sums takes one row of them.
        self._kinds_of = []
        for stage in range(shape.stages):
            kinds = self._kinds[:, :, stage]
            found = []
            for kind in np.unique(kinds):
                seated = kinds == kind
                there = seated.any(axis=1)
                found.append((kind, there))
            self._kinds_of.append(found)

    def bounds_s(self) -> tuple[Floats, Floats]:
        """No cut is faster than the first; by speed alone, one is as fast as the second."""
        whole_s = self.takes[self._kinds, -1]
        # Replicas are cut alike, so that the slowest decides.
        slowest_s = whole_s.max(axis=1)
        speed = 1 / slowest_s
        least_s = 1 / speed.sum(axis=1)
        layers_s = np.diff(self.takes, axis=1)
        longest_s = layers_s.max(axis=1)
        # A stage has at most one layer more than its share.
        one_more_s = longest_s[self._kinds]
        of_seats = (1, 2)  # axes
        most_s = least_s + one_more_s.max(axis=of_seats)
        return least_s, most_s

    def within(self, limit_s: Floats) -> tuple[Ints, Bools]:
        """The cut, and for which candidates the stages keep to `limit_s` with all layers placed."""
        stages = len(self._kinds_of)
        num_layers = self._num_layers
        start = np.zeros(len(limit_s), dtype=np.int64)
        cut = [start]
        for stage in range(stages):
            last = self._last(stage, start, limit_s)
            behind = stages - 1 - stage
            # Each stage has one layer at least, those behind it too.
            most = num_layers - behind
            start = np.clip(last, start + 1, most)
            cut.append(start)
        placed = start == num_layers
        # What nobody has room for is left to the last stage.
        cut[-1] = np.full_like(start, num_layers)
        ends = np.stack(cut, axis=1)
        begin = ends[:, None, :-1]
        end = ends[:, None, 1:]
        before_s = self.takes[self._kinds, begin]
        after_s = self.takes[self._kinds, end]
        taken_s = after_s - before_s
        slowest_s = taken_s.max(axis=(1, 2))
        # A stage that was given its one layer anyway may take longer than the limit.
        keeps = slowest_s <= limit_s * (1 + _ROUNDING)
        return ends, placed & keeps

    def _last(self, stage: int, start: Ints, limit_s: Floats) -> Ints:
        """The most layers from `start` on that memory, and every machine of `stage`, allow."""
        room = self._room[:, stage]
        most_bytes = self._needs[start] + room
        last = _count_within(self._needs, most_bytes)
        for kind, there in self._kinds_of[stage]:
            row = self.takes[kind]
            until_s = row[start] + limit_s
            most_s = until_s * (1 + _ROUNDING)
            by_speed = _count_within(row, most_s)
            fewer = np.minimum(last, by_speed)
            last = np.where(there, fewer, last)
        return last


def _count_within(summed: Floats, most: Floats) -> Ints:
    """How many layers from the first one on come to `most` at most."""
    count: Ints = np.searchsorted(summed, most, side="right")
    return count - 1  # the sums begin with that of no layer
