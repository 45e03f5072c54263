"""A better order from a good one: what is on the critical path is moved forward.

A step's time is that of a chain of computations and messages, none of which waits for anything
else. It gets shorter only if something in the chain goes before what it waited for:

    rank 0  [0F0][0F1][0W0][0I1]                  0I1 waited for 0W0: try it before 0W0
                               \\
    rank 1                      ...               a message that waited for another one of its
                                                  rank: try the computation that made it earlier

The best order so far is taken, all such moves are tried, and each result is kept to be taken in its
turn, until nothing is left or the time for it is over (best-first search in the neighbourhood of
van Laarhoven et al. 1992).
"""

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from dpipe.search.clock import FORWARD, INPUT, WEIGHT, WHOLE, Pipeline, Program, Replay, Step, Times


@dataclass(frozen=True, slots=True)
class Move:
    """The computation at `position` of a rank's program goes before the one at `before`."""

    rank: int
    before: int
    position: int

    def __call__(self, program: Program) -> Program:
        moved = program[self.position]
        passed = program[self.before : self.position]
        return (*program[: self.before], moved, *passed, *program[self.position + 1 :])


def improve(
    pipeline: Pipeline,
    limits: Sequence[int],
    orders: Iterable[Times],
    *,
    enough_us: float,
    max_trials: int,
) -> list[Times]:
    """`orders` and what was found from them, the best first.

    No rank gets to hold more than its limit in activations. The search ends when an order takes no
    more than `enough_us`, and after `max_trials` replays.
    """
    found = {times.programs: times for times in orders}
    open_orders = [(times.score_us, number, times) for number, times in enumerate(found.values())]
    heapq.heapify(open_orders)
    best_us = min((times.score_us for times in found.values()), default=math.inf)
    trials = 0
    while open_orders and trials < max_trials and best_us > enough_us:
        times = heapq.heappop(open_orders)[-1]
        for move in _moves(pipeline, limits, times):
            program = move(times.programs[move.rank])
            programs = (*times.programs[: move.rank], program, *times.programs[move.rank + 1 :])
            if programs in found or trials == max_trials:
                continue
            trials += 1
            moved = Replay(pipeline, programs).run()
            found[programs] = moved
            heapq.heappush(open_orders, (moved.score_us, len(found), moved))
            best_us = min(best_us, moved.score_us)
    return sorted(found.values(), key=lambda times: times.score_us)


def _moves(pipeline: Pipeline, limits: Sequence[int], times: Times) -> Iterator[Move]:
    if times.score_us == math.inf:
        return
    for move in _CriticalPath(pipeline, times).moves():
        program = times.programs[move.rank]
        moved = program[move.position]
        passed = program[move.before : move.position]
        if any(_must_precede(step, moved) for step in passed):
            continue
        if moved[0] != FORWARD or peak_held(move(program)) <= limits[move.rank]:
            yield move


def _must_precede(step: Step, later: Step) -> bool:
    """Of one stage, where `step` comes first now: the same kind goes in order of micro-batches, and
    a micro-batch's forward goes before its backward.
    """
    same_stage = step[1] == later[1]
    return same_stage and (step[2] == later[2] or _ROLE[step[0]] == _ROLE[later[0]])


# A whole backward pass keeps its place among those that make an input gradient.
_ROLE = {FORWARD: FORWARD, INPUT: INPUT, WHOLE: INPUT, WEIGHT: WEIGHT}
_HELD = {FORWARD: 1, INPUT: 0, WEIGHT: -1, WHOLE: -1}


def peak_held(program: Program) -> int:
    """The most activations that a rank holds."""
    held = 0
    peak = 0
    for kind, _, _ in program:
        held += _HELD[kind]
        peak = max(peak, held)
    return peak


class _CriticalPath:
    """The chain that ends last, walked from its end."""

    def __init__(self, pipeline: Pipeline, times: Times) -> None:
        self._pipeline = pipeline
        self._times = times
        self._positions = {
            step: (rank, position)
            for rank, program in enumerate(times.programs)
            for position, step in enumerate(program)
        }

    def moves(self) -> Iterator[Move]:
        """A step on the path before the one that it waited for."""
        step: Step | None = self._times.programs[self._times.worst][-1]
        while step is not None:
            rank, position = self._positions[step]
            if self._waited_for_rank(rank, position):
                yield Move(rank, position - 1, position)
                step = self._times.programs[rank][position - 1]
                continue
            source = self._source(step)
            step = source
            if source in self._times.held_up:
                rank, position = self._positions[source]
                before = self._sent_before(rank, position)
                if before is not None:
                    yield Move(rank, before, position)
                    step = self._times.programs[rank][before]

    def _waited_for_rank(self, rank: int, position: int) -> bool:
        """Whether a step began as soon as the one before it on its rank was over."""
        if position == 0:
            return False
        kind, stage, _ = before = self._times.programs[rank][position - 1]
        step = self._times.programs[rank][position]
        start_us = self._times.start_us
        return start_us[before] + self._pipeline.duration_us[kind][stage] == start_us[step]

    def _source(self, step: Step) -> Step | None:
        """What made that for which `step` waited."""
        kind, stage, microbatch = step
        if kind == FORWARD:
            return (FORWARD, stage - 1, microbatch) if stage > 0 else None
        if kind == WEIGHT:
            return INPUT, stage, microbatch
        if stage + 1 == self._pipeline.num_stages:
            return FORWARD, stage, microbatch
        made = INPUT, stage + 1, microbatch
        return made if made in self._positions else (WHOLE, *made[1:])

    def _sent_before(self, rank: int, position: int) -> int | None:
        """The position of the last message of `rank` before that of the step at `position`."""
        program = self._times.programs[rank]
        for before in reversed(range(position)):
            kind, stage, _ = program[before]
            if self._pipeline.hops[kind][stage] is not None:
                return before
        return None
