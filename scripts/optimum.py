"""The exact optimum of a small pipeline, by a mixed-integer program (scipy's HiGHS).

One variable a start of a computation, one a start of a message on the wire, and one that is 0 or 1
for each pair on a rank whose order is open; a rank may have several stages. Messages of a rank, or
of a link where each has a rate of its own, leave in the order in which they were made, so that
order has no variable of its own.

Links that differ are taken not to hinder each other. Where a rank's interface is narrower than its
links together, what comes out is a lower bound; `enumerated_us` knows those as well.
"""

from collections.abc import Hashable, Iterator, Sequence
from itertools import combinations, product
from typing import NamedTuple

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array, lil_array

from dpipe.search.clock import FORWARD, INPUT, WEIGHT, Hop, Pipeline, Program, Replay, Step

_SCALE = 1e3  # milliseconds: solvers work best with numbers near 1
_SOLVER = {"mip_rel_gap": 1e-6, "time_limit": 300}  # the limit in seconds
Name = Hashable  # of a variable
Entries = dict[int, float]  # of a row, by column


def optimum_us(pipeline: Pipeline, limit: int, horizon_us: float, least_us: float = 0.0) -> float:
    """The shortest makespan where no stage holds more than `limit` micro-batches; `horizon_us` is
    that of any order. To know that none is below `least_us` saves most of the proof.
    """
    program = _MixedInteger(pipeline, horizon_us / _SCALE)
    for stages in pipeline.stages_of:
        for stage in stages:
            program.compute(stage, limit)
        program.take_turns(stages)
    return program.solved(least_us / _SCALE) * _SCALE


class _Gap(NamedTuple):
    """`later - earlier >= least`"""

    later: Name
    earlier: Name
    least: float


