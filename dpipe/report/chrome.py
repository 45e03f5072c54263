"""Timelines as a trace that Perfetto and chrome://tracing open: measured, and the prediction beside
it.

    process  rank 0              lanes compute, send, recv, reduce, update, wait, tensor, ...
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
    steps: Sequence[tuple[float, Timeline]],
    predicted: Timeline | None = None,
) -> Event:
    """The trace of `steps`, each with when it began (microseconds), as a value for `json.dump`.

    The prediction begins where the first step does.
    """
    tracks = []
    for number, (start_us, timeline) in enumerate(steps):
        track = _Track(number, start_us, timeline)
        tracks.append(track)
    if predicted is not None:
        start_us = steps[0][0] if steps else 0.0
        track = _Track(len(steps), start_us, predicted, predicted=True)
        tracks.append(track)
    events: list[Event] = []
    rows = set()
    for track in tracks:
        for event in track.events():
            row = (event["pid"], event["tid"])
            rows.add(row)
            events.append(event)
    names = list(_names(sorted(rows)))
    return {
        "traceEvents": names + events,
        "displayTimeUnit": "ms",
    }


def _names(
    rows: Sequence[tuple[int, int]],
) -> Iterator[Event]:
    """What the viewer calls each process and lane, and where it puts them: a prediction under its
    measurement.
    """
    processes = {pid for pid, _ in rows}
    for pid in sorted(processes):
        # Even numbers are measured, the odd ones behind them predicted: see `_event`.
        name = f"rank {pid // 2}"
        if pid % 2:
            name += ", predicted"
        yield from _named("process", name, pid, pid=pid)
    for pid, tid in rows:
        name = _LANES[tid].value
        yield from _named("thread", name, tid, pid=pid, tid=tid)


def _named(
    what: str,
    name: str,
    sort_index: int,
    **track: int,
) -> Iterator[Event]:
    """The metadata events, "M" in the format, of a process or of a thread."""
    yield {
        "ph": "M",
        "name": f"{what}_name",
        **track,
        "args": {"name": name},
    }
    yield {
        "ph": "M",
        "name": f"{what}_sort_index",
        **track,
        "args": {"sort_index": sort_index},
    }


@dataclass(frozen=True)
class _Track:
    """One timeline and where it goes in the trace."""

    number: int
    start_us: float
    timeline: Timeline
    predicted: bool = False

    def events(self) -> Iterator[Event]:
        last_stage = 0
        receives = {}
        for span in self.timeline.spans:
            last_stage = max(last_stage, span.action.stage)
            if span.lane == Lane.RECV:
                row = self._row(span)
                receives[row, span.action] = span
        for span in self.timeline.spans:
            yield self._slice(span)
            if span.lane == Lane.SEND and span.action.op in SENDS:
                other_end = counterpart(span.action, last_stage + 1)
                row = self._row(span)
                receive = receives.get((row, other_end))
                # The trace of a run that was cut short may hold one end of a message alone.
                if receive is not None:
                    yield from self._arrow(span, receive)

    def _row(self, span: Span) -> int:
        """The pipeline-parallel group of the span's rank, within which messages stay: by replica,
        and by tensor-parallel rank.
        """
        timeline = self.timeline
        replica = span.rank * timeline.num_replicas // timeline.num_ranks
        tensor_rank = span.rank % timeline.tensor_size
        return replica * timeline.tensor_size + tensor_rank

    def _slice(self, span: Span) -> Event:
        args: Event = {
            "stage": span.action.stage,
            "micro-batch": span.action.microbatch,
            "bytes": span.num_bytes,
        }
        if span.peer is not None:
            args["to rank"] = span.peer
        event = self._event("X", span, span.start_us)
        event["dur"] = span.duration_us
        event["args"] = args
        return event

    def _arrow(self, send: Span, receive: Span) -> Iterator[Event]:
        name = f"{self.number}:{self._row(send)}:{send.action}"
        # "s" and "f" are the two ends of an arrow; "bp": "e" ends it in the slice that lies there,
        # not in the next one.
        tail = self._event("s", send, send.start_us)
        tail["id"] = name
        yield tail
        head = self._event("f", receive, receive.start_us)
        head["id"] = name
        head["bp"] = "e"
        yield head

    def _event(
        self,
        phase: str,
        span: Span,
        at_us: float,
    ) -> Event:
        name = str(span.action)
        if span.lane == Lane.WAIT:
            name = f"wait for {name}"
        return {
            "ph": phase,
            "name": name,
            "cat": span.action.op.value,
            "pid": 2 * span.rank + self.predicted,
            "tid": _LANES.index(span.lane),
            "ts": self.start_us + at_us,
        }
