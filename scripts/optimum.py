"""The exact optimum of a small pipeline, by a mixed-integer program (scipy's HiGHS).

One variable a start of a computation, one a start of a message on the wire, and one that is 0 or 1
for each pair on a rank whose order is open. Messages of a rank, or of a link where each has a rate
of its own, leave in the order in which they were made, so that order has no variable of its own.

Links that differ are taken not to hinder each other. Where a rank's interface is narrower than its
links together, what comes out is a lower bound; `enumerated_us` knows those as well.
"""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from dpipe.search.clock import FORWARD, INPUT, WEIGHT, Hop, Pipeline, Program, Replay, Step

Durations = list[list[float]]  # by kind and stage


class _Rows:
    """Rows of `later - earlier >= gap`, with a switch where it holds only sometimes."""

    def __init__(self) -> None:
        self.columns: dict[object, int] = {}
        self.rows: list[tuple[dict[int, float], float]] = []

    def column(self, name: object) -> int:
        return self.columns.setdefault(name, len(self.columns))

    def after(self, later: object, earlier: object, gap: float) -> None:
        self.rows.append(({self.column(later): 1.0, self.column(earlier): -1.0}, gap))

    def after_if(
        self, switch: object, value: int, later: object, earlier: object, gap: float, horizon: float
    ) -> None:
        """The constraint holds if `switch` is `value`."""
        slack = horizon + gap
        row = {self.column(later): 1.0, self.column(earlier): -1.0}
        row[self.column(switch)] = -slack if value else slack
        self.rows.append((row, gap - slack if value else gap))


def optimum_us(pipeline: Pipeline, limit: int, horizon_us: float) -> float:
    """The shortest makespan where no rank holds more than `limit` micro-batches; `horizon_us` is
    that of any order.
    """
    program = _Rows()
    stages = range(pipeline.num_stages)
    microbatches = range(pipeline.num_microbatches)
    scale = 1e3  # milliseconds: solvers work best with numbers near 1
    horizon = horizon_us / scale
    takes = [[time_us / scale for time_us in kind] for kind in pipeline.duration_us]
    for stage in stages:
        steps = [(kind, stage, number) for kind in (0, 1, 2) for number in microbatches]
        for number in microbatches:
            forward, made, weight = ((kind, stage, number) for kind in (0, 1, 2))
            program.after(made, forward, takes[FORWARD][stage])
            program.after(weight, made, takes[INPUT][stage])
            program.after("end", weight, takes[WEIGHT][stage])
            if number >= limit:
                program.after(forward, (WEIGHT, stage, number - limit), takes[WEIGHT][stage])
            for kind in (FORWARD, INPUT):
                _send(program, pipeline, (kind, stage, number), takes, scale)
        for first, second in combinations(steps, 2):
            _in_turn(program, pipeline, first, second, takes, horizon, scale)
    return _solved(program, horizon) * scale


def _send(program: _Rows, pipeline: Pipeline, step: Step, takes: Durations, scale: float) -> None:
    kind, stage, number = step
    hop = pipeline.hops[kind][stage]
    if hop is None:
        return
    arrived = (kind, stage + 1 if kind == FORWARD else stage - 1, number)
    program.after(("sent", *step), step, takes[kind][stage])
    program.after(arrived, ("sent", *step), (hop.alone_us + hop.delay_us) / scale)


def _in_turn(
    program: _Rows,
    pipeline: Pipeline,
    first: Step,
    second: Step,
    takes: Durations,
    horizon: float,
    scale: float,
) -> None:
    """One after the other, and so their messages."""
    hops = [pipeline.hops[step[0]][step[1]] for step in (first, second)]
    order = ("order", first, second)
    if first[0] == second[0] or first[2] <= second[2]:
        ways = [(None, first, second, hops[0])]
    else:
        ways = [(1, first, second, hops[0]), (0, second, first, hops[1])]
    for value, earlier, later, hop in ways:
        gaps = [(later, earlier, takes[earlier[0]][earlier[1]])]
        if hop is not None and _hinder(pipeline, *hops):
            gaps.append((("sent", *later), ("sent", *earlier), hop.alone_us / scale))
        for after, before, gap in gaps:
            if value is None:
                program.after(after, before, gap)
            else:
                program.after_if(order, value, after, before, gap, horizon)


def _hinder(pipeline: Pipeline, hop: Hop | None, other: Hop | None) -> bool:
    """Whether one message has to wait for the other."""
    if hop is None or other is None:
        return False
    return hop.target == other.target or all(pipeline.sends_in_turn)


def _solved(program: _Rows, horizon: float) -> float:
    size = len(program.columns)
    matrix = lil_array((len(program.rows), size))
    for row, (entries, _) in enumerate(program.rows):
        for column, value in entries.items():
            matrix[row, column] = value
    switches = np.array(
        [isinstance(name, tuple) and name[0] == "order" for name in program.columns]
    )
    wanted = np.zeros(size)
    wanted[program.columns["end"]] = 1
    solved = milp(
        wanted,
        integrality=switches.astype(int),
        bounds=Bounds(0, np.where(switches, 1, horizon)),
        constraints=LinearConstraint(matrix.tocsr(), [gap for _, gap in program.rows], np.inf),
        options={"mip_rel_gap": 1e-6, "time_limit": 300},
    )
    assert solved.status == 0, solved.message
    return float(solved.fun)


def enumerated_us(pipeline: Pipeline, limit: int) -> float:
    """The same by trying every order: for any network, but only for the smallest pipelines."""
    ranks = [
        list(_orders(stage, pipeline.num_microbatches, limit))
        for stage in range(pipeline.num_stages)
    ]
    return min(Replay(pipeline, programs).run().score_us for programs in product(*ranks))


def _orders(stage: int, num_microbatches: int, limit: int) -> Iterator[Program]:
    """All programs of a rank: its forwards, input gradients and weight gradients in turn."""

    def longer(program: Program, done: tuple[int, int, int]) -> Iterator[Program]:
        forward, made, weight = done
        if weight == num_microbatches:
            yield program
        if forward < min(num_microbatches, weight + limit):
            yield from longer((*program, (FORWARD, stage, forward)), (forward + 1, made, weight))
        if made < forward:
            yield from longer((*program, (INPUT, stage, made)), (forward, made + 1, weight))
        if weight < made:
            yield from longer((*program, (WEIGHT, stage, weight)), (forward, made, weight + 1))

    return longer((), (0, 0, 0))
