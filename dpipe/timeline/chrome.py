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
        tracks.append(_Track(number, start_us, timeline))
    if predicted is not None:
        start_us = steps[0][0] if steps else 0.0
        tracks.append(
            _Track(
                len(tracks),
                start_us,
                predicted,
                predicted=True,
            )
        )
    events: list[Event] = []
    for track in tracks:
        events += track.events()
    rows = sorted({(event["pid"], event["tid"]) for event in events})
    return {
        "traceEvents": [*_names(rows), *events],
        "displayTimeUnit": "ms",
    }


def _names(
    rows: Sequence[tuple[int, int]],
) -> Iterator[Event]:
    """What the viewer calls each process and lane, and where it puts them: a prediction under its
    measurement.
    """
    for pid in sorted({pid for pid, _ in rows}):
        # Even numbers are measured, the odd ones behind them predicted: see `_event`.
        name = f"rank {pid // 2}"
        if pid % 2:
            name += ", predicted"
        yield _named("process_name", {"name": name}, pid=pid)
        yield _named(
            "process_sort_index",
            {"sort_index": pid},
            pid=pid,
        )
    for pid, tid in rows:
        name = _LANES[tid].value
        yield _named(
            "thread_name",
            {"name": name},
            pid=pid,
            tid=tid,
        )
        yield _named(
            "thread_sort_index",
            {"sort_index": tid},
            pid=pid,
            tid=tid,
        )


def _named(what: str, args: Event, **track: int) -> Event:
    """A metadata event, "M" in the format."""
    return {
        "ph": "M",
        "name": what,
        **track,
        "args": args,
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
                receives[self._row(span), span.action] = span
        for span in self.timeline.spans:
            yield self._slice(span)
            if span.lane == Lane.SEND and span.action.op in SENDS:
                other_end = counterpart(span.action, last_stage + 1)
                receive = receives.get((self._row(span), other_end))
                # The trace of a run that was cut short may hold one end of a message alone.
                if receive is not None:
                    yield from self._arrow(span, receive)

    def _row(self, span: Span) -> int:
        """The pipeline-parallel group of the span's rank, within which messages stay: by replica,
        and by tensor-parallel rank.
        """
        timeline = self.timeline
        replica = span.rank * timeline.num_replicas // timeline.num_ranks
        return replica * timeline.tensor_size + span.rank % timeline.tensor_size

    def _slice(self, span: Span) -> Event:
        args: Event = {
            "stage": span.action.stage,
            "micro-batch": span.action.microbatch,
            "bytes": span.num_bytes,
        }
        if span.peer is not None:
            args["to rank"] = span.peer
        event = self._event("X", span, span.start_us)
        return event | {
            "dur": span.duration_us,
            "args": args,
        }

    def _arrow(self, send: Span, receive: Span) -> Iterator[Event]:
        name = f"{self.number}:{self._row(send)}:{send.action}"
        # "s" and "f" are the two ends of an arrow; "bp": "e" ends it in the slice that lies there,
        # not in the next one.
        yield self._event("s", send, send.start_us) | {"id": name}
        end = self._event("f", receive, receive.start_us)
        yield end | {"id": name, "bp": "e"}

    def _event(
        self,
        phase: str,
        span: Span,
        at_us: float,
    ) -> Event:
        waiting = "wait for " if span.lane == Lane.WAIT else ""
        return {
            "ph": phase,
            "name": f"{waiting}{span.action}",
            "cat": span.action.op.value,
            "pid": 2 * span.rank + self.predicted,
            "tid": _LANES.index(span.lane),
            "ts": self.start_us + at_us,
        }
