"""A timeline in numbers."""

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
        links = {}
        for (source, target), num_bytes in self.link_bytes.items():
            links[f"{source}->{target}"] = num_bytes
        return {
            **asdict(self),
            "link_bytes": links,
            "mean_bubble": self.mean_bubble,
            "mean_overlap": self.mean_overlap,
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
    bubble = []
    waiting = []
    overlap = []
    sent_bytes = []
    reduce_bytes = []
    for rank in range(timeline.num_ranks):
        lanes = _lanes(timeline, rank)
        busy_us = _length(_busy(lanes))
        waits = _union(lanes[Lane.WAIT])
        waiting_us = _length(waits)
        bubble.append(1 - busy_us / step_us)
        waiting.append(waiting_us / step_us)
        overlap.append(_overlap(lanes))
        exchanged_bytes = _num_bytes(_sent(lanes[Lane.REDUCE]))
        neighbour_bytes = _num_bytes(lanes[Lane.SEND])
        sent_bytes.append(neighbour_bytes + exchanged_bytes)
        reduce_bytes.append(exchanged_bytes)
    return Summary(
        step_us=step_us,
        bubble=tuple(bubble),
        waiting=tuple(waiting),
        overlap=tuple(overlap),
        sent_bytes=tuple(sent_bytes),
        reduce_bytes=tuple(reduce_bytes),
        link_bytes=_link_bytes(timeline, schedule),
        peak_in_flight=peak_in_flight(schedule) * timeline.num_replicas,
    )


def _lanes(timeline: Timeline, rank: int) -> dict[Lane, list[Span]]:
    return {lane: list(timeline.on(rank, lane)) for lane in Lane}


def _busy(lanes: dict[Lane, list[Span]]) -> list[Interval]:
    """When a rank has something to run; the optimizer's step is work as well."""
    return _union(lanes[Lane.COMPUTE] + lanes[Lane.UPDATE])


def _overlap(lanes: dict[Lane, list[Span]]) -> float:
    sending = _union(lanes[Lane.SEND] + lanes[Lane.REDUCE])
    computing = _union(lanes[Lane.COMPUTE])
    total_us = _length(sending)
    if not total_us:
        return 1.0
    hidden_us = _length(_intersection(sending, computing))
    return hidden_us / total_us


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
            # A schedule knows the ranks of one pipeline; the peer is in the sender's own.
            pipeline_rank = span.rank % schedule.num_ranks
            first = span.rank - pipeline_rank
            target = first + peer(schedule, span.action)
            moved[span.rank, target] += span.num_bytes
    return {ends: moved[ends] for ends in sorted(moved, key=_by_ends)}


def _by_ends(ends: Ends) -> tuple[int, bool, int | str]:
    """Servers, which have names, behind the ranks: a name and a number do not compare."""
    source, target = ends
    return source, isinstance(target, str), target


def _union(spans: list[Span]) -> list[Interval]:
    """The spans as intervals that do not touch, in order."""
    merged: list[Interval] = []
    intervals = [(span.start_us, span.end_us) for span in spans]
    for start, end in sorted(intervals):
        first, last = merged[-1] if merged else (start, start)
        if merged and start <= last:
            merged[-1] = (first, max(end, last))
        else:
            merged.append((start, end))
    return merged


def _intersection(ours: list[Interval], theirs: list[Interval]) -> list[Interval]:
    """What two ordered lists of disjoint intervals share, in one walk along both."""
    shared = []
    i = 0
    j = 0
    while i < len(ours) and j < len(theirs):
        our_start, our_end = ours[i]
        their_start, their_end = theirs[j]
        start = max(our_start, their_start)
        end = min(our_end, their_end)
        if start < end:
            shared.append((start, end))
        # The one that ends first can share nothing with what follows in the other list.
        if our_end < their_end:
            i += 1
        else:
            j += 1
    return shared


def _length(intervals: list[Interval]) -> float:
    return sum(end - start for start, end in intervals)
