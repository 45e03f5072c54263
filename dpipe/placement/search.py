"""The best placements of all shapes, by the estimate.

    1. every number of stages and of replicas, placed in a few ways at once (`starts.py`), each cut
       by the speed of its machines (`balance.py`); of the best of them every number of micro-
       batches, and recomputation where memory binds
    2. the best dozen shapes are improved by local moves (`climb.py`); the better half goes on,
       twice (successive halving)

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
from dpipe.placement.shape import PlanShape
from dpipe.placement.starts import chained, starting_orders
from dpipe.wire.format import wire_bytes

_PLACED_OFTEN = (
    24  # numbers of stages and replicas, of which every number of micro-batches is tried
)
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
    found = [starts.alike(each, shape) for each in first for shape in _finer(problem, each.shape)]
    found = _one_of_each(found, _IMPROVED)
    climbs = [Climb(problem, objective, starts.best(each), seed) for each in found]
    done: list[Climb] = []
    for share in _ROUNDS:
        for climb in climbs:
            shape = climb.best.shape
            pairs = 1 + shape.replicas // _CHEAP_REPLICAS  # of replicas, which exchange gradients
            of_round = _OVERHEAD + shape.num_seats * _WIDTH * pairs
            rounds = share * _EFFORT // (of_round * len(climbs) * sum(_ROUNDS))
            climb.run(1 + rounds, _WIDTH)
        climbs.sort(key=lambda climb: climb.best.value)
        done += climbs[_kept(climbs) :]
        climbs = climbs[: _kept(climbs)]
    return sorted([climb.best for climb in climbs + done], key=_value)


def _one_of_each(placements: Sequence[Placed], most: int) -> list[Placed]:
    """The best for each number of stages and replicas, best first; of those that fit."""
    found: dict[tuple[int, int, int], Placed] = {}
    for placement in sorted(placements, key=_value):
        shape = placement.shape
        if math.isfinite(placement.value):
            found.setdefault((shape.stages, shape.replicas, shape.tensor_parallel), placement)
    return [*found.values()][:most]


def _kept(climbs: Sequence[Climb]) -> int:
    return max(2, (len(climbs) + 1) // 2)


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
        shapes = [
            (self._least_s(shape), number, shape)
            for number, shape in enumerate(_coarse(self._problem))
        ]
        for least_s, _, shape in sorted(shapes):
            if least_s > _HOPELESS * best_s and self._objective.name == "time":
                break
            placement = self.fitted(shape)
            found.append(placement)
            best_s = min(best_s, placement.value)
        return found

    def _least_s(self, shape: PlanShape) -> float:
        """What the fastest machines take to compute a step, if nothing else takes any time."""
        speeds = self._speeds(shape)[: shape.num_seats]
        return shape.replicas * shape.num_microbatches / float(speeds.sum())

    def _speeds(self, shape: PlanShape) -> Floats:
        """Micro-batches a second through the whole model, the fastest unit first."""
        times = self._problem.times(shape)
        units = self._problem.units(shape.tensor_parallel)
        takes_s = (times.forward + times.backward)[units.kind, -1]
        speeds: Floats = np.sort(1 / takes_s)[::-1]
        return speeds

    def fitted(self, shape: PlanShape) -> Placed:
        """The best of a few ways to place it. Where memory binds, recomputed as well, and with what
        other kinds of data parallelism hold.
        """
        orders = starting_orders(self._problem, shape, self._chain(shape))
        usual = self._best(shape, orders)
        if not usual.waits:
            return usual
        leaner = [self._best(shape, orders) for shape in _leaner(self._problem, shape)]
        return min([usual, *leaner], key=_value)

    def alike(self, placement: Placed, shape: PlanShape) -> Placed:
        """`shape` placed and cut as another of its stages and replicas is; as in `fitted`, the best
        of what memory may ask for.
        """
        usual = self._same(placement, shape)
        if not usual.waits:
            return usual
        leaner = [self._same(placement, shape) for shape in _leaner(self._problem, shape)]
        return min([usual, *leaner], key=_value)

    def _same(self, placement: Placed, shape: PlanShape) -> Placed:
        order = placement.order[None]
        return best_of(self._problem, shape, self._objective, order, placement.ends[None])

    def best(self, placement: Placed) -> Placed:
        """The best of all ways, where they are few."""
        shape = placement.shape
        num_units = len(placement.order)
        if math.perm(num_units, shape.num_seats) > _FEW:
            return placement
        found = [placement]
        every = permutations(range(num_units), shape.num_seats)
        for block in _blocks(every):
            orders = np.array([_completed(order, num_units) for order in block])
            found.append(self._best(shape, orders))
        return min(found, key=_value)

    def _best(self, shape: PlanShape, orders: Ints) -> Placed:
        problem = self._problem
        split = problem.choices.split
        if split is None:
            ends = balanced(problem, shape, seats_of(shape, orders))
        else:
            ends = np.tile(np.cumsum((0, *split)), (len(orders), 1))
        return best_of(problem, shape, self._objective, orders, ends)

    def _chain(self, shape: PlanShape) -> Ints:
        size = shape.tensor_parallel
        if size not in self._chains:
            self._chains[size] = chained(self._problem.units(size))
        return self._chains[size]


def _blocks(orders: Iterable[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
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
    return [*order, *(unit for unit in range(num_units) if unit not in seated)]


def _coarse(problem: PlanProblem) -> Iterator[PlanShape]:
    """Every number of stages and replicas, with as many micro-batches as keep a pipeline busy."""
    choices = problem.choices
    most = max(machine.devices for machine in problem.cluster.machines)
    for size in choices.group_sizes(most):
        num_units = len(problem.units(size))
        for stages in range(1, min(num_units, problem.num_layers) + 1):
            if choices.stages not in (None, stages):
                continue
            for replicas in range(1, num_units // stages + 1):
                if not choices.may_replicate(replicas):
                    continue
                numbers = list(choices.micro_batches(replicas))
                if not numbers:
                    continue
                number = min(numbers, key=lambda number: abs(number - 4 * stages))
                yield _shape(problem, stages, replicas, size, number)


def _shape(problem: PlanProblem, stages: int, replicas: int, size: int, number: int) -> PlanShape:
    """With the first of all choices, and the formats that are smallest."""
    choices = problem.choices
    wire = _smallest(choices.wires)
    hops = (wire,) * (stages - 1)
    return PlanShape(
        stages=stages,
        replicas=replicas,
        tensor_parallel=size,
        num_microbatches=number,
        recompute=choices.recompute[0],
        kind=choices.kinds[0] if replicas > 1 else "none",
        exchange_wire=_smallest(choices.exchange_wires) if replicas > 1 else "none",
        forward_wires=hops,
        backward_wires=hops,
        schedule=choices.schedule,
        in_flight=choices.in_flight,
    )


def _finer(problem: PlanProblem, shape: PlanShape) -> Iterator[PlanShape]:
    """`shape` with every number of micro-batches, and else as it was before memory bound."""
    choices = problem.choices
    for number in choices.micro_batches(shape.replicas):
        yield _shape(problem, shape.stages, shape.replicas, shape.tensor_parallel, number)


def _leaner(problem: PlanProblem, shape: PlanShape) -> Iterator[PlanShape]:
    """`shape` with every recomputation and kind of data parallelism but its own."""
    choices = problem.choices
    kinds = choices.kinds if shape.replicas > 1 else ("none",)
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
            layers = np.diff(held.static + held.held)
            least = min(least, float(layers.min()) + held.working)
    return least
