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

from dpipe.search.clock import (
    FORWARD,
    INPUT,
    WEIGHT,
    WHOLE,
    Pipeline,
    Program,
    Programs,
    Replay,
    Step,
    Times,
)


@dataclass(frozen=True, slots=True)
class Move:
    """The computation at `position` of a rank's program goes before the one at `before`."""

    rank: int
    before: int
    position: int

    def __call__(self, program: Program) -> Program:
        first = program[: self.before]
        passed = program[self.before : self.position]
        moved = program[self.position]
        rest = program[self.position + 1 :]
        return (*first, moved, *passed, *rest)

    def applied(self, programs: Programs) -> Programs:
        # The others' programs stay the same objects: an order costs the memory of one program.
        others_before = programs[: self.rank]
        program = self(programs[self.rank])
        others_behind = programs[self.rank + 1 :]
        return (*others_before, program, *others_behind)


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
    # Numbered: of equal ones the first found goes first, and `Times` do not compare.
    open_orders: list[tuple[float, int, Times]] = []
    best_us = math.inf
    for number, times in enumerate(found.values()):
        open_orders.append((times.score_us, number, times))
        best_us = min(best_us, times.score_us)
    heapq.heapify(open_orders)
    trials = 0
    while open_orders and trials < max_trials and best_us > enough_us:
        _, _, times = heapq.heappop(open_orders)
        for move in _moves(pipeline, limits, times):
            programs = move.applied(times.programs)
            if programs in found or trials == max_trials:
                continue
            trials += 1
            moved = Replay(pipeline, programs).run()
            found[programs] = moved
            numbered = (moved.score_us, len(found), moved)
            heapq.heappush(open_orders, numbered)
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
        # Only a forward that begins earlier can make a rank hold more at once.
        kind, _, _ = moved
        limit = limits[move.rank]
        if kind != FORWARD or peak_held(move(program)) <= limit:
            yield move


# A rank computes each kind in order of micro-batches, so that gradients always add up in the
# same order: a move that would change that is none.
def _must_precede(step: Step, later: Step) -> bool:
    """Of one stage, where `step` comes first now: the same kind goes in order of micro-batches, and
    a micro-batch's forward goes before its backward.
    """
    same_stage = step[1] == later[1]
    return same_stage and (step[2] == later[2] or _ROLE[step[0]] == _ROLE[later[0]])


# A whole backward pass keeps its place among those that make an input gradient.
_ROLE = {FORWARD: FORWARD, INPUT: INPUT, WHOLE: INPUT, WEIGHT: WEIGHT}
_HELD = {FORWARD: 1, INPUT: 0, WEIGHT: -1, WHOLE: -1}


# Counted along the program, not by the clock: a rank does one thing at a time.
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
        self._positions: dict[Step, tuple[int, int]] = {}  # rank, and where in its program
        for rank, program in enumerate(times.programs):
            for position, step in enumerate(program):
                self._positions[step] = (rank, position)

    def moves(self) -> Iterator[Move]:
        """A step on the path before the one that it waited for."""
        programs = self._times.programs
        worst = programs[self._times.worst]
        step: Step | None = worst[-1]
        while step is not None:
            rank, position = self._positions[step]
            if self._waited_for_rank(rank, position):
                before = position - 1
                yield Move(rank, before, position)
                step = programs[rank][before]
                continue
            source = self._source(step)
            step = source
            if source in self._times.held_up:
                rank, position = self._positions[source]
                passed = self._sent_before(rank, position)
                if passed is not None:
                    yield Move(rank, passed, position)
                    step = programs[rank][passed]

    def _waited_for_rank(self, rank: int, position: int) -> bool:
        """Whether a step began as soon as the one before it on its rank was over."""
        if position == 0:
            return False
        program = self._times.programs[rank]
        step = program[position]
        before = program[position - 1]
        kind, stage, _ = before
        took_us = self._pipeline.duration_us[kind][stage]
        start_us = self._times.start_us
        # Exactly equal: the clock made the one from the other by this very sum.
        return start_us[before] + took_us == start_us[step]

    def _source(self, step: Step) -> Step | None:
        """What made that for which `step` waited."""
        kind, stage, microbatch = step
        if kind == FORWARD:
            if stage == 0:
                return None
            return FORWARD, stage - 1, microbatch
        if kind == WEIGHT:
            return INPUT, stage, microbatch
        # The last stage's backward begins with its own forward's loss.
        if stage + 1 == self._pipeline.num_stages:
            return FORWARD, stage, microbatch
        made = (INPUT, stage + 1, microbatch)
        if made in self._positions:
            return made
        return WHOLE, stage + 1, microbatch

    # Messages leave in the order in which they were made, so that the one to be passed is that of
    # the last step before that sends anything.
    def _sent_before(self, rank: int, position: int) -> int | None:
        """The position of the last message of `rank` before that of the step at `position`."""
        program = self._times.programs[rank]
        for before in reversed(range(position)):
            kind, stage, _ = program[before]
            hop = self._pipeline.hops[kind][stage]
            if hop is not None:
                return before
        return None
