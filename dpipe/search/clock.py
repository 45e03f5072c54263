"""A fast clock: when each computation of a pipeline happens, by the model of `timeline.simulate`,
without spans and without what comes behind the last computation.

    rank 0  compute  [0F0][0F1]             a step starts when its rank is free, and when what it
            egress        [0>1 ][0>1 ]      needs has come
    rank 1  compute          :   [1F0]...   a message leaves in its turn, and arrives a delay later

What a rank does next is left to a subclass: `Replay` goes by programs, `greedy.Greedy` by a rule.
One step of 12 stages and 64 micro-batches takes 10 ms of a core, where a simulation takes 100.
"""

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import add, sub

from dpipe.network.egress import Egress
from dpipe.network.link import Network
from dpipe.schedule.action import Action, Op
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost

FORWARD, INPUT, WEIGHT, WHOLE = range(4)  # as numbers they index lists
_CAME_FORWARD, _CAME_BACK, _LEFT = range(4, 7)
KINDS = {
    Op.F: FORWARD,
    Op.I: INPUT,
    Op.W: WEIGHT,
    Op.B: WHOLE,
}
_OPS = {kind: op for op, kind in KINDS.items()}

Step = tuple[int, int, int]  # kind, stage, micro-batch
Program = tuple[Step, ...]
Programs = tuple[Program, ...]


@dataclass(frozen=True, slots=True)
class Hop:
    """A message from one stage to the next one, or back."""

    target: int  # rank
    num_bytes: int
    alone_us: float  # on the wire, with nothing beside it
    delay_us: float
    inside: bool = False  # one machine, so that it passes no interface


@dataclass(frozen=True)
class Pipeline:
    """What the clock needs to know; stages are dealt out to ranks in turn."""

    cost: Cost
    network: Network
    num_microbatches: int
    num_ranks: int
    tails_us: tuple[float, ...]  # by rank: what follows its last computation, at least
    steps_overlap: bool = False  # a rank begins the next step without waiting for the others

    @property
    def num_stages(self) -> int:
        return self.cost.num_stages

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """By stage."""
        return tuple(stage % self.num_ranks for stage in range(self.num_stages))

    @cached_property
    def stages_of(self) -> tuple[range, ...]:
        """By rank."""
        stages = self.num_stages
        return tuple(range(rank, stages, self.num_ranks) for rank in range(self.num_ranks))

    @cached_property
    def duration_us(self) -> tuple[tuple[float, ...], ...]:
        """By kind and stage."""
        cost = self.cost
        return (
            cost.forward_us,
            cost.input_us,
            cost.weight_us,
            cost.backward_us,
        )

    @cached_property
    def hops(self) -> tuple[tuple[Hop | None, ...], ...]:
        """By kind and stage; None where nothing crosses a link."""
        stages = range(self.num_stages)
        # The first stage sends no gradient: those of the others begin at stage 1.
        sizes = self.cost.activation_bytes, (0, *self.cost.gradient_bytes)
        forward = tuple(self._hop(s, s + 1, sizes[0]) for s in stages)
        back = tuple(self._hop(s, s - 1, sizes[1]) for s in stages)
        return forward, back, (None,) * len(stages), back

    def _hop(
        self,
        stage: int,
        target: int,
        num_bytes: Sequence[int],
    ) -> Hop | None:
        if not 0 <= target < self.num_stages or self.rank_of[stage] == self.rank_of[target]:
            return None
        network = self.network
        ends = self.rank_of[stage], self.rank_of[target]
        inside = network.share_machine(*ends)
        size = num_bytes[stage]
        delay_us = network.delay_us(*ends, size)
        rate_gbps = network.rate_gbps(*ends)
        if not inside:
            rate_gbps = min(rate_gbps, network.egress_gbps(ends[0]))
            ingress_gbps = network.ingress_gbps(ends[1])
            # What one message waits for; those of several machines at once are the simulator's.
            if ingress_gbps < rate_gbps:
                delay_us += size * 8 / (ingress_gbps * 1e3) - size * 8 / (rate_gbps * 1e3)
        alone_us = size * 8 / (rate_gbps * 1e3)
        return Hop(ends[1], size, alone_us, delay_us, inside)

    def owner(self, rank: int) -> int:
        """Of the ranks that share an interface the one whose egress it is."""
        return min(self.network.interface(rank).ranks)

    @cached_property
    def sends_in_turn(self) -> tuple[bool, ...]:
        """By rank: whether its messages leave one after another, each at full rate."""
        return tuple(self._sends_in_turn(rank) for rank in range(self.num_ranks))

    # Then its egress needs no events: when a message has left is known as soon as it is made.
    # This is what makes the clock fast on most networks.
    def _sends_in_turn(self, rank: int) -> bool:
        hops = (hops[stage] for hops in self.hops for stage in self.stages_of[rank])
        targets = {hop.target for hop in hops if hop is not None}
        network = self.network
        if len(network.interface(rank).ranks) > 1:
            return False
        return len(targets) < 2 or all(
            network.link(rank, target) == network.default
            and network.rate_gbps(rank, target) >= network.egress_gbps(rank)
            for target in targets
        )


