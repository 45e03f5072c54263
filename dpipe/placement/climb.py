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

from dpipe.placement.estimate import Estimate, estimate
from dpipe.placement.fleet import Floats, Ints
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
    ends: Ints  # [stage + 1]; where replicas are cut differently, [replica, stage + 1]
    value: float  # of the objective
    step_s: float
    waits: bool = False  # whether memory lets fewer micro-batches be under way than would be good

    @property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each stage, by replica; one for all where these are cut alike."""
        by_replica = np.atleast_2d(self.ends)
        num_layers = np.diff(by_replica, axis=1)
        cuts: list[list[int]] = num_layers.tolist()
        return tuple(map(tuple, cuts))

    def ends_of(self, replica: int) -> Ints:
        """[stage + 1]"""
        by_replica = np.atleast_2d(self.ends)
        ends: Ints = by_replica[replica % len(by_replica)]
        return ends

    @property
    def seats(self) -> Ints:
        """[replica, stage]"""
        candidates = self.order[None]
        seats = seats_of(self.shape, candidates)
        only: Ints = seats[0]
        return only


def seats_of(shape: PlanShape, orders: Ints) -> Ints:
    """[candidate, replica, stage]"""
    count = len(orders)
    first = orders[:, : shape.num_seats]
    return first.reshape(count, shape.replicas, shape.stages)


def best_of(
    problem: PlanProblem, shape: PlanShape, objective: Objective, orders: Ints, ends: Ints
) -> Placed:
    """The best of many placements of one shape."""
    seats = seats_of(shape, orders)
    found = estimate(problem, shape, seats, ends)
    values = objective(problem, shape, found, seats)
    best = int(np.argmin(values))
    waits_s = found.waits_s[best]
    longest_s = waits_s.max(axis=1)
    binds = longest_s >= found.replica_s[best]
    return Placed(
        shape,
        order=orders[best],
        ends=ends[best],
        value=float(values[best]),
        step_s=float(found.step_s[best]),
        waits=bool(binds.any()),
    )


class Climb:
    """A search from one placement. It has no clock: what it does is counted, so that the same seed
    finds the same.
    """

    def __init__(
        self, problem: PlanProblem, objective: Objective, start: Placed, seed: int
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

    def run(self, rounds: int, width: int) -> None:
        """`rounds` batches of `width` neighbours."""
        for number in range(rounds):
            orders, ends = self._neighbours(width)
            done = number / rounds
            hot = _HOT * (1 - done)
            self._go(orders, ends, hot)

    def _go(self, orders: Ints, ends: Ints, hot: float) -> None:
        problem = self._problem
        shape = self._shape
        seats = seats_of(shape, orders)
        found = estimate(problem, shape, seats, ends)
        values = self._objective(problem, shape, found, seats)
        smooth = _smoothed(values, found)
        best = int(np.argmin(smooth))
        most = self._value * (1 + hot)
        if smooth[best] <= most:
            self._order = orders[best]
            self._ends = ends[best]
            self._value = float(smooth[best])
            seats_s = found.seats_s[best]
            self._slowest = _slowest_seats(seats_s)
        # By the value itself: what is smoothed shows the way, and is no result.
        least = int(np.argmin(values))
        if values[least] < self.best.value:
            self.best = Placed(
                shape,
                order=orders[least],
                ends=ends[least],
                value=float(values[least]),
                step_s=float(found.step_s[least]),
            )

    def _neighbours(self, width: int) -> tuple[Ints, Ints]:
        copies = (width, 1)
        orders = np.tile(self._order, copies)
        ends = np.tile(self._ends, copies)
        # What decides the move: [0, 1), in shares, and beyond it no move.
        move = self._rng.random(width)
        move[0] = 2.0  # where the climb is: a round must not lose it
        swaps_below = _SWAPS
        layers_below = _SWAPS + _LAYERS
        swaps = move < swaps_below
        moves_layer = (move >= swaps_below) & (move < layers_below)
        reorders = (move >= layers_below) & (move < 1.0)
        rows = np.flatnonzero(swaps)
        self._swap(orders, rows)
        # Machines of other speeds want another cut: neither move alone may be a step up.
        also = self._rng.random(width) < _ALSO_A_LAYER
        layers = swaps & also | moves_layer
        rows = np.flatnonzero(layers)
        self._move_layer(ends, rows)
        rows = np.flatnonzero(reorders)
        self._reorder_stages(orders, rows)
        size = self._shape.tensor_parallel
        led = self._problem.led(orders, size)
        return led, ends

    def _swap(self, orders: Ints, rows: Ints) -> None:
        rng = self._rng
        count = len(rows)
        num_seats = self._shape.num_seats
        anywhere = rng.integers(num_seats, size=count)
        slowest = rng.choice(self._slowest, size=count)
        decides = rng.random(count) < _SLOWEST
        here = np.where(decides, slowest, anywhere)
        # With any unit, also one that is left out.
        num_units = orders.shape[1]
        there = rng.integers(num_units, size=count)
        one = orders[rows, here]
        other = orders[rows, there]
        orders[rows, here] = other
        orders[rows, there] = one

    def _move_layer(self, ends: Ints, rows: Ints) -> None:
        """Each row's from one stage to another: the boundaries between them move by one."""
        rng = self._rng
        stages = self._shape.stages
        stated = self._problem.choices.split is not None
        if stated or stages == 1:
            return
        each = (len(rows), 1)
        source = rng.integers(stages, size=each)
        target = rng.integers(stages, size=each)
        boundary = np.arange(stages + 1)
        up = (boundary > target) & (boundary <= source)
        down = (boundary > source) & (boundary <= target)
        moved = ends[rows] + up - down
        # A stage that has one layer keeps it.
        layers = np.diff(moved, axis=1)
        least = layers.min(axis=1)
        whole = least >= 1
        kept = rows[whole]
        ends[kept] = moved[whole]

    def _reorder_stages(self, orders: Ints, rows: Ints) -> None:
        """In every replica alike: a run of stages turned round, or two that change places."""
        rng = self._rng
        shape = self._shape
        count = len(rows)
        two = (2, count, 1)
        ends = rng.integers(shape.stages, size=two)
        first = ends.min(axis=0)
        last = ends.max(axis=0)
        mirrored = first + last
        stage = np.arange(shape.stages)
        inside = (stage >= first) & (stage <= last)
        at_end = (stage == first) | (stage == last)
        turns = rng.random((count, 1)) < 0.5
        # Two that change places are a run of which only the ends are turned.
        moves = np.where(turns, inside, at_end)
        opposite = mirrored - stage
        places = np.where(moves, opposite, stage)
        in_each_replica = places[:, None, :]
        seats = seats_of(shape, orders[rows])
        moved = np.take_along_axis(seats, in_each_replica, axis=2)
        # What is left out stays behind the seats.
        num_seats = shape.num_seats
        orders[rows, :num_seats] = moved.reshape(count, num_seats)


def _smoothed(values: Floats, found: Estimate) -> Floats:
    mean_s = found.replica_s.mean(axis=1)
    possible = np.isfinite(values)
    # An infinite step has no share, and is not chosen whatever this one is.
    share = np.ones_like(mean_s)
    np.divide(mean_s, found.step_s, out=share, where=possible)
    factor = 1 + _SMOOTHING * share
    smooth: Floats = values * factor
    return smooth


def _slowest_seats(seats_s: Floats) -> Ints:
    """An eighth of all, one at least: those whose machines a swap should replace."""
    of_all = seats_s.ravel()
    by_time = np.argsort(of_all)
    eighth = len(by_time) // 8
    count = max(1, eighth)
    return by_time[-count:]
