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
from collections.abc import Iterable, Mapping
from itertools import pairwise

from dpipe.search.clock import FORWARD, INPUT, WEIGHT, Hop, Pipeline

Place = tuple[int, int]  # kind, stage
Machine = tuple[str, int, int]  # what it is, its rank, of a link the target
Job = tuple[float, float, float]  # head, duration, tail
_NO_HOP = Hop(0, 0, 0.0, 0.0)


def lower_bound_us(pipeline: Pipeline) -> float:
    """Of the score that a `PipelineClock` gives."""
    if not pipeline.steps_overlap:
        return _Bound(pipeline).least_us()
    busy_us = max(sum(job[1] for job in jobs) for jobs in _Bound(pipeline).jobs().values())
    ranks = range(pipeline.num_ranks)
    return max(busy_us, *(_Bound(pipeline, rank).least_us() for rank in ranks))


def _preemptive_us(jobs: Iterable[Job]) -> float:
    """The least time for all, tails included, on one machine that may interrupt them."""
    waiting = sorted(jobs, reverse=True)
    begun: list[tuple[float, float]] = []  # tail, negative; what is left of the duration
    now_us = 0.0
    last_us = 0.0
    while waiting or begun:
        if not begun:
            now_us = max(now_us, waiting[-1][0])
        while waiting and waiting[-1][0] <= now_us:
            _, duration, tail = waiting.pop()
            heapq.heappush(begun, (-tail, duration))
        tail, left_us = heapq.heappop(begun)
        until_us = waiting[-1][0] if waiting else math.inf
        if now_us + left_us > until_us:
            heapq.heappush(begun, (tail, left_us - (until_us - now_us)))
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
        self._ends = [stage for stage in stages if alone in (None, pipeline.rank_of[stage])]
        forward = [(FORWARD, stage) for stage in stages]
        self._way = [*forward, *[(INPUT, stage) for stage in reversed(stages)]]
        self._duration_us = self._durations()
        self._heads: dict[Place, list[float]] = {}
        self._tails: dict[Place, list[float]] = {}
        self._fill_heads()
        self._fill_tails()

    def _durations(self) -> Mapping[Place, float]:
        """Of the weight gradient as little as it takes if the backward pass is not split."""
        durations = {}
        pipeline = self._pipeline
        for stage, (forward, made, weight, whole) in enumerate(
            zip(*pipeline.duration_us, strict=True)
        ):
            durations[FORWARD, stage] = forward
            durations[INPUT, stage] = min(made, whole)
            durations[WEIGHT, stage] = min(made + weight, whole) - min(made, whole)
        return durations

    def _hop(self, place: Place) -> Hop:
        kind, stage = place
        return self._pipeline.hops[kind][stage] or _NO_HOP

    def _fill_heads(self) -> None:
        came = [0.0 for _ in self._microbatches]
        for place in self._way:
            kind, stage = place
            duration = self._duration_us[place]
            forward = self._duration_us[FORWARD, stage]
            heads: list[float] = []
            for microbatch in self._microbatches:
                head = came[microbatch]
                if heads:
                    head = max(head, heads[-1] + duration)
                if kind == INPUT:
                    before = (microbatch + 1) * forward + microbatch * duration
                    head = max(head, self._heads[FORWARD, stage][0] + before)
                heads.append(head)
            self._heads[place] = heads
            came = self._over_hop(place, [head + duration for head in heads])
        self._fill_weight_heads()

    def _over_hop(self, place: Place, made: list[float]) -> list[float]:
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
            forward, made, weight = (self._duration_us[kind, stage] for kind in range(3))
            first = self._heads[FORWARD, stage][0]
            self._heads[WEIGHT, stage] = [
                max(head + made, first + (number + 1) * (forward + made) + number * weight)
                for number, head in enumerate(self._heads[INPUT, stage])
            ]

    def _fill_tails(self) -> None:
        last = self._microbatches[-1]
        for stage in self._ends:
            weight = self._duration_us[WEIGHT, stage]
            end_us = self._pipeline.tails_us[self._pipeline.rank_of[stage]]
            self._tails[WEIGHT, stage] = [
                (last - number) * weight + end_us for number in self._microbatches
            ]
        following: list[float] | None = None
        for place in reversed(self._way):
            tails = self._tails_within(place)
            if following is not None:
                tails = list(map(max, tails, self._back_over_hop(place, following)))
            duration = self._duration_us[place]
            for number in reversed(self._microbatches[:-1]):
                tails[number] = max(tails[number], tails[number + 1] + duration)
            self._tails[place] = tails
            following = [tail + duration for tail in tails]

    def _tails_within(self, place: Place) -> list[float]:
        """What the stage itself has to do behind each micro-batch."""
        kind, stage = place
        if stage not in self._ends:
            return [0.0 for _ in self._microbatches]
        forward, made, weight = (self._duration_us[kind, stage] for kind in range(3))
        left = made + weight if kind == FORWARD else weight
        again = forward if kind == FORWARD else made
        end_us = self._pipeline.tails_us[self._pipeline.rank_of[stage]]
        last = self._microbatches[-1]
        return [
            (last - number + 1) * left + (last - number) * again + end_us
            for number in self._microbatches
        ]

    def _back_over_hop(self, place: Place, following: list[float]) -> list[float]:
        hop = self._hop(place)
        behind_us = 0.0
        tails = []
        for time_us in reversed(following):
            behind_us = max(behind_us, time_us + hop.delay_us) + hop.alone_us
            tails.append(behind_us)
        return tails[::-1]

    def least_us(self) -> float:
        return max(map(_preemptive_us, self.jobs().values()))

    def jobs(self) -> Mapping[Machine, list[Job]]:
        """By machine."""
        jobs: dict[Machine, list[Job]] = defaultdict(list)
        rank_of = self._pipeline.rank_of
        for place, heads in self._heads.items():
            rank = rank_of[place[1]]
            duration = self._duration_us[place]
            for head, tail in zip(heads, self._tails[place], strict=True):
                jobs["rank", rank, rank].append((head, duration, tail))
        for place, following in pairwise(self._way):
            hop = self._hop(place)
            if hop is _NO_HOP:
                continue
            rank = rank_of[place[1]]
            share_us = hop.num_bytes * 8 / (self._pipeline.network.egress_gbps(rank) * 1e3)
            behind_us = hop.delay_us + self._duration_us[following]
            for head, tail in zip(self._heads[place], self._tails[following], strict=True):
                made_us = head + self._duration_us[place]
                jobs["egress", rank, rank].append((made_us, share_us, tail + behind_us))
                jobs["link", rank, hop.target].append((made_us, hop.alone_us, tail + behind_us))
        return jobs
