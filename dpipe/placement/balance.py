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
_ROUNDING = 1e-9  # of sums of layers


def balanced(
    problem: PlanProblem,
    shape: PlanShape,
    seats: Ints,
) -> Ints:
    """For seats [candidate, replica, stage], where the stages' layers begin, and the number of
    layers: [candidate, stage + 1].

    A stage has a layer at least. Where memory does not suffice, so many layers are left over for
    the last stage, which then does not fit.
    """
    filling = _Filling(problem, shape, seats)
    # Bisection and not dynamic programming: a batch of cuts costs as much as one.
    slow, enough = filling.bounds_s()
    _, fits = filling.within(enough)
    # Memory may allow the fast machines less than their speed does.
    enough = np.where(
        fits,
        enough,
        filling.takes[:, -1].max(),
    )
    halvings = _HALVINGS if fits.all() else 2 * _HALVINGS
    for _ in range(halvings):
        limit = (slow + enough) / 2
        _, fits = filling.within(limit)
        enough = np.where(
            fits,
            limit,
            enough,
        )
        slow = np.where(
            fits,
            slow,
            limit,
        )
    ends, _ = filling.within(enough)
    return ends


class _Filling:
    """Gives each stage in turn as many layers as a limit lets it have."""

    def __init__(
        self,
        problem: PlanProblem,
        shape: PlanShape,
        seats: Ints,
    ) -> None:
        times = problem.times(shape)
        held = problem.held(shape)
        units = problem.units(shape.tensor_parallel)
        self.takes: Floats = times.forward + times.backward
        self._num_layers = problem.num_layers
        self._kinds = units.kind[seats]
        # With one micro-batch under way, the least there can be.
        self._needs = held.static + held.held
        # By stage, the bytes that its smallest machine has for layers.
        self._room = units.memory_bytes[seats].min(axis=1) - held.working
        # By stage the kinds of machine in it, each with the candidates that it is in.
        self._kinds_of = []
        for stage in range(shape.stages):
            kinds = self._kinds[:, :, stage]
            found = np.unique(kinds)
            self._kinds_of.append([(kind, (kinds == kind).any(axis=1)) for kind in found])

    def bounds_s(self) -> tuple[Floats, Floats]:
        """No cut is faster than the first; by speed alone, one is as fast as the second."""
        whole_s = self.takes[self._kinds, -1].max(axis=1)
        least_s = 1 / (1 / whole_s).sum(axis=1)
        layer_s = np.diff(self.takes, axis=1).max(axis=1)
        return least_s, least_s + layer_s[self._kinds].max(axis=(1, 2))

    def within(self, limit_s: Floats) -> tuple[Ints, npt.NDArray[np.bool_]]:
        """The cut, and for which candidates the stages keep to `limit_s` with all layers placed."""
        stages = len(self._kinds_of)
        ends = np.zeros((len(limit_s), stages + 1), dtype=np.int64)
        for stage in range(stages):
            last = self._last(
                stage,
                ends[:, stage],
                limit_s,
            )
            behind = self._num_layers - (stages - 1 - stage)  # each needs one layer
            ends[:, stage + 1] = np.clip(
                last,
                ends[:, stage] + 1,
                behind,
            )
        placed = ends[:, -1] == self._num_layers
        ends[:, -1] = self._num_layers
        taken_s = self.takes[self._kinds, ends[:, None, 1:]]
        taken_s -= self.takes[self._kinds, ends[:, None, :-1]]
        # A stage that was given its one layer anyway may take longer than the limit.
        return ends, placed & (taken_s.max(axis=(1, 2)) <= limit_s * (1 + _ROUNDING))

    def _last(
        self,
        stage: int,
        start: Ints,
        limit_s: Floats,
    ) -> Ints:
        most = self._needs[start] + self._room[:, stage]
        last = (
            np.searchsorted(
                self._needs,
                most,
                side="right",
            )
            - 1
        )
        for kind, there in self._kinds_of[stage]:
            row = self.takes[kind]
            most = (row[start] + limit_s) * (1 + _ROUNDING)
            until = (
                np.searchsorted(
                    row,
                    most,
                    side="right",
                )
                - 1
            )
            last = np.where(
                there,
                np.minimum(last, until),
                last,
            )
        ends: Ints = last
        return ends
