"""What no order can beat: a lower bound of a step's time.

Every rank, every link and every rank's egress does one thing at a time. Each thing has a *head*,
before which it cannot begin, and a *tail*, which must follow it: what its micro-batch has to go
through before and behind it, and what its own stage has to do.

    rank 2   head ...............[ F ][ F ][ I ][ W ]....  tail: back to rank 0, and W there
             the micro-batch comes from rank 0

The shortest time in which one rank, or link, could do its things, if it might interrupt them and
nobody else ever made it wait, is found by always doing the one with the longest tail (Jackson
1955). The largest of these times is the bound. Memory is taken to be unlimited.

Where steps overlap, a rank begins its next step when it has ended its own. So it counts for each
rank how long it takes from its first forward to its last weight gradient, if the ranks behind it do
nothing else meanwhile, and those before it never make it wait.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from dpipe.search.clock import (
    FORWARD,
    INPUT,
    WEIGHT,
    Hop,
    Pipeline,
)

Place = tuple[int, int]  # kind, stage
Machine = tuple[str, int, int]  # what it is, its rank, of a link the target
Job = tuple[float, float, float]  # head, duration, tail
TimesUs = list[float]  # by micro-batch
Ends = Iterable[tuple[float, float]]  # by micro-batch, a head and a tail
_NO_HOP = Hop(0, 0, 0.0, 0.0)


def lower_bound_us(pipeline: Pipeline) -> float:
    """Of the score that a `PipelineClock` gives."""
    whole = _Bound(pipeline)
    if not pipeline.steps_overlap:
        return whole.least_us()
    machines = whole.jobs().values()
    bounds_us = list(map(_busy_us, machines))
    for rank in range(pipeline.num_ranks):
        alone = _Bound(pipeline, rank)
        bounds_us.append(alone.least_us())
    return max(bounds_us)


def _busy_us(jobs: Iterable[Job]) -> float:
    return sum(duration for _, duration, _ in jobs)


def _preemptive_us(jobs: Iterable[Job]) -> float:
    """The least time for all, tails included, on one machine that may interrupt them."""
    waiting = sorted(jobs, reverse=True)
    begun: list[tuple[float, float]] = []  # tail, negative; what is left of the duration
    now_us = 0.0
    last_us = 0.0
    while waiting or begun:
        if not begun:
            first_us, _, _ = waiting[-1]
            now_us = max(now_us, first_us)
        while waiting and waiting[-1][0] <= now_us:
            _, duration, tail = waiting.pop()
            heapq.heappush(begun, (-tail, duration))
        tail, left_us = heapq.heappop(begun)
        until_us = math.inf
        if waiting:
            until_us, _, _ = waiting[-1]
        if now_us + left_us > until_us:
            done_us = until_us - now_us
            heapq.heappush(begun, (tail, left_us - done_us))
            now_us = until_us
        else:
            now_us += left_us
            last_us = max(last_us, now_us - tail)
    return last_us


class _Bound:
    """Heads and tails of a pipeline, by place and micro-batch; or, with `alone`, of what happens
    between the first and the last computation of that rank.
    """

    def __init__(self, pipeline: Pipeline, alone: int | None = None) -> None:
        self._pipeline = pipeline
        self._microbatches = range(pipeline.num_microbatches)
        stages = range(alone or 0, pipeline.num_stages)
        self._ends: Sequence[int] = stages
        if alone is not None:
            self._ends = pipeline.stages_of[alone]
        self._way = [(FORWARD, stage) for stage in stages]
        for stage in reversed(stages):
            back = (INPUT, stage)
            self._way.append(back)
        self._duration_us = self._durations()
        self._heads: dict[Place, TimesUs] = {}
        self._tails: dict[Place, TimesUs] = {}
        self._fill_heads()
        self._fill_tails()

    def _durations(self) -> Mapping[Place, float]:
        """Of the weight gradient as little as it takes if the backward pass is not split."""
        durations = {}
        by_stage = zip(*self._pipeline.duration_us, strict=True)
        for stage, durations_us in enumerate(by_stage):
            forward, half, weight, whole = durations_us
            made = min(half, whole)
            backward = min(half + weight, whole)
            durations[FORWARD, stage] = forward
            durations[INPUT, stage] = made
            durations[WEIGHT, stage] = backward - made
        return durations

    def _durations_of(self, stage: int) -> tuple[float, float, float]:
        """Of its forward, of its input gradient and of its weight gradient."""
        durations = self._duration_us
        forward = durations[FORWARD, stage]
        made = durations[INPUT, stage]
        weight = durations[WEIGHT, stage]
        return forward, made, weight

    def _end_us(self, stage: int) -> float:
        """What follows the last computation of the stage's rank."""
        rank = self._pipeline.rank_of[stage]
        return self._pipeline.tails_us[rank]

    def _hop(self, place: Place) -> Hop:
        kind, stage = place
        return self._pipeline.hops[kind][stage] or _NO_HOP

    def _fill_heads(self) -> None:
        came = self._zeros()
        for place in self._way:
            duration = self._duration_us[place]
            earliest = self._earliest(place)
            heads: TimesUs = []
            for head in map(max, came, earliest):
                if heads:
                    head = max(head, heads[-1] + duration)
                heads.append(head)
            self._heads[place] = heads
            made = [head + duration for head in heads]
            came = self._over_hop(place, made)
        self._fill_weight_heads()

    def _zeros(self) -> TimesUs:
        return [0.0] * len(self._microbatches)

    def _earliest(self, place: Place) -> TimesUs:
        """By micro-batch, when the stage itself has done what comes before."""
        kind, stage = place
        if kind == FORWARD:
            return self._zeros()
        first = self._heads[FORWARD, stage][0]
        forward, made, _ = self._durations_of(stage)
        earliest = []
        for number in self._microbatches:
            # One rank has made so many forwards, and the input gradients of all before this one.
            before = (number + 1) * forward + number * made
            earliest.append(first + before)
        return earliest

    # Both directions of a rank share its egress. A head assumes that its own direction has it
    # alone; the jobs of the egress, below, have both.
    def _over_hop(self, place: Place, made: TimesUs) -> TimesUs:
        """When what is made at these times has come, if all leave in turn."""
        hop = self._hop(place)
        free_us = 0.0
        came = []
        for time_us in made:
            free_us = max(free_us, time_us) + hop.alone_us
            came.append(free_us + hop.delay_us)
        return came

    def _fill_weight_heads(self) -> None:
        for stage in self._ends:
            forward, made, weight = self._durations_of(stage)
            first = self._heads[FORWARD, stage][0]
            heads = []
            inputs = self._heads[INPUT, stage]
            for number, head in enumerate(inputs):
                both = (number + 1) * (forward + made)
                own = first + both + number * weight
                heads.append(max(head + made, own))
            self._heads[WEIGHT, stage] = heads

    def _fill_tails(self) -> None:
        last = self._microbatches[-1]
        for stage in self._ends:
            weight = self._duration_us[WEIGHT, stage]
            end_us = self._end_us(stage)
            tails = []
            for number in self._microbatches:
                left = (last - number) * weight
                tails.append(left + end_us)
            self._tails[WEIGHT, stage] = tails
        following: TimesUs | None = None
        for place in reversed(self._way):
            tails = self._tails_within(place)
            if following is not None:
                across = self._back_over_hop(place, following)
                tails = list(map(max, tails, across))
            duration = self._duration_us[place]
            for number in reversed(self._microbatches[:-1]):
                next_tail = tails[number + 1] + duration
                tails[number] = max(tails[number], next_tail)
            self._tails[place] = tails
            following = [tail + duration for tail in tails]

    def _tails_within(self, place: Place) -> TimesUs:
        """What the stage itself has to do behind each micro-batch."""
        kind, stage = place
        if stage not in self._ends:
            return self._zeros()
        forward, made, weight = self._durations_of(stage)
        if kind == FORWARD:
            again = forward
            left = made + weight
        else:
            again = made
            left = weight
        end_us = self._end_us(stage)
        last = self._microbatches[-1]
        tails = []
        for number in self._microbatches:
            behind = last - number
            # What is left of this micro-batch, and all of each that comes behind it.
            own = (behind + 1) * left + behind * again
            tails.append(own + end_us)
        return tails

    def _back_over_hop(self, place: Place, following: TimesUs) -> TimesUs:
        hop = self._hop(place)
        behind_us = 0.0
        tails = []
        for time_us in reversed(following):
            arrival_us = time_us + hop.delay_us
            behind_us = max(behind_us, arrival_us) + hop.alone_us
            tails.append(behind_us)
        return tails[::-1]

    def least_us(self) -> float:
        machines = self.jobs().values()
        return max(map(_preemptive_us, machines))

    def jobs(self) -> Mapping[Machine, list[Job]]:
        """By machine."""
        jobs: dict[Machine, list[Job]] = defaultdict(list)
        for place in self._heads:
            rank = self._rank_of(place)
            duration = self._duration_us[place]
            own = jobs["rank", rank, rank]
            for head, tail in self._ends_of(place, place):
                own.append((head, duration, tail))
        network = self._pipeline.network
        for place, following in pairwise(self._way):
            hop = self._hop(place)
            if hop is _NO_HOP:
                continue
            rank = self._rank_of(place)
            bits_per_us = network.egress_gbps(rank) * 1e3
            share_us = hop.num_bytes * 8 / bits_per_us
            behind_us = hop.delay_us + self._duration_us[following]
            egress = jobs["egress", rank, rank]
            link = jobs["link", rank, hop.target]
            for head, tail in self._ends_of(place, following):
                made_us = head + self._duration_us[place]
                after_us = tail + behind_us
                egress.append((made_us, share_us, after_us))
                link.append((made_us, hop.alone_us, after_us))
        return jobs

    def _rank_of(self, place: Place) -> int:
        _, stage = place
        return self._pipeline.rank_of[stage]

    def _ends_of(self, place: Place, other: Place) -> Ends:
        """By micro-batch, the head at `place` and the tail at `other`."""
        heads = self._heads[place]
        tails = self._tails[other]
        return zip(heads, tails, strict=True)
