"""Timelines as a trace that Perfetto and chrome://tracing open: measured, and the prediction beside
it.

    process  rank 0              lanes compute, send, recv, reduce, update, wait, tensor
             rank 0, predicted   the same lanes; drawn at the first measured step
             rank 1              ...
    arrow    from each send to the receive of the same message

The format: Trace Event Format (Google, 2016); times in microseconds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpipe.schedule.action import SENDS
from dpipe.schedule.links import counterpart
from dpipe.timeline.span import Lane, Span, Timeline

Event = dict[str, Any]

_LANES = list(Lane)


def chrome_trace(
    steps: Sequence[tuple[float, Timeline]], predicted: Timeline | None = None
) -> Event:
    """The trace of `steps`, each with when it began (microseconds), as a value for `json.dump`.

    The prediction begins where the first step does.
    """
    tracks = [
        _Track(number, start_us, timeline) for number, (start_us, timeline) in enumerate(steps)
    ]
    if predicted is not None:
        tracks.append(_Track(len(tracks), steps[0][0] if steps else 0.0, predicted, predicted=True))
    events = [event for track in tracks for event in track.events()]
    rows = sorted({(event["pid"], event["tid"]) for event in events})
    return {"traceEvents": [*_names(rows), *events], "displayTimeUnit": "ms"}


def _names(rows: Sequence[tuple[int, int]]) -> Iterator[Event]:
    """What the viewer calls each process and lane, and where it puts them: a prediction under its
    measurement.
    """
    for pid in sorted({pid for pid, _ in rows}):
        name = f"rank {pid // 2}" + (", predicted" if pid % 2 else "")
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for pid, tid in rows:
        yield {
            "ph": "M",
            "name": "thread_name",
            "pid": pid,
            "tid": tid,
            "args": {"name": _LANES[tid].value},
        }
        yield {
            "ph": "M",
            "name": "thread_sort_index",
            "pid": pid,
            "tid": tid,
            "args": {"sort_index": tid},
        }


@dataclass(frozen=True)
class _Track:
    """One timeline and where it goes in the trace."""

    number: int
    start_us: float
    timeline: Timeline
    predicted: bool = False

    def events(self) -> Iterator[Event]:
        num_stages = 1 + max((span.action.stage for span in self.timeline.spans), default=0)
        receives = {
            (self._row(span), span.action): span
            for span in self.timeline.spans
            if span.lane == Lane.RECV
        }
        for span in self.timeline.spans:
            yield self._slice(span)
            if span.lane == Lane.SEND and span.action.op in SENDS:
                receive = receives.get((self._row(span), counterpart(span.action, num_stages)))
                # The trace of a run that was cut short may hold one end of a message alone.
                yield from self._arrow(span, receive) if receive else ()

    def _row(self, span: Span) -> int:
        """The pipeline-parallel group of the span's rank, within which messages stay: by replica,
        and by tensor-parallel rank.
        """
        replica = span.rank * self.timeline.num_replicas // self.timeline.num_ranks
        return replica * self.timeline.tensor_size + span.rank % self.timeline.tensor_size

    def _slice(self, span: Span) -> Event:
        args: Event = {
            "stage": span.action.stage,
            "micro-batch": span.action.microbatch,
            "bytes": span.num_bytes,
        }
        args |= {} if span.peer is None else {"to rank": span.peer}
        return self._event("X", span, span.start_us) | {"dur": span.duration_us, "args": args}

    def _arrow(self, send: Span, receive: Span) -> Iterator[Event]:
        name = f"{self.number}:{self._row(send)}:{send.action}"
        yield self._event("s", send, send.start_us) | {"id": name}
        yield self._event("f", receive, receive.start_us) | {"id": name, "bp": "e"}

    def _event(self, phase: str, span: Span, at_us: float) -> Event:
        waiting = "wait for " if span.lane == Lane.WAIT else ""
        return {
            "ph": phase,
            "name": f"{waiting}{span.action}",
            "cat": span.action.op.value,
            "pid": 2 * span.rank + self.predicted,
            "tid": _LANES.index(span.lane),
            "ts": self.start_us + at_us,
        }
