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
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from operator import add, sub

from dpipe.network.egress import Egress
from dpipe.network.link import Network
from dpipe.schedule.action import Action, Op
from dpipe.schedule.generate import in_turn
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
_OPS = (Op.F, Op.I, Op.W, Op.B)  # by kind

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
    """What the clock needs to know."""

    cost: Cost
    network: Network
    num_microbatches: int
    num_ranks: int
    tails_us: tuple[float, ...]  # by rank: what follows its last computation, at least
    steps_overlap: bool = False  # a rank begins the next step without waiting for the others
    placement: tuple[int, ...] = ()  # by stage, its rank; left out: dealt out to ranks in turn

    @property
    def num_stages(self) -> int:
        return self.cost.num_stages

    @cached_property
    def rank_of(self) -> tuple[int, ...]:
        """By stage."""
        return self.placement or in_turn(self.num_stages, self.num_ranks)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """By rank."""
        stages: list[list[int]] = [[] for _ in range(self.num_ranks)]
        for stage, rank in enumerate(self.rank_of):
            stages[rank].append(stage)
        return tuple(map(tuple, stages))

    @cached_property
    def duration_us(self) -> tuple[tuple[float, ...], ...]:
        """By kind and stage."""
        # As FORWARD, INPUT, WEIGHT and WHOLE number them.
        forward_us = self.cost.forward_us
        input_us = self.cost.input_us
        weight_us = self.cost.weight_us
        whole_us = self.cost.backward_us
        return forward_us, input_us, weight_us, whole_us

    @cached_property
    def hops(self) -> tuple[tuple[Hop | None, ...], ...]:
        """By kind and stage; None where nothing crosses a link."""
        last = self.num_stages - 1
        forward: list[Hop | None] = []
        back: list[Hop | None] = [None]
        for stage in range(last):
            activation_bytes = self.cost.activation_bytes[stage]
            hop = self._hop(stage, stage + 1, activation_bytes)
            forward.append(hop)
            gradient_bytes = self.cost.gradient_bytes[stage]
            hop = self._hop(stage + 1, stage, gradient_bytes)
            back.append(hop)
        forward.append(None)
        nothing = (None,) * self.num_stages
        gradients = tuple(back)
        return tuple(forward), gradients, nothing, gradients

    def _hop(
        self,
        stage: int,
        target_stage: int,
        num_bytes: int,
    ) -> Hop | None:
        source = self.rank_of[stage]
        target = self.rank_of[target_stage]
        if source == target:
            return None
        network = self.network
        inside = network.share_machine(source, target)
        num_bits = num_bytes * 8
        delay_us = network.delay_us(source, target, num_bytes)
        rate_gbps = network.rate_gbps(source, target)
        # Between ranks of one machine no interface is in the way.
        if not inside:
            egress_gbps = network.egress_gbps(source)
            rate_gbps = min(rate_gbps, egress_gbps)
            ingress_gbps = network.ingress_gbps(target)
            # What one message waits for; those of several machines at once are the simulator's.
            if ingress_gbps < rate_gbps:
                received_us = num_bits / (ingress_gbps * 1e3)
                delay_us += received_us - num_bits / (rate_gbps * 1e3)
        alone_us = num_bits / (rate_gbps * 1e3)
        return Hop(target, num_bytes, alone_us, delay_us, inside)

    def owner(self, rank: int) -> int:
        """Of the ranks that share an interface the one whose egress it is."""
        interface = self.network.interface(rank)
        return min(interface.ranks)

    @cached_property
    def sends_in_turn(self) -> tuple[bool, ...]:
        """By rank: whether its messages leave one after another, each at full rate."""
        ranks = range(self.num_ranks)
        return tuple(map(self._sends_in_turn, ranks))

    # Then its egress needs no events: when a message has left is known as soon as it is made.
    # This is what makes the clock fast on most networks.
    def _sends_in_turn(self, rank: int) -> bool:
        targets = set()
        for hops in self.hops:
            for stage in self.stages_of[rank]:
                hop = hops[stage]
                if hop is not None:
                    targets.add(hop.target)
        network = self.network
        interface = network.interface(rank)
        if len(interface.ranks) > 1:
            return False
        if len(targets) < 2:
            return True
        egress_gbps = network.egress_gbps(rank)
        for target in targets:
            link = network.link(rank, target)
            if link != network.default:
                return False
            if network.rate_gbps(rank, target) < egress_gbps:
                return False
        return True


