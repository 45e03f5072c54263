"""Schedule "auto": the order that takes the shortest time on a given network.

    1. orders     what the generators make, and what `greedy`'s rule makes with more and with fewer
                  micro-batches under way, each timed by the fast clock
    2. improve    computations on the critical path of the best of them are moved forward
    3. simulate   the best few are simulated, and the best one is taken

The first two steps end early where an order reaches the lower bound (`bound.py`). Time is bounded,
too: by counts, not by a clock, so that every rank of a run finds the same.
"""

import math
from collections import defaultdict
from collections.abc import (
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from itertools import chain, islice
from operator import add, le, sub

from dpipe.network.link import Network
from dpipe.schedule.check import peak_in_flight
from dpipe.schedule.generate import AUTO, leanest
from dpipe.schedule.schedule import Schedule
from dpipe.search.bound import lower_bound_us
from dpipe.search.candidates import bounds, generated, patient, published, rules
from dpipe.search.clock import (
    Pipeline,
    Programs,
    Replay,
    Times,
    programs_of,
    schedule_of,
)
from dpipe.search.greedy import Greedy, Rule
from dpipe.search.improve import improve, peak_held
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period
from dpipe.timeline.votes import COORDINATOR, delay_us

# How much a search may do, counted so that every rank of a run and every machine finds the same.
# Twelve stages with 64 micro-batches take about two seconds of a core; small steps, where
# a few orders more are cheap, get more of everything. With these counts all 180 steps of
# tests/golden/optima.json are within the bounds that tests/search/test_optimum.py sets.
_MOST_TRIALS = 500  # of `improve`: beyond them it found nothing in steps small enough to enumerate
_MOST_REPLAYED = 60_000  # computations in all trials of a large step
_LEAST_PATIENT = 4  # rules of which variants with weight gradients put off are tried
_MOST_DELAYED = 10_000  # computations in all of them, if that allows more
_MOST_SIMULATED = 8  # orders, and as many that a generator made; at least two of each
_MOST_COMPUTED = 5_000  # computations in either of them
_CLOSE = 1e-4  # of the bound: an order as close as this is as good as the bound
_DEEPEST = 8  # rules that are tried where the search may end at the first that is enough

HeldBytes = Callable[[Schedule], Sequence[int]]
# Of a schedule, infinite where it is certain to be above so much, microseconds.
StepTime = Callable[[Schedule, float], float]


def search(
    num_stages: int,
    num_microbatches: int,
    cost: Cost,
    network: Network,
    *,
    memory_limit: int | None = None,
    stages_per_rank: int = 1,
    replicas: Replicas | None = None,
    ballots: Network | None = None,
    held_bytes: HeldBytes | None = None,
    most_bytes: float = math.inf,
    close: float = _CLOSE,
) -> Schedule:
    """The compute-only schedule with the shortest step time (`simulate.period`); among equals the
    one that holds least.

    `replicas` and `ballots` are as in `simulate`: with replicas one is found which leaves the
    network free for their exchange. `memory_limit` is the most activations (stage x micro-batch)
    that any rank may hold. Where `held_bytes` says what a schedule takes on each rank, it takes at
    most `most_bytes`; where none does, the result is the one that takes least. A step may be longer
    than the lower bound by the share `close`: where a rule soon finds one that is not, nothing else
    is tried, which takes a tenth of the time. Its name says what was chosen. Deterministic, so that
    every rank of a run finds the same. Raises `ScheduleError` where `memory_limit` is too low,
    saying what would do.
    """
    least, limit = bounds(
        num_stages,
        num_microbatches,
        memory_limit,
        stages_per_rank,
    )
    pipeline = pipeline_on(
        network,
        cost,
        num_microbatches,
        num_stages // stages_per_rank,
        replicas=replicas,
        ballots=ballots,
    )

    def step_us(schedule: Schedule, most_us: float) -> float:
        scenario = Scenario(schedule, cost, network, replicas=replicas, ballots=ballots)
        return period(scenario, most_us)

    memory = _Memory(limit, held_bytes, most_bytes)
    at_once = _at_once(pipeline, memory, close)
    if at_once is not None:
        return at_once
    shallowest = least if math.isfinite(most_bytes) else max(least, min(num_stages, limit))
    sizes = (num_stages, num_microbatches, stages_per_rank)
    as_published = memory.within_limit(published(*sizes))
    others = memory.within_limit(generated(*sizes, shallowest, limit))
    known = as_published + others
    found = _searched(pipeline, memory, known)
    # Of what was published all are simulated, but the best that is known comes first: to see that
    # another one is slower takes less time.
    finalists = [*found, *filter(memory.fits, as_published)]
    if finalists:
        return _fastest(finalists, step_us)
    return memory.last_resort([leanest(*sizes), *known])


def _at_once(pipeline: Pipeline, memory: "_Memory", close: float) -> Schedule | None:
    """Where an order need not be as good as can be found, the first that is close to the bound."""
    if close <= _CLOSE:
        return None
    return _Search(pipeline, memory, (), close).at_once()


def _searched(
    pipeline: Pipeline,
    memory: "_Memory",
    known: Sequence[Schedule],
) -> Iterator[Schedule]:
    """The best of a search for each placement of stages in schedules that are known."""
    by_placement: dict[tuple[int, ...], list[Schedule]] = defaultdict(list)
    for each in known:
        alike = by_placement[each.rank_of_stage]
        alike.append(each)
    for placement, alike in by_placement.items():
        placed = replace(pipeline, placement=placement)
        yield from _Search(placed, memory, alike).finalists()


# The score of the fast clock is that of a single step, or an estimate where steps overlap. The
# simulation knows more: several steps in a row, the vote and the exchange of replicas.
def _fastest(schedules: Sequence[Schedule], step_us: StepTime) -> Schedule:
    """In whole microseconds; among equals the first one of those that hold least."""
    schedules = _unlike(schedules)
    best = schedules[0]
    least: tuple[float, int] = (math.inf, 0)
    for schedule in schedules:
        least_us, _ = least
        # Half a microsecond more, because rounded it may be an equal that holds less.
        found_us = step_us(schedule, least_us + 0.5)
        if math.isinf(found_us):
            continue
        held = max(peak_in_flight(schedule))
        score = (round(found_us), held)
        if score < least:
            least = score
            best = schedule
    return best


def _unlike(schedules: Iterable[Schedule]) -> list[Schedule]:
    """Of those with equal programs the last one, in the place of the first."""
    by_programs = {schedule.programs: schedule for schedule in schedules}
    return list(by_programs.values())


# Where a vote ends the step, a rank's ballot has to reach the coordinator before any rank goes on.
# Without one ranks go on by themselves, and their steps overlap: then the clock's score is how long
# the slowest rank takes from its first computation of a step to its last.
def pipeline_on(
    network: Network,
    cost: Cost,
    num_microbatches: int,
    num_ranks: int,
    *,
    replicas: Replicas | None = None,
    ballots: Network | None = None,
) -> Pipeline:
    """The pipeline as the clock and the bound know it."""
    tails_us = _exchanged_us(cost, network, replicas, num_ranks)
    if ballots is not None:
        ranks = range(num_ranks)
        voted_us = [delay_us(ballots, rank, COORDINATOR) for rank in ranks]
        tails_us = tuple(map(add, tails_us, voted_us))
    return Pipeline(
        cost,
        network,
        num_microbatches,
        num_ranks,
        tails_us,
        steps_overlap=ballots is None,
    )


def first_fit(
    num_stages: int,
    num_microbatches: int,
    *,
    memory_limit: int | None = None,
    stages_per_rank: int = 1,
) -> Schedule:
    """Some schedule that `search` would weigh, at once: it raises what `search` would, before the
    time is spent. Its stages are dealt out in turn, so that no other's ranks have a link that its
    ranks do not have.
    """
    least, limit = bounds(
        num_stages,
        num_microbatches,
        memory_limit,
        stages_per_rank,
    )
    shallowest = max(least, min(num_stages, limit))
    candidates = generated(
        num_stages,
        num_microbatches,
        stages_per_rank,
        shallowest,
        limit,
    )
    fitting = (each for each in candidates if max(peak_in_flight(each)) <= limit)
    return next(fitting)


def _exchanged_us(
    cost: Cost,
    network: Network,
    replicas: Replicas | None,
    num_ranks: int,
) -> tuple[float, ...]:
    """By rank, how long its stage's gradient is on its way to the replicas at least. Several stages
    hide each other's exchange.
    """
    if replicas is None or replicas.delayed or cost.num_stages > num_ranks:
        return (0.0,) * num_ranks
    exchange = replicas.exchange
    tails_us = []
    for rank in range(num_ranks):
        sent_bytes = 0
        for message in exchange.programs[0]:
            stage_bytes = cost.exchanged_bytes(rank, message.role)
            sent_bytes += exchange.num_bytes(message, stage_bytes)
        bits_per_us = network.egress_gbps(rank) * 1e3
        tails_us.append(sent_bytes * 8 / bits_per_us)
    return tuple(tails_us)


def _deepest(pipeline: Pipeline, limits: tuple[int, ...]) -> Schedule:
    """What `greedy` makes where nothing but these limits holds a rank back."""
    depths = (pipeline.num_microbatches,) * pipeline.num_stages
    rule = Rule(depths, limits)
    times = Greedy(pipeline, rule).run()
    return schedule_of(pipeline, times.programs, "")


class _Memory:
    """What the ranks may hold."""

    def __init__(
        self,
        limit: int,
        held_bytes: HeldBytes | None,
        most_bytes: float,
    ) -> None:
        self._held_bytes = held_bytes
        self._most_bytes = most_bytes
        self._limit = limit

    def within_limit(self, schedules: Iterable[Schedule]) -> list[Schedule]:
        return [each for each in schedules if max(peak_in_flight(each)) <= self._limit]

    def limits(self, pipeline: Pipeline) -> tuple[int, ...]:
        """The most activations that each rank may hold, as far as `greedy` can tell."""
        num_ranks = pipeline.num_ranks
        if self._held_bytes is None or math.isinf(self._most_bytes):
            return (self._limit,) * num_ranks
        fits = [1] * num_ranks
        exceeds = [self._limit + 1] * num_ranks
        while max(map(sub, exceeds, fits)) > 1:
            sums = map(add, fits, exceeds)
            middle = [both // 2 for both in sums]
            schedule = _deepest(pipeline, tuple(middle))
            for rank, held in enumerate(self._held_bytes(schedule)):
                side = fits if held <= self._most_bytes else exceeds
                side[rank] = middle[rank]
        return tuple(fits)

    def held(self, schedule: Schedule) -> int:
        """Bytes of the fullest rank."""
        if self._held_bytes is None:
            return 0
        return max(self._held_bytes(schedule))

    def fits(self, schedule: Schedule) -> bool:
        return self.held(schedule) <= self._most_bytes

    def last_resort(self, schedules: Sequence[Schedule]) -> Schedule:
        """Where none fits: the caller refuses it, with what it would hold."""
        return min(schedules, key=self.held)


class _Search:
    """One search for one placement of the stages, from candidates to the best ones."""

    def __init__(
        self,
        pipeline: Pipeline,
        memory: _Memory,
        generated: Sequence[Schedule],
        close: float = _CLOSE,
    ) -> None:
        self._pipeline = pipeline
        self._memory = memory
        self._generated = generated
        self._limits = memory.limits(pipeline)
        self._enough_us = lower_bound_us(pipeline) * (1 + close)
        self._names: dict[Programs, str] = {}
        self._unbound: list[Rule] = []  # tried, and no stage was held back by its depth
        self._size = 3 * pipeline.num_stages * pipeline.num_microbatches  # in computations

    def finalists(self) -> list[Schedule]:
        """The best of what it found, and of what the generators made."""
        replayed = list(self._replayed())
        orders = list(filter(self._within_limits, replayed))
        orders += self._greedy()
        affordable = _MOST_REPLAYED // self._size
        improved = improve(
            self._pipeline,
            self._limits,
            orders,
            enough_us=self._enough_us,
            max_trials=min(_MOST_TRIALS, affordable),
        )
        replayed.sort(key=_score_us)
        best = [*self._fitting(improved), *self._fitting(replayed)]
        return _unlike(best)

    def at_once(self) -> Schedule | None:
        """What a rule makes with as much under way as can be, or with less, if it is as fast as it
        need be and fits into memory. Deep ones hide delays, so that one of the first mostly is.
        """
        every = list(rules(self._pipeline, self._limits))
        for rule in every[: -1 - _DEEPEST : -1]:
            times = self._made_by(rule)
            if times.score_us <= self._enough_us:
                leaner = self._leaner(rule, self._enough_us)
                return next(self._fitting([leaner, times]), None)
        return None

    # Where bytes are limited, limits are estimates made for split backward passes. What a
    # generator made may fit nevertheless: `_fitting` looks again.
    def _within_limits(self, times: Times) -> bool:
        peaks = map(peak_held, times.programs)
        return all(map(le, peaks, self._limits))

    def _replayed(self) -> Iterator[Times]:
        for schedule in self._generated:
            programs = programs_of(schedule)
            times = Replay(self._pipeline, programs).run()
            self._names.setdefault(times.programs, schedule.name)
            yield times

    def _greedy(self) -> Iterator[Times]:
        """What the rules make, until one is as fast as any order can be; and the best of them with
        as little memory as it needs for that.
        """
        scores: dict[Rule, float] = {}
        plain = rules(self._pipeline, self._limits)
        for rule in chain(plain, self._patient(scores)):
            # More in flight changes nothing where no stage was held back by how many it may have.
            if any(map(rule.deepens, self._unbound)):
                continue
            times = self._made_by(rule)
            scores[rule] = times.score_us
            yield times
            if times.score_us <= self._enough_us:
                break
        best_rule = min(scores, key=scores.__getitem__)
        yield self._leaner(best_rule, scores[best_rule])

    def _patient(self, scores: Mapping[Rule, float]) -> Iterator[Rule]:
        """The best of the rules that have been tried, with weight gradients put off."""
        best = sorted(scores, key=scores.__getitem__)
        number = max(_LEAST_PATIENT, _MOST_DELAYED // self._size)
        for rule in best[:number]:
            if rule.splits:
                yield from patient(self._pipeline, rule)

    def _made_by(self, rule: Rule) -> Times:
        greedy = Greedy(self._pipeline, rule)
        times = greedy.run()
        if not greedy.held_back:
            self._unbound.append(rule)
        depths = " ".join(map(str, rule.depths))
        order = ", forwards first" if rule.forward_first else ""
        if any(rule.put_off):
            order += ", weight gradients put off"
        name = f"{AUTO}: greedy in_flight={depths}{order}"
        self._names.setdefault(times.programs, name)
        return times

    # More memory never hurts the rule much, but it is not monotonic: a bisection finds some small
    # limit at which the step takes no longer, not always the smallest one.
    def _leaner(self, rule: Rule, enough_us: float) -> Times:
        too_little = 0
        enough = max(rule.limits)
        while enough - too_little > 1:
            middle = (too_little + enough) // 2
            times = self._made_by(rule.held_to(middle))
            if times.score_us > enough_us:
                too_little = middle
            else:
                enough = middle
        return self._made_by(rule.held_to(enough))

    # To count the bytes of an order takes longer than to time it, so that only those are counted
    # that are about to be simulated.
    def _fitting(self, orders: Iterable[Times]) -> Iterator[Schedule]:
        """The first ones that fit into memory."""
        possible = (times for times in orders if times.score_us < math.inf)
        schedules = map(self._schedule, possible)
        fitting = filter(self._memory.fits, schedules)
        affordable = _MOST_COMPUTED // self._size
        number = min(_MOST_SIMULATED, affordable)
        return islice(fitting, max(2, number))

    def _schedule(self, times: Times) -> Schedule:
        name = self._names.get(times.programs, f"{AUTO}: improved")
        return schedule_of(self._pipeline, times.programs, name)


def _score_us(times: Times) -> float:
    return times.score_us
