"""A better placement from a good one: which machine has which seat, and where the model is cut.

A placement is an order of all units, of which the first have the seats, and a cut:

    order   [ replica 0: 4 1 7 | replica 1: 5 0 2 | left out: 3 6 ]     cut  0 3 9 12

Neighbours differ by a move: two units change places (one of them may be left out), a layer goes
from one stage to another, a run of stages is turned round, or two stages change places in every
replica. A whole batch is estimated at once, and the best of it is where the climb goes on; if it is
a little worse, then too, less and less as the climb ends (Kirkpatrick et al. 1983).
"""

from dataclasses import dataclass

import numpy as np

from dpipe.placement.estimate import estimate
from dpipe.placement.fleet import Ints
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.placement.shape import PlanShape

_HOT = 0.02  # of the value: how much worse the first step may be
_SWAPS = 0.55  # shares of the moves
_LAYERS = 0.3
_ALSO_A_LAYER = 0.3  # of the swaps
_SLOWEST = 0.5  # of the swaps, that move the machine which decides
_SMOOTHING = 1e-3  # of the mean replica beside the slowest, which alone tells no way down


@dataclass(frozen=True)
class Placed:
    """Where a shape is placed, and what that is estimated to come to."""

    shape: PlanShape
    order: Ints  # [unit]
    ends: Ints  # [stage + 1]
    value: float  # of the objective
    step_s: float
    waits: bool = False  # whether memory lets fewer micro-batches be under way than would be good

    @property
    def seats(self) -> Ints:
        """[replica, stage]"""
        seats: Ints = seats_of(self.shape, self.order[None])[0]
        return seats


def seats_of(shape: PlanShape, orders: Ints) -> Ints:
    """[candidate, replica, stage]"""
    first = orders[:, : shape.num_seats]
    return first.reshape(
        len(orders),
        shape.replicas,
        shape.stages,
    )


def best_of(
    problem: PlanProblem, shape: PlanShape, objective: Objective, orders: Ints, ends: Ints
) -> Placed:
    """The best of many placements of one shape."""
    seats = seats_of(shape, orders)
    found = estimate(
        problem,
        shape,
        seats,
        ends,
    )
    values = objective(
        problem,
        shape,
        found,
        seats,
    )
    best = int(np.argmin(values))
    binds = found.waits_s[best].max(axis=1) >= found.replica_s[best]
    return Placed(
        shape,
        orders[best],
        ends[best],
        float(values[best]),
        float(found.step_s[best]),
        waits=bool(binds.any()),
    )


class Climb:
    """A search from one placement. It has no clock: what it does is counted, so that the same seed
    finds the same.
    """

    def __init__(
        self,
        problem: PlanProblem,
        objective: Objective,
        start: Placed,
        seed: int,
    ) -> None:
        self.best = start
        self._problem = problem
        self._objective = objective
        self._shape = start.shape
        self._rng = np.random.default_rng(seed)
        self._order = start.order
        self._ends = start.ends
        self._value = np.inf
        self._slowest: Ints = np.arange(start.shape.num_seats)

    def run(
        self,
        rounds: int,
        width: int,
    ) -> None:
        """`rounds` batches of `width` neighbours."""
        for number in range(rounds):
            orders, ends = self._neighbours(width)
            hot = _HOT * (1 - number / rounds)
            self._go(orders, ends, hot)

    def _go(
        self,
        orders: Ints,
        ends: Ints,
        hot: float,
    ) -> None:
        shape = self._shape
        seats = seats_of(shape, orders)
        found = estimate(
            self._problem,
            shape,
            seats,
            ends,
        )
        values = self._objective(
            self._problem,
            shape,
            found,
            seats,
        )
        mean_s = found.replica_s.mean(axis=1)
        possible = np.isfinite(values)
        share = np.divide(
            mean_s,
            found.step_s,
            out=np.ones_like(mean_s),
            where=possible,
        )
        smooth = values * (1 + _SMOOTHING * share)
        best = int(np.argmin(smooth))
        if smooth[best] <= self._value * (1 + hot):
            self._order = orders[best]
            self._ends = ends[best]
            self._value = float(smooth[best])
            slowest = np.argsort(found.seats_s[best].ravel())
            self._slowest = slowest[-max(1, len(slowest) // 8) :]
        least = int(np.argmin(values))
        if values[least] < self.best.value:
            self.best = Placed(
                shape, orders[least], ends[least], float(values[least]), float(found.step_s[least])
            )

    def _neighbours(self, width: int) -> tuple[Ints, Ints]:
        orders = np.tile(self._order, (width, 1))
        ends = np.tile(self._ends, (width, 1))
        move = self._rng.random(width)
        move[0] = 2.0  # none: where the climb is
        self._swap(orders, np.flatnonzero(move < _SWAPS))
        also = self._rng.random(width) < _ALSO_A_LAYER
        layers = (move < _SWAPS) & also | (move >= _SWAPS) & (move < _SWAPS + _LAYERS)
        self._move_layer(ends, np.flatnonzero(layers))
        self._reorder_stages(orders, np.flatnonzero((move >= _SWAPS + _LAYERS) & (move < 1.0)))
        return orders, ends

    def _swap(
        self,
        orders: Ints,
        rows: Ints,
    ) -> None:
        rng = self._rng
        count = len(rows)
        here = rng.integers(self._shape.num_seats, size=count)
        slowest = rng.choice(self._slowest, size=count)
        here = np.where(
            rng.random(count) < _SLOWEST,
            slowest,
            here,
        )
        there = rng.integers(orders.shape[1], size=count)
        one = orders[rows, here]
        other = orders[rows, there]
        orders[rows, here] = other
        orders[rows, there] = one

    def _move_layer(
        self,
        ends: Ints,
        rows: Ints,
    ) -> None:
        """Each row's from one stage to another: the boundaries between them move by one."""
        stages = self._shape.stages
        if stages == 1 or self._problem.choices.split is not None:
            return
        source = self._rng.integers(stages, size=len(rows))[:, None]
        target = self._rng.integers(stages, size=len(rows))[:, None]
        boundary = np.arange(stages + 1)
        up = (boundary > target) & (boundary <= source)
        down = (boundary > source) & (boundary <= target)
        moved = ends[rows] + up - down
        whole = (np.diff(moved, axis=1) >= 1).all(axis=1)
        ends[rows[whole]] = moved[whole]

    def _reorder_stages(
        self,
        orders: Ints,
        rows: Ints,
    ) -> None:
        """In every replica alike: a run of stages turned round, or two that change places."""
        shape = self._shape
        first, last = np.sort(self._rng.integers(shape.stages, size=(2, len(rows))), axis=0)[
            ..., None
        ]
        stage = np.tile(np.arange(shape.stages), (len(rows), 1))
        turned = np.where(
            (stage >= first) & (stage <= last),
            first + last - stage,
            stage,
        )
        traded = np.where(
            stage == first,
            last,
            np.where(stage == last, first, stage),
        )
        turns = self._rng.random(len(rows)) < 0.5
        places = np.where(
            turns[:, None],
            turned,
            traded,
        )
        seats = seats_of(shape, orders[rows])
        moved = np.take_along_axis(
            seats,
            places[:, None, :],
            axis=2,
        )
        orders[rows, : shape.num_seats] = moved.reshape(len(rows), -1)