@dataclass(frozen=True, slots=True)
class Times:
    """When everything happened."""

    programs: Programs
    score_us: float  # how long it took; infinite where it came to a halt
    worst: int  # the rank that was last
    start_us: dict[Step, float]
    held_up: frozenset[Step]  # steps whose message had to let others of their rank leave first


class PipelineClock(ABC):
    """The ranks while they compute."""

    def __init__(self, pipeline: Pipeline) -> None:
        stages = range(pipeline.num_stages)
        self.pipeline = pipeline
        # By kind and stage, how many are begun.
        self.begun = [[0 for _ in stages] for _ in range(4)]
        # By stage, what has come for its forwards, and for its backwards.
        self.inputs = [0 for _ in stages]
        self.gradients = [0 for _ in stages]
        self.inputs[0] = pipeline.num_microbatches
        self.programs: list[list[Step]] = [[] for _ in range(pipeline.num_ranks)]
        self.start_us: dict[Step, float] = {}
        self.end_us = [0.0 for _ in self.programs]
        self.now_us = 0.0
        self._held_up: set[Step] = set()
        self._busy = [False for _ in self.programs]
        self._events: list[tuple[float, int, int, int, int]] = []
        self._numbers = count()
        self._free_us = [0.0 for _ in self.programs]  # from when on its egress is idle
        self._plans = [0 for _ in self.programs]
        # By two ranks of one machine, from when on the link between them is idle.
        self._inside_free_us: dict[tuple[int, int], float] = {}
        self._owner = [pipeline.owner(rank) for rank in range(pipeline.num_ranks)]
        self._egress = [
            None if in_turn else Egress[tuple[Step, float]](pipeline.network, rank)
            for rank, in_turn in enumerate(pipeline.sends_in_turn)
        ]

    @abstractmethod
    def next_step(self, rank: int) -> Step | None:
        """What an idle rank does now; None: it waits for what will come."""

    def run(self) -> Times:
        for rank in range(len(self.programs)):
            self._go_on(rank, 0.0)
        while self._events:
            now_us, _, kind, place, number = heapq.heappop(self._events)
            self.now_us = now_us
            if kind < _CAME_FORWARD:
                self._computed(now_us, (kind, place, number))
            elif kind == _CAME_FORWARD:
                self.inputs[place] += 1
                self._go_on(self.pipeline.rank_of[place], now_us)
            elif kind == _CAME_BACK:
                self.gradients[place] += 1
                self._go_on(self.pipeline.rank_of[place], now_us)
            # A departure planned before the egress was shared anew is void.
            elif number == self._plans[place]:
                self._left(place)
        return self._times()

    # A pipeline that came to a halt has times, too, but they tell nothing: its score is infinite,
    # so that it is weighed like any other order, and loses.
    def _times(self) -> Times:
        pipeline = self.pipeline
        programs = tuple(map(tuple, self.programs))
        finished = map(
            sum,
            zip(
                self.begun[WEIGHT],
                self.begun[WHOLE],
                strict=True,
            ),
        )
        if any(number < pipeline.num_microbatches for number in finished):
            # Came to a halt: some rank waits for what no other will send.
            return Times(programs, math.inf, 0, self.start_us, frozenset())
        taken_us = list(map(add, self.end_us, pipeline.tails_us))
        if pipeline.steps_overlap:
            began_us = (self.start_us[program[0]] for program in programs)
            taken_us = list(map(sub, taken_us, began_us))
        score_us = max(taken_us)
        worst = taken_us.index(score_us)
        return Times(
            programs,
            score_us,
            worst,
            self.start_us,
            frozenset(self._held_up),
        )

    def _go_on(self, rank: int, now_us: float) -> None:
        if self._busy[rank]:
            return
        step = self.next_step(rank)
        if step is None:
            return
        kind, stage, _ = step
        self.begun[kind][stage] += 1
        self.programs[rank].append(step)
        self.start_us[step] = now_us
        self._busy[rank] = True
        self._at(
            now_us + self.pipeline.duration_us[kind][stage],
            *step,
        )

    def _at(
        self,
        time_us: float,
        kind: int,
        place: int,
        number: int,
    ) -> None:
        heapq.heappush(
            self._events,
            (
                time_us,
                next(self._numbers),
                kind,
                place,
                number,
            ),
        )

    # What stays on the rank is there at once, and the rank itself goes on at once.
    # The last stage makes its gradient of its own output.
    def _computed(self, now_us: float, step: Step) -> None:
        kind, stage, _ = step
        rank = self.pipeline.rank_of[stage]
        self._busy[rank] = False
        self.end_us[rank] = now_us
        if kind != WEIGHT:
            hop = self.pipeline.hops[kind][stage]
            if hop is not None:
                self._send(now_us, rank, step, hop)
            elif kind != FORWARD:
                if stage > 0:
                    self.gradients[stage - 1] += 1
            elif stage + 1 < len(self.inputs):
                self.inputs[stage + 1] += 1
            else:
                self.gradients[stage] += 1
        self._go_on(rank, now_us)

    def _send(self, now_us: float, rank: int, step: Step, hop: Hop) -> None:
        if hop.inside:
            self._send_inside(now_us, rank, step, hop)
            return
        owner = self._owner[rank]
        egress = self._egress[owner]
        if egress is None:
            free_us = self._free_us[rank]
            if free_us > now_us:
                self._held_up.add(step)
                now_us = free_us
            now_us += hop.alone_us
            self._free_us[rank] = now_us
            self._arrive(now_us + hop.delay_us, step)
        else:
            unhindered_us = now_us + hop.alone_us
            egress.offer(
                rank,
                hop.target,
                (step, unhindered_us),
                hop.num_bytes,
                now_us,
            )
            self._plan(owner, egress.due_us)

    def _send_inside(self, now_us: float, rank: int, step: Step, hop: Hop) -> None:
        ends = rank, hop.target
        start_us = max(now_us, self._inside_free_us.get(ends, 0.0))
        self._inside_free_us[ends] = start_us + hop.alone_us
        self._arrive(start_us + hop.alone_us + hop.delay_us, step)

    def _arrive(self, time_us: float, step: Step) -> None:
        kind, stage, microbatch = step
        if kind == FORWARD:
            self._at(time_us, _CAME_FORWARD, stage + 1, microbatch)
        else:
            self._at(time_us, _CAME_BACK, stage - 1, microbatch)

    # A message that is offered changes when the others will have left, so that what was due
    # before may be due later now.
    def _plan(self, rank: int, due_us: float | None) -> None:
        self._plans[rank] += 1  # what was due before is void
        if due_us is not None:
            self._at(due_us, _LEFT, rank, self._plans[rank])

    # Links that share an interface unevenly: `Egress` says what has left, as in the simulator.
    # A message is held up where it leaves later than it would with nothing beside it.
    def _left(self, rank: int) -> None:
        egress = self._egress[rank]
        assert egress is not None
        sent = egress.complete()
        step, unhindered_us = sent.item
        if sent.end_us > unhindered_us + _ROUNDING_US:
            self._held_up.add(step)
        hop = self.pipeline.hops[step[0]][step[1]]
        assert hop is not None
        delay_us = hop.delay_us
        self._arrive(sent.end_us + delay_us, step)
        self._plan(rank, egress.due_us)


class Replay(PipelineClock):
    """Goes by given programs."""

    def __init__(self, pipeline: Pipeline, programs: Programs) -> None:
        super().__init__(pipeline)
        self._given = programs

    def next_step(self, rank: int) -> Step | None:
        position = len(self.programs[rank])
        program = self._given[rank]
        if position == len(program):
            return None
        step = program[position]
        kind, stage, microbatch = step
        if kind == FORWARD:
            ready = self.inputs[stage] > microbatch
        else:
            ready = kind == WEIGHT or self.gradients[stage] > microbatch
        return step if ready else None


def programs_of(schedule: Schedule) -> Programs:
    """Those of a compute-only schedule."""
    return tuple(
        tuple(
            (
                KINDS[action.op],
                action.stage,
                action.microbatch or 0,
            )
            for action in program
        )
        for program in schedule.programs
    )


def schedule_of(pipeline: Pipeline, programs: Programs, name: str) -> Schedule:
    """The way back."""
    actions = (
        tuple(Action(stage, _OPS[kind], microbatch) for kind, stage, microbatch in program)
        for program in programs
    )
    return Schedule(
        pipeline.num_microbatches,
        pipeline.rank_of,
        tuple(actions),
        name,
    )


_ROUNDING_US = 1e-6