@dataclass(frozen=True, slots=True)
class Times:
    """When everything happened."""

    programs: Programs
    score_us: float  # how long it took; infinite where it came to a halt
    worst: int  # the rank that was last
    start_us: dict[Step, float]
    held_up: frozenset[Step]  # steps whose message had to let others of their rank leave first


_Event = tuple[float, int, int, int, int]  # when; which request it is; kind, place, number
_Sending = tuple[Step, float]  # and when it would leave with nothing beside it


class PipelineClock(ABC):
    """The ranks while they compute."""

    def __init__(self, pipeline: Pipeline) -> None:
        num_stages = pipeline.num_stages
        num_ranks = pipeline.num_ranks
        self.pipeline = pipeline
        # By kind and stage, how many are begun.
        self.begun = [[0] * num_stages for _ in range(4)]
        # By stage, what has come for its forwards, and for its backwards.
        self.inputs = [0] * num_stages
        self.gradients = [0] * num_stages
        self.inputs[0] = pipeline.num_microbatches
        self.programs: list[list[Step]] = [[] for _ in range(num_ranks)]
        self.start_us: dict[Step, float] = {}
        self.end_us = [0.0] * num_ranks
        self.now_us = 0.0
        self._held_up: set[Step] = set()
        self._busy = [False] * num_ranks
        self._events: list[_Event] = []
        self._numbers = count()
        self._free_us = [0.0] * num_ranks  # from when on its egress is idle
        self._plans = [0] * num_ranks
        # By two ranks of one machine, from when on the link between them is idle.
        self._inside_free_us: dict[tuple[int, int], float] = {}
        self._owner = [pipeline.owner(rank) for rank in range(num_ranks)]
        self._egress: list[Egress[_Sending] | None] = [None] * num_ranks
        for rank, known in enumerate(pipeline.sends_in_turn):
            if not known:
                shared = Egress[_Sending](pipeline.network, rank)
                self._egress[rank] = shared

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
                step = (kind, place, number)
                self._computed(now_us, step)
            elif kind == _CAME_FORWARD:
                self.inputs[place] += 1
                rank = self.pipeline.rank_of[place]
                self._go_on(rank, now_us)
            elif kind == _CAME_BACK:
                self.gradients[place] += 1
                rank = self.pipeline.rank_of[place]
                self._go_on(rank, now_us)
            # A departure planned before the egress was shared anew is void.
            elif number == self._plans[place]:
                self._left(place)
        return self._times()

    # A pipeline that came to a halt has times, too, but they tell nothing: its score is infinite,
    # so that it is weighed like any other order, and loses.
    def _times(self) -> Times:
        programs = tuple(map(tuple, self.programs))
        _, _, weight, whole = self.begun
        finished = min(map(add, weight, whole))
        if finished < self.pipeline.num_microbatches:
            # Came to a halt: some rank waits for what no other will send.
            nothing = frozenset[Step]()
            return Times(programs, math.inf, 0, self.start_us, nothing)
        taken_us = self._taken_us()
        score_us = max(taken_us)
        worst = taken_us.index(score_us)
        held_up = frozenset(self._held_up)
        return Times(programs, score_us, worst, self.start_us, held_up)

    def _taken_us(self) -> list[float]:
        """By rank, from when the score counts to the end of what follows its last computation."""
        pipeline = self.pipeline
        ends_us = map(add, self.end_us, pipeline.tails_us)
        if not pipeline.steps_overlap:
            return list(ends_us)
        began_us = []
        for program in self.programs:
            first = program[0]
            began_us.append(self.start_us[first])
        return list(map(sub, ends_us, began_us))

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
        takes_us = self.pipeline.duration_us[kind][stage]
        self._at(now_us + takes_us, *step)

    def _at(
        self,
        time_us: float,
        kind: int,
        place: int,
        number: int,
    ) -> None:
        request = next(self._numbers)
        event = (time_us, request, kind, place, number)
        heapq.heappush(self._events, event)

    # What stays on the rank is there at once, and the rank itself goes on at once.
    # The last stage makes its gradient of its own output.
    def _computed(self, now_us: float, step: Step) -> None:
        kind, stage, _ = step
        rank = self.pipeline.rank_of[stage]
        self._busy[rank] = False
        self.end_us[rank] = now_us
        hop = self.pipeline.hops[kind][stage]
        if hop is not None:
            self._send(now_us, rank, step, hop)
        elif kind != WEIGHT:
            self._keep(kind, stage)
        self._go_on(rank, now_us)

    def _keep(self, kind: int, stage: int) -> None:
        """What `stage` has made is for a stage of the same rank."""
        if kind == FORWARD:
            following = stage + 1
            if following < len(self.inputs):
                self.inputs[following] += 1
            else:
                self.gradients[stage] += 1
        elif stage > 0:
            self.gradients[stage - 1] += 1

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
            left_us = now_us + hop.alone_us
            self._free_us[rank] = left_us
            arrival_us = left_us + hop.delay_us
            self._arrive(arrival_us, step)
        else:
            unhindered_us = now_us + hop.alone_us
            sending = (step, unhindered_us)
            egress.offer(rank, hop.target, sending, hop.num_bytes, now_us)
            self._plan(owner, egress.due_us)

    def _send_inside(self, now_us: float, rank: int, step: Step, hop: Hop) -> None:
        ends = (rank, hop.target)
        free_us = self._inside_free_us.get(ends, 0.0)
        left_us = max(now_us, free_us) + hop.alone_us
        self._inside_free_us[ends] = left_us
        arrival_us = left_us + hop.delay_us
        self._arrive(arrival_us, step)

    def _arrive(self, time_us: float, step: Step) -> None:
        kind, stage, microbatch = step
        if kind == FORWARD:
            self._at(time_us, _CAME_FORWARD, stage + 1, microbatch)
        else:
            self._at(time_us, _CAME_BACK, stage - 1, microbatch)

    # A message that is offered changes when the others will have left, so that what was due
    # before may be due later now.
    def _plan(self, rank: int, due_us: float | None) -> None:
        plan = self._plans[rank] + 1  # what was due before is void
        self._plans[rank] = plan
        if due_us is not None:
            self._at(due_us, _LEFT, rank, plan)

    # Links that share an interface unevenly: `Egress` says what has left, as in the simulator.
    # A message is held up where it leaves later than it would with nothing beside it.
    def _left(self, rank: int) -> None:
        egress = self._egress[rank]
        assert egress is not None
        sent = egress.complete()
        step, unhindered_us = sent.item
        if sent.end_us > unhindered_us + _ROUNDING_US:
            self._held_up.add(step)
        kind, stage, _ = step
        hop = self.pipeline.hops[kind][stage]
        assert hop is not None
        arrival_us = sent.end_us + hop.delay_us
        self._arrive(arrival_us, step)
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
        if kind == WEIGHT:
            return step
        needed = self.inputs if kind == FORWARD else self.gradients
        has_come = needed[stage] > microbatch
        return step if has_come else None


def programs_of(schedule: Schedule) -> Programs:
    """Those of a compute-only schedule."""
    programs = []
    for program in schedule.programs:
        steps = map(_step_of, program)
        programs.append(tuple(steps))
    return tuple(programs)


def _step_of(action: Action) -> Step:
    kind = KINDS[action.op]
    microbatch = action.microbatch or 0
    return kind, action.stage, microbatch


def schedule_of(pipeline: Pipeline, programs: Programs, name: str) -> Schedule:
    """The way back."""
    actions = []
    for program in programs:
        steps = map(_action_of, program)
        actions.append(tuple(steps))
    num_microbatches = pipeline.num_microbatches
    return Schedule(num_microbatches, pipeline.rank_of, tuple(actions), name)


def _action_of(step: Step) -> Action:
    kind, stage, microbatch = step
    return Action(stage, _OPS[kind], microbatch)


_ROUNDING_US = 1e-6
