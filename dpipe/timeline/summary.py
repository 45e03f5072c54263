"""A timeline in numbers, and a prediction beside a measurement."""

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from dpipe.schedule.action import SENDS
from dpipe.schedule.check import peak_in_flight
from dpipe.schedule.links import peer
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.span import Lane, Span, Timeline

Interval = tuple[float, float]
Ends = tuple[int, int | str]  # (from rank, to rank), or to a parameter server by its name


@dataclass(frozen=True)
class Summary:
    """One step in numbers; tuples have one value a rank.

    `step_us` is the step time. `bubble` is the share of it in which a rank neither computes nor
    updates, `waiting` the share in which it waits for a peer. `overlap` is the share of a rank's
    sending time in which it also computes: what the plan hides of the network; a rank that sends
    nothing has nothing to hide, and has 1. Sending is to neighbours in the pipeline and to other
    replicas; `reduce_bytes` are the latter alone. `peak_in_flight` comes from the schedule.
    """

    step_us: float
    bubble: tuple[float, ...]
    waiting: tuple[float, ...]
    overlap: tuple[float, ...]
    sent_bytes: tuple[int, ...]
    reduce_bytes: tuple[int, ...]
    link_bytes: dict[Ends, int]
    peak_in_flight: tuple[int, ...]

    @property
    def mean_bubble(self) -> float:
        return sum(self.bubble) / len(self.bubble)

    @property
    def mean_overlap(self) -> float:
        return sum(self.overlap) / len(self.overlap)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, where a link is "0->1"."""
        links = {
            f"{source}->{target}": count for (source, target), count in self.link_bytes.items()
        }
        means = {"mean_bubble": self.mean_bubble, "mean_overlap": self.mean_overlap}
        return {**asdict(self), "link_bytes": links, **means}


@dataclass(frozen=True)
class Comparison:
    """A prediction beside what was measured; `ratio` is measured over predicted step time."""

    predicted: Summary
    measured: Summary

    @property
    def ratio(self) -> float:
        return self.measured.step_us / self.predicted.step_us

    def as_dict(self) -> dict[str, Any]:
        return {
            "predicted": self.predicted.as_dict(),
            "measured": self.measured.as_dict(),
            "ratio": self.ratio,
        }


def summarise(timeline: Timeline, schedule: Schedule) -> Summary:
    """Numbers of one step that ran, or would run, `schedule`; raises `ValueError` where no time
    passes.
    """
    step_us = timeline.step_us
    if step_us <= 0:
        raise ValueError(
            "a timeline in which no time passes has no summary; was anything recorded?"
        )
    ranks = range(timeline.num_ranks)
    lanes = [_lanes(timeline, rank) for rank in ranks]
    return Summary(
        step_us=step_us,
        bubble=tuple(1 - _length(_busy(lane)) / step_us for lane in lanes),
        waiting=tuple(_length(_union(lane[Lane.WAIT])) / step_us for lane in lanes),
        overlap=tuple(_overlap(lane) for lane in lanes),
        sent_bytes=tuple(_num_bytes(lane[Lane.SEND] + _sent(lane[Lane.REDUCE])) for lane in lanes),
        reduce_bytes=tuple(_num_bytes(_sent(lane[Lane.REDUCE])) for lane in lanes),
        link_bytes=_link_bytes(timeline, schedule),
        peak_in_flight=peak_in_flight(schedule) * timeline.num_replicas,
    )


def compare(predicted: Timeline, measured: Timeline, schedule: Schedule) -> Comparison:
    """Both timelines are of one step of `schedule`."""
    return Comparison(summarise(predicted, schedule), summarise(measured, schedule))


def _lanes(timeline: Timeline, rank: int) -> dict[Lane, list[Span]]:
    return {lane: list(timeline.on(rank, lane)) for lane in Lane}


def _busy(lanes: dict[Lane, list[Span]]) -> list[Interval]:
    """When a rank has something to run; the optimizer's step is work as well."""
    return _union(lanes[Lane.COMPUTE] + lanes[Lane.UPDATE])


def _overlap(lanes: dict[Lane, list[Span]]) -> float:
    sending = _union(lanes[Lane.SEND] + lanes[Lane.REDUCE])
    computing = _union(lanes[Lane.COMPUTE])
    total = _length(sending)
    return _length(_intersection(sending, computing)) / total if total else 1.0


def _sent(spans: list[Span]) -> list[Span]:
    """A measured REDUCE span without a peer is one that came."""
    return [span for span in spans if span.peer is not None]


def _num_bytes(spans: list[Span]) -> int:
    return sum(span.num_bytes for span in spans)


def _link_bytes(timeline: Timeline, schedule: Schedule) -> dict[Ends, int]:
    moved: Counter[Ends] = Counter()
    for span in timeline.spans:
        if span.peer is not None:
            moved[span.rank, span.peer] += span.num_bytes
        elif span.lane == Lane.SEND and span.action.op in SENDS:
            first = span.rank - span.rank % schedule.num_ranks  # of this replica
            moved[span.rank, first + peer(schedule, span.action)] += span.num_bytes
    return dict(
        sorted(
            moved.items(), key=lambda item: (item[0][0], isinstance(item[0][1], str), item[0][1])
        )
    )


def _union(spans: list[Span]) -> list[Interval]:
    """The spans as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for start, end in sorted((span.start_us, span.end_us) for span in spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _intersection(ours: list[Interval], theirs: list[Interval]) -> list[Interval]:
    """What two ordered lists of disjoint intervals share, in one walk along both."""
    shared = []
    i = 0
    j = 0
    while i < len(ours) and j < len(theirs):
        start = max(ours[i][0], theirs[j][0])
        end = min(ours[i][1], theirs[j][1])
        if start < end:
            shared.append((start, end))
        if ours[i][1] < theirs[j][1]:
            i += 1
        else:
            j += 1
    return shared


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
