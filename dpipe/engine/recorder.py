"""Writes down what a rank did and when, as the spans that the simulator predicts."""

import time
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
    cpu_ns: int
    num_bytes: int = 0


class _Timing(AbstractContextManager[None]):
    """A class, for a third of what a generator takes: between two computations there is one of
    these at either end.
    """

    __slots__ = ("_action", "_cpu_ns", "_lane", "_notes", "_start", "_streams")

    def __init__(self, notes: list[_Note], streams: Streams, lane: Lane, action: Action) -> None:
        self._notes = notes
        self._streams = streams
        self._lane = lane
        self._action = action

    def __enter__(self) -> None:
        self._start = self._streams.mark()
        self._cpu_ns = time.thread_time_ns()

    def __exit__(self, *raised: object) -> None:
        cpu_ns = time.thread_time_ns() - self._cpu_ns
        self._notes.append(
            _Note(self._lane, self._action, self._start, self._streams.mark(), cpu_ns)
        )


class Recorder:
    """Collects one step at a time, on this process's `time.perf_counter_ns`. Used by one thread.

    On a GPU a span is the device's time between two events of the compute stream, read when the
    step is over.
    """

    def __init__(self, rank: int, streams: Streams = HOST) -> None:
        self._rank = rank
        self._streams = streams
        self._notes: list[_Note] = []
        self._transfers: list[tuple[Lane, Action, Moved, int | str | None]] = []
        self._sent: dict[int | str, int] = {}
        self.action: Action | None = None  # of the program, which this rank is at
        self._parts: list[tuple[str, Mark, Mark]] = []

    def span(self, lane: Lane, action: Action) -> AbstractContextManager[None]:
        """Record what runs inside, also when it raises."""
        return _Timing(self._notes, self._streams, lane, action)

    @contextmanager
    def exchanging(self, num_bytes: int) -> Iterator[None]:
        """Record what runs inside as bytes that the ranks of a stage exchange for the action that
        this one is at.
        """
        start = self._streams.mark()
        try:
            yield
        finally:
            if self.action is not None:
                end = self._streams.mark()
                self._notes.append(_Note(Lane.TENSOR, self.action, start, end, 0, num_bytes))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what runs inside, a part of some span, under a name of its own."""
        start = self._streams.mark()
        try:
            yield
        finally:
            self._parts.append((name, start, self._streams.mark()))

    def moved(
        self, lane: Lane, action: Action, moved: Moved | None, peer: int | str | None = None
    ) -> None:
        """Record a transfer as the transport saw it; of an exchange between replicas with the rank
        that it went to.
        """
        if moved is not None:
            self._transfers.append((lane, action, moved, peer))

    def sent(self, peer: int | str, num_bytes: int) -> None:
        self._sent[peer] = self._sent.get(peer, 0) + num_bytes

    @property
    def busy_s(self) -> float:
        """Seconds of compute in this step so far; waits until the device has come here."""
        self._streams.catch_up()
        ns = self._streams.ns
        return (
            sum(ns(note.end) - ns(note.start) for note in self._notes if note.lane is Lane.COMPUTE)
            / 1e9
        )

    @property
    def sent_bytes(self) -> dict[int | str, int]:
        """Bytes queued for each peer in this step so far."""
        return dict(self._sent)

    def take(self, clock_offset_ns: int = 0) -> tuple[Span, ...]:
        """The spans since the last call, in microseconds of the clock `clock_offset_ns` ahead; then
        start afresh.
        """
        self._streams.catch_up()
        spans = [
            self._span(
                *(
                    n.lane,
                    n.action,
                    self._streams.ns(n.start),
                    self._streams.ns(n.end),
                    clock_offset_ns,
                    n.cpu_ns,
                ),
                num_bytes=n.num_bytes,
            )
            for n in self._notes
        ]
        spans += [
            self._span(
                lane,
                action,
                m.start_ns,
                m.end_ns,
                clock_offset_ns,
                num_bytes=m.num_bytes,
                peer=peer,
            )
            for lane, action, m, peer in self._transfers
        ]
        self._notes = []
        self._transfers = []
        self._sent = {}
        self.action = None
        return tuple(spans)

    def take_parts(self) -> dict[str, float]:
        """Milliseconds by name of the parts since the last call."""
        self._streams.catch_up()
        parts = self._parts
        self._parts = []
        sums: dict[str, float] = {}
        for name, start, end in parts:
            sums[name] = (
                sums.get(name, 0.0) + (self._streams.ns(end) - self._streams.ns(start)) / 1e6
            )
        return sums

    def _span(
        self,
        lane: Lane,
        action: Action,
        start_ns: int,
        end_ns: int,
        offset_ns: int,
        cpu_ns: int = 0,
        *,
        num_bytes: int = 0,
        peer: int | str | None = None,
    ) -> Span:
        start_us = (start_ns + offset_ns) / 1e3
        end_us = (end_ns + offset_ns) / 1e3
        return Span(self._rank, lane, action, start_us, end_us, num_bytes, cpu_ns / 1e3, peer)
