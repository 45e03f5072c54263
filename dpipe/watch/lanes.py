"""The last traced step by rank, with the predicted step beneath.

rank 0   | F0 F1 F2 F3       B0 B1 B2 B3 |    measured: what `dpipe trace` shows
         | F0 F1 F2 F3      B0 B1 B2 B3  |    predicted from the measured costs
rank 1   ...
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from dpipe.report.trace import Trace
from dpipe.schedule.action import Op
from dpipe.timeline.span import Lane, Span, Timeline
from dpipe.watch.picture import Bar, LanesOfRank, StepLanes

MOST_RANKS = 64
_MOST_BARS = 20_000  # of a page that a phone still draws
_KINDS = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward",
    Op.W: "weight",
}


def traced_lanes(trace: Trace) -> StepLanes:
    """The last of the steps that were traced."""
    step, _, timeline = trace.steps[-1]
    return _lanes(step, timeline, trace.predicted)


def predicted_lanes(timeline: Timeline) -> StepLanes:
    """A step that has not been traced yet."""
    return _lanes(None, None, timeline)


def _lanes(step: int | None, measured: Timeline | None, predicted: Timeline) -> StepLanes:
    measured_bars = _by_rank(measured)
    predicted_bars = _by_rank(predicted)
    num_ranks = max(predicted.num_ranks, measured.num_ranks if measured else 0)
    # Whole ranks: half a step would look like one that is waiting.
    ranks: list[LanesOfRank] = []
    shown = 0
    for rank in range(min(num_ranks, MOST_RANKS)):
        lanes = LanesOfRank(rank, measured_bars.get(rank, ()), predicted_bars.get(rank, ()))
        shown += len(lanes.measured) + len(lanes.predicted)
        if shown > _MOST_BARS and ranks:
            break
        ranks.append(lanes)
    return StepLanes(
        step=step,
        measured_ms=None if measured is None else measured.duration_us / 1e3,
        predicted_ms=predicted.step_us / 1e3,
        ranks=tuple(ranks),
        left_out=num_ranks - len(ranks),
    )


def _by_rank(timeline: Timeline | None) -> Mapping[int, tuple[Bar, ...]]:
    if timeline is None:
        return {}
    began_us = _began_us(timeline.spans)
    bars: defaultdict[int, list[Bar]] = defaultdict(list)
    for span in timeline.spans:
        kind = _kind(span)
        # Behind the ranks are servers that are in none.
        if kind is None or span.rank >= timeline.num_ranks:
            continue
        start_ms = (span.start_us - began_us) / 1e3
        end_ms = (span.end_us - began_us) / 1e3
        bars[span.rank].append(Bar(kind, str(span.action), round(start_ms, 3), round(end_ms, 3)))
    return {rank: tuple(sorted(each, key=lambda bar: bar.start_ms)) for rank, each in bars.items()}


def _began_us(spans: Sequence[Span]) -> float:
    worked = (span.start_us for span in spans if span.lane in (Lane.COMPUTE, Lane.UPDATE))
    return min(worked, default=0.0)


def _kind(span: Span) -> str | None:
    """None for what is not drawn: a rank that waits is an empty place."""
    match span.lane:
        case Lane.COMPUTE:
            return _KINDS.get(span.action.op, "forward")
        case Lane.UPDATE:
            return "update"
        case Lane.SEND | Lane.REDUCE:
            return "send"
        case _:
            return None


def busy_shares(timeline: Timeline) -> dict[int, float]:
    """By rank, the share of the step in which it computes or updates."""
    step_us = timeline.step_us
    if step_us <= 0:
        return {}
    busy_us: defaultdict[int, float] = defaultdict(float)
    for span in _working(timeline):
        busy_us[span.rank] += span.duration_us
    return {rank: min(1.0, total / step_us) for rank, total in busy_us.items()}


def _working(timeline: Timeline) -> Iterator[Span]:
    for span in timeline.spans:
        if span.lane in (Lane.COMPUTE, Lane.UPDATE) and span.rank < timeline.num_ranks:
            yield span
