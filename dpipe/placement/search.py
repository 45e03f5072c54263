"""The best placements of all shapes, by the estimate.

    1. every number of stages and of replicas, placed in a few ways at once (`starts.py`), each cut
       by the speed of its machines (`balance.py`); of the best of them every number of micro-
       batches, and recomputation where memory binds
    2. the best dozen shapes are improved by local moves (`climb.py`); the better half goes on,
       twice (successive halving)
    3. replicas are cut each by its own machines, where that brings something (`recut.py`)

Few machines have few placements: then a climb begins at the best of all. What a search does is
counted, not timed, so that the same seed finds the same.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from operator import attrgetter

import numpy as np

from dpipe.placement.balance import balanced
from dpipe.placement.climb import Climb, Placed, best_of, seats_of
from dpipe.placement.fleet import Floats, Ints
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.placement.recut import recut
from dpipe.placement.shape import PlanShape
from dpipe.placement.starts import chained, starting_orders
from dpipe.wire.format import wire_bytes

# Numbers of stages and replicas, of which every number of micro-batches is tried.
Order = tuple[int, ...]  # of units

_PLACED_OFTEN = 24
_IMPROVED = 12  # shapes
_HOPELESS = 1.3  # times the best that is known
_ROUNDS = (1, 2, 4)  # of their climbs, relative to each other
_EFFORT = 8_000_000  # seats that all climbs together estimate
_OVERHEAD = 8_000  # of a round, in seats: numpy's calls take as long as that
_CHEAP_REPLICAS = 12  # whose pairs take as long to look up as all else
_WIDTH = 48  # neighbours a round
_FEW = 45_000  # placements that are all tried
_BLOCK = 5_000  # of them at once
_MUCH = 1 << 20  # values of a tensor, by which formats are compared

_value = attrgetter("value")


def search(problem: PlanProblem, objective: Objective, seed: int = 0) -> list[Placed]:
    """The best of each shape that was improved, best first; none where nothing fits."""
    starts = Starts(problem, objective)
    # One of each, or the best dozen would be one placement with a dozen numbers of micro-batches.
    first = _one_of_each(starts.promising(), _PLACED_OFTEN)
    found = []
    for placement in first:
        for shape in _finer(problem, placement.shape):
            finer = starts.alike(placement, shape)
            found.append(finer)
    climbs = []
    for placement in _one_of_each(found, _IMPROVED):
        start = starts.best(placement)
        climb = Climb(problem, objective, start, seed)
        climbs.append(climb)
    done: list[Climb] = []
    for share in _ROUNDS:
        # Few climbs go on for longer: each round of halving takes its share of the effort.
        effort = share * _EFFORT // sum(_ROUNDS)
        for climb in climbs:
            of_round = _effort_of_round(climb.best.shape)
            rounds = effort // (of_round * len(climbs))
            climb.run(1 + rounds, _WIDTH)
        climbs.sort(key=lambda climb: climb.best.value)
        better = max(2, (len(climbs) + 1) // 2)
        done += climbs[better:]
        climbs = climbs[:better]
    placements = [climb.best for climb in climbs + done]
    apart = [recut(problem, objective, placement) for placement in placements]
    placements += [placement for placement in apart if placement is not None]
    return sorted(placements, key=_value)


def _effort_of_round(shape: PlanShape) -> int:
    pairs = 1 + shape.replicas // _CHEAP_REPLICAS  # of replicas, which exchange gradients
    return _OVERHEAD + shape.num_seats * _WIDTH * pairs


def _one_of_each(placements: Sequence[Placed], most: int) -> list[Placed]:
    """The best for each number of stages and replicas, best first; of those that fit."""
    found: dict[tuple[int, int, int], Placed] = {}
    for placement in sorted(placements, key=_value):
        if not math.isfinite(placement.value):
            break
        shape = placement.shape
        key = (shape.stages, shape.replicas, shape.tensor_parallel)
        found.setdefault(key, placement)
    return list(found.values())[:most]


class Starts:
    """Where shapes are placed before anything is improved."""

    def __init__(self, problem: PlanProblem, objective: Objective) -> None:
        self._problem = problem
        self._objective = objective
        self._chains: dict[int, Ints] = {}  # by size of a tensor-parallel group

    def promising(self) -> list[Placed]:
        """Of each number of stages and replicas, but for those whose machines could not compute a
        step in the time that another takes.
        """
        found = []
        best_s = math.inf
        by_time = self._objective.name == "time"
        shapes = list(_coarse(self._problem))
        shapes.sort(key=self._least_s)
        for shape in shapes:
            least_s = self._least_s(shape)
            # A price says nothing of the time: a slow plan may be the cheapest.
            if by_time and least_s > _HOPELESS * best_s:
                break
            placement = self.fitted(shape)
            found.append(placement)
            best_s = min(best_s, placement.value)
        return found

    def _least_s(self, shape: PlanShape) -> float:
        """What the fastest machines take to compute a step, if nothing else takes any time."""
        speeds = self._speeds(shape)
        fastest = speeds[: shape.num_seats]
        total = float(fastest.sum())
        return shape.replicas * shape.num_microbatches / total

    def _speeds(self, shape: PlanShape) -> Floats:
        """Micro-batches a second through the whole model, the fastest unit first."""
        times = self._problem.times(shape)
        units = self._problem.units(shape.tensor_parallel)
        layers_s = times.forward + times.backward
        whole_s = layers_s[units.kind, -1]
        slowest_first: Floats = np.sort(1 / whole_s)
        return slowest_first[::-1]

    def fitted(self, shape: PlanShape) -> Placed:
        """The best of a few ways to place it. Where memory binds, recomputed as well, and with what
        other kinds of data parallelism hold.
        """
        chain = self._chain(shape)
        starts = starting_orders(self._problem, shape, chain)
        size = shape.tensor_parallel
        orders = self._problem.led(starts, size)
        best = self._best(shape, orders)
        if not best.waits:
            return best
        for leaner in _leaner(self._problem, shape):
            other = self._best(leaner, orders)
            best = min(best, other, key=_value)
        return best

    def alike(self, placement: Placed, shape: PlanShape) -> Placed:
        """`shape` placed and cut as another of its stages and replicas is; as in `fitted`, the best
        of what memory may ask for.
        """
        best = self._same(placement, shape)
        if not best.waits:
            return best
        for leaner in _leaner(self._problem, shape):
            other = self._same(placement, leaner)
            best = min(best, other, key=_value)
        return best

    def _same(self, placement: Placed, shape: PlanShape) -> Placed:
        orders = placement.order[None]
        ends = placement.ends[None]
        return best_of(self._problem, shape, self._objective, orders, ends)

    def best(self, placement: Placed) -> Placed:
        """The best of all ways, where they are few."""
        shape = placement.shape
        size = shape.tensor_parallel
        num_units = len(placement.order)
        count = math.perm(num_units, shape.num_seats)
        if count > _FEW:
            return placement
        best = placement
        every = permutations(range(num_units), shape.num_seats)
        # In blocks, as the arrays of an estimate are as long as there are candidates.
        for block in _blocks(every):
            completed = [_completed(order, num_units) for order in block]
            candidates = np.array(completed)
            orders = self._problem.led(candidates, size)
            other = self._best(shape, orders)
            best = min(best, other, key=_value)
        return best

    def _best(self, shape: PlanShape, orders: Ints) -> Placed:
        problem = self._problem
        split = problem.choices.split
        if split is None:
            seats = seats_of(shape, orders)
            ends = balanced(problem, shape, seats)
        else:
            stated = np.cumsum((0, *split))
            count = len(orders)
            ends = np.tile(stated, (count, 1))
        return best_of(problem, shape, self._objective, orders, ends)

    def _chain(self, shape: PlanShape) -> Ints:
        size = shape.tensor_parallel
        if size not in self._chains:
            units = self._problem.units(size)
            self._chains[size] = chained(units)
        return self._chains[size]


def _blocks(orders: Iterable[Order]) -> Iterator[list[Order]]:
    block = []
    for order in orders:
        block.append(order)
        if len(block) == _BLOCK:
            yield block
            block = []
    if block:
        yield block


def _completed(order: Sequence[int], num_units: int) -> list[int]:
    """With the units that are left out."""
    seated = set(order)
    units = range(num_units)
    left_out = [unit for unit in units if unit not in seated]
    return [*order, *left_out]


def _coarse(problem: PlanProblem) -> Iterator[PlanShape]:
    """Every number of stages and replicas, with as many micro-batches as keep a pipeline busy."""
    choices = problem.choices
    machines = problem.cluster.machines
    most = max(machine.devices for machine in machines)
    for size in choices.group_sizes(most):
        num_units = len(problem.units(size))
        most_stages = min(num_units, problem.num_layers)
        for stages in range(1, most_stages + 1):
            if choices.stages not in (None, stages):
                continue
            most_replicas = num_units // stages
            if not choices.formats_between_replicas(size):
                most_replicas = min(1, most_replicas)
            for replicas in range(1, most_replicas + 1):
                number = _busy(problem, stages, replicas)
                if number is not None:
                    yield _shape(problem, stages, replicas, size, number)


def _busy(problem: PlanProblem, stages: int, replicas: int) -> int | None:
    """As near to four micro-batches a stage as can be; None where there cannot be such replicas."""
    choices = problem.choices
    if not choices.may_replicate(replicas):
        return None
    # With four a stage the pipeline fills and drains in a fifth of the step.
    enough = 4 * stages
    numbers = choices.micro_batches(replicas)
    return min(numbers, key=lambda number: abs(number - enough), default=None)


def _shape(problem: PlanProblem, stages: int, replicas: int, size: int, number: int) -> PlanShape:
    """With the first of all choices, and the formats that are smallest."""
    choices = problem.choices
    hops = choices.smallest_wires(stages - 1)
    kind = "none"
    exchange_wire = "none"
    if replicas > 1:
        kind = choices.kinds[0]
        exchange_wire = _smallest(choices.formats_between_replicas(size))
    return PlanShape(
        stages=stages,
        replicas=replicas,
        tensor_parallel=size,
        num_microbatches=number,
        recompute=choices.recompute[0],
        kind=kind,
        exchange_wire=exchange_wire,
        forward_wires=hops.forward,
        backward_wires=hops.backward,
        schedule=choices.schedule,
        in_flight=choices.in_flight,
    )


def _finer(problem: PlanProblem, shape: PlanShape) -> Iterator[PlanShape]:
    """`shape` with every number of micro-batches, and else as it was before memory bound."""
    stages = shape.stages
    replicas = shape.replicas
    size = shape.tensor_parallel
    for number in problem.choices.micro_batches(replicas):
        yield _shape(problem, stages, replicas, size, number)


def _leaner(problem: PlanProblem, shape: PlanShape) -> Iterator[PlanShape]:
    """`shape` with every recomputation and kind of data parallelism but its own."""
    choices = problem.choices
    kinds: tuple[str, ...] = ("none",)
    if shape.replicas > 1:
        kinds = choices.kinds
    for recompute in choices.recompute:
        for kind in kinds:
            leaner = replace(shape, recompute=recompute, kind=kind)
            if leaner != shape:
                yield leaner


def _smallest(formats: Sequence[str]) -> str:
    return min(formats, key=lambda name: wire_bytes(name, _MUCH))


def leanest_bytes(problem: PlanProblem) -> float:
    """Of the smallest stage in any plan: one layer, and one micro-batch under way."""
    least = math.inf
    for coarse in _coarse(problem):
        if coarse.stages > 1 and least < math.inf:
            continue  # the number of stages changes no layer
        for shape in (coarse, *_leaner(problem, coarse)):
            held = problem.held(shape)
            with_one = held.static + held.held
            layers = np.diff(with_one)
            smallest = float(layers.min())
            least = min(least, smallest + held.working)
    return least
