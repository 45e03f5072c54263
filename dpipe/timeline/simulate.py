"""When a schedule would happen on a given network: the same timeline that a run writes, before
there is a run.

The *step time* is the steady period between steps. Steps follow each other as in a run: a rank
begins the next one when it has ended its own, so that steps may overlap (`B`, below, is a rank that
ends late and is not waited for), and the step time may be less than a step takes alone.

    rank 0  [ step 0      ][ step 1      ][ step 2
    rank 1    [ step 0    B  ][ step 1    B  ][ step 2
            |--- alone -------|--- step time ---|

How many steps it takes to know the period, and why it is exact: the simulation is deterministic and
does not know what time it is, so if it comes to a state in which it has been before, all repeats.

- Where a rank begins a step with nothing under way (it votes when all that it sent has left), the
  state is when each rank begins. A step repeats if every rank begins the next one exactly so much
  later as every other; a rank that waits for its first work may as well have begun any time before
  it came. Most schedules are known after one step (the ranks have run dry before rank 0 begins the
  next), those that overlap after two or three.
- Where all ranks wait for a vote, each begins a step when the verdict reaches it. The simulation
  starts so, and one step tells.
- Servers that still send, and cores that are shared, carry more over: there two steps in a row must
  agree in every span. An event of a step depends on that step, the one before and what the same
  ranks do meanwhile, so that these two determine the third.

Ranks whose own cycles are almost as long as the pipeline's drift for many steps. After `MOST_STEPS`
the simulation is given up, and the slowest rank's mean over the second half of them stands for the
period: it is off by at most what the ranks drift apart in a step.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

from dpipe.network.link import Host, Network
from dpipe.schedule.action import Action, Op
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulation import Simulation
from dpipe.timeline.span import Lane, Span, Timeline

_DRAWS = 9
MOST_STEPS = 24
# Events of a step in which replicas that vote are simulated one by one: some 50 ms of a core.
_MOST_APART = 2_000
_SAME = 1e-9  # of a time: rounding


def simulate(
    schedule: Schedule,
    cost: Cost,
    network: Network,
    hosts: Sequence[Host] = (),
    replicas: Replicas | None = None,
    ballots: Network | None = None,
    costs: Sequence[Cost] = (),
) -> Timeline:
    """A steady step of `schedule`, and as `step_us` the step time; one that is not lowered is
    lowered first, and one without a backward pass is simulated alone.

    `hosts` are machines that have fewer cores than ranks; costs are then those of a core to
    oneself. With `replicas` every one of them runs the schedule, and their stages agree at
    REDUCE_GRAD. `ballots` is the network that VOTE crosses; by default no rank waits for a vote.
    `costs` are what actions take and send by replica, where machines or cuts differ.

    Where links lose packets, losses are drawn, always alike, and it is the middle one of `_DRAWS`
    steps; a search (`period`) has each message late by the mean.

    Raises `ScheduleError` for a schedule that does not fit `cost` or cannot make progress.
    """
    scenario = Scenario(schedule, cost, network, hosts, replicas, ballots, costs)
    if not schedule.trains:
        return simulate_alone(scenario)
    lowered = scenario.lowered()
    if not network.loses:
        return Steady(lowered).steady_step()
    # A step waits for the latest of its messages, which the mean of each does not say.
    drawn = []
    for seed in range(_DRAWS):
        drawn_scenario = replace(lowered, network=network.drawn(seed))
        drawn.append(Steady(drawn_scenario).steady_step())
    drawn.sort(key=lambda timeline: timeline.step_us)
    return drawn[_DRAWS // 2]


def simulate_alone(scenario: Scenario) -> Timeline:
    """A single step, which all ranks begin at once and which nothing follows. It takes at least the
    step time. Lowers and raises as `simulate` does.
    """
    alone = Simulation(scenario.lowered())
    alone.run()
    return alone.timeline(0)


def period(scenario: Scenario, most_us: float = math.inf) -> float:
    """The step time in microseconds: what `auto` looks for the least of. Infinite as soon as it is
    certain to be above `most_us`, which saves most of the time of a search. Lowers and raises as
    `simulate` does.

    Of replicas that are alike one is simulated, in large steps also where they vote: all ranks then
    have the verdict as late as those of other hosts than the coordinator's. That may be one delay
    of a ballot off, and more where the coordinator's rank, a delay ahead, sends something before
    what it would else have sent after.
    """
    lowered = scenario.lowered()
    steady = Steady(lowered, most_us, mirrors_votes=_num_events(lowered) > _MOST_APART)
    try:
        return steady.period()
    except _LateError:
        return math.inf


def _num_events(scenario: Scenario) -> int:
    """Actions and messages of a step of all replicas."""
    schedule = scenario.schedule
    num_actions = sum(map(len, schedule.programs))
    replicas = scenario.replicas
    if replicas is None:
        return num_actions
    num_messages = sum(map(len, replicas.exchange.programs))
    return replicas.count * num_actions + schedule.num_stages * num_messages


class Steady(Simulation):
    """A simulation of as many steps as it takes until they repeat."""

    def __init__(
        self, scenario: Scenario, most_us: float = math.inf, *, mirrors_votes: bool = False
    ) -> None:
        super().__init__(scenario, MOST_STEPS, mirrors_votes=mirrors_votes)
        self.most_us = most_us
        self.steady = MOST_STEPS - 1  # the step that repeats
        self.period_us: float | None = None
        # By rank: what it has still to compute of the first step, what of that is the optimizer's.
        self.left_us: list[float] = []
        self.update_us: list[float] = []
        # By rank, what its last exchange takes at least behind its last computation.
        self.tail_us: list[float] = []
        for rank, program in enumerate(self.programs):
            updates = [action for action in program if action.op is Op.STEP]
            self.left_us.append(self._work_us(rank, program))
            self.update_us.append(self._work_us(rank, updates))
            self.tail_us.append(self._of_exchange_us(rank))

    def steady_step(self) -> Timeline:
        period_us = self.period()
        timeline = self.timeline(self.steady)
        began_us = timeline.began_us
        spans = tuple(span.later(-began_us) for span in timeline.spans)
        return replace(timeline, spans=spans, period_us=period_us)

    def period(self) -> float:
        """Raises `_LateError` as soon as it is certain to be above `most_us`."""
        # A rank computes one action at a time: no period is shorter than its work.
        if max(self.left_us) > self._certain_us:
            raise _LateError
        self.run(self._verdicts_us())
        if self.period_us is None:
            self.period_us = self._mean_us()
        return self.period_us

    def _mean_us(self) -> float:
        """The slowest rank's step time, of those that never repeated."""
        half = MOST_STEPS // 2
        num_steps = MOST_STEPS - half
        means_us = []
        for starts_us in self.starts_us:
            took_us = starts_us[-1] - starts_us[half]
            means_us.append(took_us / num_steps)
        return max(means_us)

    def _verdicts_us(self) -> list[float]:
        """When each rank begins a step, after the moment when a vote is counted."""
        verdicts_us = []
        for rank, (_, verdict_us) in enumerate(self.vote_delays_us):
            update_us = self.update_us[rank]
            verdicts_us.append(verdict_us + update_us)
        return verdicts_us

    def ended(self, step: int) -> None:
        if self._carries_more:
            # The spans of `step` itself may not all be over.
            step -= 1
            steady = step > 1 and self._same_spans(step - 1, step)
        else:
            steady = self._begins_alike(step)
        if steady:
            self.steady = step
            self.period_us = self._later_us(step, step + 1)
            self.clock.stopped = True

    def _later_us(self, step: int, other: int) -> float:
        """How much later than `step` rank 0 began `other`."""
        starts_us = self.starts_us[0]
        return starts_us[other] - starts_us[step]

    @property
    def _carries_more(self) -> bool:
        """Whether more lasts from step to step than when each rank begins."""
        if self.machines.cores or self.scenario.schedule.runs_ahead:
            return True
        replicas = self.scenario.replicas
        if replicas is not None and replicas.servers:
            return True
        ops = {action.op for action in self.programs[0]}
        return Op.VOTE not in ops

    def _begins_alike(self, step: int) -> bool:
        """Whether each rank begins the step after `step` as it began `step`, equally much later."""
        exchanges = self.exchanges
        after_step = exchanges is not None and exchanges.after_step
        if after_step and step == 0:
            return False  # nothing came before it
        # What is exchanged from the beginning of a step begins with it.
        delayed = exchanges is not None and exchanges.delayed
        first_us: dict[int, float] = {}
        if not after_step and not delayed:
            first_us = self._first_us(step)
        later_us = self._later_us(step, step + 1)
        for rank, starts_us in enumerate(self.starts_us):
            began_us = starts_us[step]
            begins_us = starts_us[step + 1] - later_us
            if math.isclose(begins_us, began_us, rel_tol=_SAME, abs_tol=_SAME):
                continue
            latest_us = first_us.get(rank, -math.inf)
            if not begins_us <= latest_us:
                return False
        return True

    def _first_us(self, step: int) -> dict[int, float]:
        """By rank that began `step` with a wait, until when it waited."""
        first_us = {}
        for span in self.machines.spans[step]:
            if span.lane is not Lane.WAIT:
                continue
            starts_us = self.starts_us[span.rank]
            if span.start_us == starts_us[step]:
                first_us[span.rank] = span.end_us
        return first_us

    def _same_spans(self, step: int, other: int) -> bool:
        """Whether all that happened in `step` happened in `other`, equally much later."""
        later_us = self._later_us(step, other)
        spans = self.machines.spans
        before = sorted(spans[step], key=_place)
        after = sorted(spans[other], key=_place)
        if len(before) != len(after):
            return False
        moved = [span.later(later_us) for span in before]
        return all(map(_same, moved, after))

    def compute(self, rank: int, action: Action) -> None:
        if self.machines.step[rank] == 0:
            least_us = self._least_us(rank, action)
            if least_us > self._certain_us:
                raise _LateError
        takes_us = self.cost_at(rank).duration_us(action)
        self.left_us[rank] -= takes_us
        super().compute(rank, action)

    @property
    def _certain_us(self) -> float:
        return self.most_us * (1 + _SAME)

    def _least_us(self, rank: int, action: Action) -> float:
        """A lower bound of the period: that `rank` waits no more before the end of the first step.

        Without a vote it is rank 0's alone. Its steps do not get shorter, because what is left of
        the step before only ever delays the next one; other ranks begin the first one early, and
        wait.
        """
        # At the vote and the optimizer's step the exchange is behind the rank.
        tail_us = self.tail_us[rank]
        if action.op in (Op.VOTE, Op.STEP):
            tail_us = 0.0
        left_us = self.left_us[rank]
        end_us = self.clock.now_us + left_us + tail_us
        if self.scenario.ballots is None:
            return end_us if rank == 0 else 0.0
        ballot_us, _ = self.vote_delays_us[rank]
        update_us = self.update_us[rank]
        return end_us - update_us + ballot_us

    def _work_us(self, rank: int, actions: Sequence[Action]) -> float:
        cost = self.cost_at(rank)
        return sum(map(cost.duration_us, actions))

    def _of_exchange_us(self, rank: int) -> float:
        """How long the gradient of a rank's stage is on its way at least. Several stages hide each
        other's exchange.
        """
        exchanges = self.exchanges
        if exchanges is None or exchanges.delayed:
            return 0.0
        stages = {action.stage for action in self.programs[rank]}
        if len(stages) > 1:
            return 0.0
        sent_bytes = exchanges.sent_bytes(rank, *stages)
        network = self.scenario.network
        bits_per_us = network.egress_gbps(rank) * 1e3
        return sent_bytes * 8 / bits_per_us


class _LateError(Exception):
    pass


_Place = tuple[int, str, str, str, float]


def _place(span: Span) -> _Place:
    action = str(span.action)
    peer = str(span.peer)
    return span.rank, span.lane, action, peer, span.start_us


def _same(span: Span, other: Span) -> bool:
    what = (span.rank, span.lane, span.action)
    if what != (other.rank, other.lane, other.action):
        return False
    begin_at_once = _at_once(span.start_us, other.start_us)
    return begin_at_once and _at_once(span.end_us, other.end_us)


def _at_once(time_us: float, other_us: float) -> bool:
    return math.isclose(time_us, other_us, rel_tol=_SAME, abs_tol=1e-3)
