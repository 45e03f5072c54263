"""Writes down what a rank did and when, as the spans that the simulator predicts."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

from dpipe.schedule.action import Action
from dpipe.streams import HOST, Mark, Streams
from dpipe.timeline.span import Lane, Span
from dpipe.wire.transfer import Moved


class _Note(NamedTuple):
    lane: Lane
    action: Action
    start: Mark
    end: Mark
    cpu_ns: int = 0
    num_bytes: int = 0


class _Transfer(NamedTuple):
    lane: Lane
    action: Action
    moved: Moved
    peer: int | str | None


class _Timing(AbstractContextManager[None]):
    """A class, not @contextmanager: a third of the overhead, paid twice between computations."""

    __slots__ = ("_action", "_cpu_ns", "_lane", "_notes", "_start", "_streams")

    def __init__(
        self,
        notes: list[_Note],
        streams: Streams,
        lane: Lane,
        action: Action,
    ) -> None:
        self._notes = notes
        self._streams = streams
        self._lane = lane
        self._action = action

    def __enter__(self) -> None:
        # Beside how long it took: where ranks share cores only the thread's own time says what a
        # stage computes (`report/trace.py`).
        self._start = self._streams.mark()
        self._cpu_ns = time.thread_time_ns()

    def __exit__(self, *raised: object) -> None:
        cpu_ns = time.thread_time_ns() - self._cpu_ns
        end = self._streams.mark()
        note = _Note(self._lane, self._action, self._start, end, cpu_ns)
        self._notes.append(note)


def _others_cpu_ns() -> int:
    """Processor time of this process's other threads."""
    return time.process_time_ns() - time.thread_time_ns()


class Recorder:
    """Collects spans, on this process's `time.perf_counter_ns`. Used by one thread.

    On a GPU a span is the device's time between two events of the compute stream, read when the
    spans are taken.
    """

    def __init__(self, rank: int, streams: Streams = HOST) -> None:
        self._rank = rank
        self._streams = streams
        self._notes: list[_Note] = []
        self._transfers: list[_Transfer] = []
        self._parts: list[tuple[str, Mark, Mark]] = []
        self.action: Action | None = None  # of the program, which this rank is at

    def span(self, lane: Lane, action: Action) -> AbstractContextManager[None]:
        """Record what runs inside, also when it raises."""
        return _Timing(self._notes, self._streams, lane, action)

    @contextmanager
    def exchanging(self, num_bytes: int) -> Iterator[None]:
        """Record what runs inside as an exchange of `num_bytes` in the tensor-parallel group, for
        the action that this rank is at.
        """
        start = self._streams.mark()
        others_ns = _others_cpu_ns()
        try:
            yield
        finally:
            if self.action is not None:
                end = self._streams.mark()
                cpu_ns = _others_cpu_ns() - others_ns
                note = _Note(Lane.TENSOR, self.action, start, end, cpu_ns, num_bytes)
                self._notes.append(note)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs inside, a part of some span, under a name of its own."""
        start = self._streams.mark()
        try:
            yield
        finally:
            self._parts.append((name, start, self._streams.mark()))

    def moved(
        self,
        lane: Lane,
        action: Action,
        moved: Moved | None,
        peer: int | str | None = None,
    ) -> None:
        """Record a transfer as the transport saw it, nothing for None. `peer` is the receiver of
        what replicas exchange.
        """
        if moved is not None:
            self._transfers.append(_Transfer(lane, action, moved, peer))

    def take(self) -> tuple[Span, ...]:
        """The spans since the last call, in microseconds; then start afresh."""
        self._streams.catch_up()  # an event has a time only once the device is past it
        spans = [self._span(note) for note in self._notes]
        for lane, action, moved, peer in self._transfers:
            span = Span(
                self._rank,
                lane,
                action,
                moved.start_ns / 1e3,
                moved.end_ns / 1e3,
                moved.num_bytes,
                peer=peer,
            )
            spans.append(span)
        self._notes.clear()
        self._transfers.clear()
        self.action = None
        return tuple(spans)

    def take_parts(self) -> dict[str, float]:
        """Milliseconds by name of the parts since the last call."""
        self._streams.catch_up()
        ns = self._streams.ns
        sums: dict[str, float] = defaultdict(float)
        for name, start, end in self._parts:
            sums[name] += (ns(end) - ns(start)) / 1e6
        self._parts.clear()
        return dict(sums)

    def _span(self, note: _Note) -> Span:
        ns = self._streams.ns
        return Span(
            self._rank,
            note.lane,
            note.action,
            ns(note.start) / 1e3,
            ns(note.end) / 1e3,
            note.num_bytes,
            note.cpu_ns / 1e3,
        )