class _MixedInteger:
    """Gaps as rows, with a switch where one holds only sometimes."""

    def __init__(self, pipeline: Pipeline, horizon: float) -> None:
        self._pipeline = pipeline
        self._horizon = horizon
        self._columns: dict[Name, int] = {}
        self._rows: list[Entries] = []
        self._least: list[float] = []

    def compute(self, stage: int, limit: int) -> None:
        """What stage `stage` computes and sends."""
        num_microbatches = self._pipeline.num_microbatches
        for number in range(num_microbatches):
            self._pass(stage, number)
        for number in range(limit, num_microbatches):
            freed = (WEIGHT, stage, number - limit)
            forward = (FORWARD, stage, number)
            self._follow(freed, forward)

    def take_turns(self, stages: Sequence[int]) -> None:
        """What the rank of these stages computes, one after the other."""
        steps = [step for stage in stages for step in self._steps_of(stage)]
        for first, second in combinations(steps, 2):
            if self._precedes(second, first):
                first, second = second, first
            self._in_turn(first, second)

    def _pass(self, stage: int, number: int) -> None:
        """Micro-batch `number` forward and backward through a stage."""
        forward = (FORWARD, stage, number)
        made = (INPUT, stage, number)
        weight = (WEIGHT, stage, number)
        self._follow(forward, made)
        self._follow(made, weight)
        self._follow(weight, "end")
        self._send(forward)
        self._send(made)

    def solved(self, least: float) -> float:
        """The smallest `end`, which is not below `least`."""
        names = list(self._columns)
        switches = np.array([_is_switch(name) for name in names])
        end = np.array([name == "end" for name in names])
        upper = np.where(switches, 1, self._horizon)
        bounds = Bounds(np.where(end, least, 0), upper)
        matrix = self._matrix()
        rows = LinearConstraint(matrix, self._least, np.inf)
        solved = milp(
            end.astype(float),
            integrality=switches.astype(int),
            bounds=bounds,
            constraints=rows,
            options=_SOLVER,
        )
        assert solved.status == 0, solved.message
        return float(solved.fun)

    def _matrix(self) -> csr_array:
        shape = (len(self._rows), len(self._columns))
        matrix = lil_array(shape)
        for row, entries in enumerate(self._rows):
            for column, value in entries.items():
                matrix[row, column] = value
        return matrix.tocsr()

    def _steps_of(self, stage: int) -> list[Step]:
        steps = []
        for kind in (FORWARD, INPUT, WEIGHT):
            for number in range(self._pipeline.num_microbatches):
                step = (kind, stage, number)
                steps.append(step)
        return steps

    def _takes(self, step: Step) -> float:
        kind, stage, _ = step
        by_stage = self._pipeline.duration_us[kind]
        return by_stage[stage] / _SCALE

    def _hop(self, step: Step) -> Hop | None:
        kind, stage, _ = step
        by_stage = self._pipeline.hops[kind]
        return by_stage[stage]

    def _send(self, step: Step) -> None:
        kind, stage, number = step
        receiver = stage + 1 if kind == FORWARD else stage - 1
        if receiver not in range(self._pipeline.num_stages):
            return
        arrived = (kind, receiver, number)
        hop = self._hop(step)
        if hop is None:
            self._follow(step, arrived)
            return
        sent = ("sent", *step)
        self._follow(step, sent)
        on_the_way_us = hop.alone_us + hop.delay_us
        on_the_way = on_the_way_us / _SCALE
        gap = _Gap(arrived, sent, on_the_way)
        self._add(gap)

    def _precedes(self, first: Step, second: Step) -> bool:
        """Whether `first` is before `second` in any order: further along the way of an earlier
        micro-batch, or of the same.
        """
        kind, stage, number = first
        other_kind, other_stage, other_number = second
        if kind == WEIGHT and (other_kind, other_stage) != (kind, stage):
            return False
        return number <= other_number and self._place(first) <= self._place(second)

    def _place(self, step: Step) -> int:
        """On the way of a micro-batch; a weight gradient is made behind its input gradient."""
        kind, stage, _ = step
        last = self._pipeline.num_stages - 1
        return stage if kind == FORWARD else 2 * last + 1 - stage

    def _in_turn(self, first: Step, second: Step) -> None:
        """One after the other, and so their messages."""
        if self._precedes(first, second):
            for gap in self._between(first, second):
                self._add(gap)
            return
        switch = ("order", first, second)
        for gap in self._between(first, second):
            self._add_if_on(switch, gap)
        for gap in self._between(second, first):
            self._add_if_off(switch, gap)

    def _between(self, first: Step, second: Step) -> Iterator[_Gap]:
        """What has to hold if `first` is before `second`."""
        takes = self._takes(first)
        yield _Gap(second, first, takes)
        hop = self._hop(first)
        other = self._hop(second)
        if hop is not None and self._hinder(hop, other):
            later = ("sent", *second)
            earlier = ("sent", *first)
            on_the_wire = hop.alone_us / _SCALE
            yield _Gap(later, earlier, on_the_wire)

    def _hinder(self, hop: Hop, other: Hop | None) -> bool:
        """Whether one message has to wait for the other."""
        if other is None:
            return False
        return hop.target == other.target or all(self._pipeline.sends_in_turn)

    def _column(self, name: Name) -> int:
        new = len(self._columns)
        return self._columns.setdefault(name, new)

    def _follow(self, step: Step, later: Name) -> None:
        takes = self._takes(step)
        gap = _Gap(later, step, takes)
        self._add(gap)

    def _add(self, gap: _Gap) -> None:
        entries = self._entries(gap)
        self._add_row(entries, gap.least)

    def _add_if_on(self, switch: Name, gap: _Gap) -> None:
        slack = self._horizon + gap.least
        entries = self._entries(gap)
        column = self._column(switch)
        entries[column] = -slack
        self._add_row(entries, gap.least - slack)

    def _add_if_off(self, switch: Name, gap: _Gap) -> None:
        slack = self._horizon + gap.least
        entries = self._entries(gap)
        column = self._column(switch)
        entries[column] = slack
        self._add_row(entries, gap.least)

    def _add_row(self, entries: Entries, least: float) -> None:
        self._rows.append(entries)
        self._least.append(least)

    def _entries(self, gap: _Gap) -> Entries:
        later = self._column(gap.later)
        earlier = self._column(gap.earlier)
        return {later: 1.0, earlier: -1.0}


def _is_switch(name: Name) -> bool:
    return isinstance(name, tuple) and name[0] == "order"


def enumerated_us(pipeline: Pipeline, limit: int) -> float:
    """The same by trying every order: for any network, but only for the smallest pipelines."""
    programs_of = []
    for stage in range(pipeline.num_stages):
        orders = _orders(stage, pipeline.num_microbatches, limit)
        programs_of.append(orders)
    return min(_replayed_us(pipeline, programs) for programs in product(*programs_of))


def _replayed_us(pipeline: Pipeline, programs: tuple[Program, ...]) -> float:
    return Replay(pipeline, programs).run().score_us


def _orders(stage: int, num_microbatches: int, limit: int) -> Iterator[Program]:
    """All programs of a rank: its forwards, input gradients and weight gradients in turn."""

    def longer(program: Program, forwards: int, made: int, weights: int) -> Iterator[Program]:
        if weights == num_microbatches:
            yield program
        if forwards < min(num_microbatches, weights + limit):
            step = (FORWARD, stage, forwards)
            yield from longer((*program, step), forwards + 1, made, weights)
        if made < forwards:
            step = (INPUT, stage, made)
            yield from longer((*program, step), forwards, made + 1, weights)
        if weights < made:
            step = (WEIGHT, stage, weights)
            yield from longer((*program, step), forwards, made, weights + 1)

    return longer((), 0, 0, 0)
