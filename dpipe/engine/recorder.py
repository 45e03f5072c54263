"""Writes down what a rank did and when, as the spans that the simulator predicts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dpipe.dataparallel.base import Moved
from dpipe.schedule.action import Action
from dpipe.timeline.span import Lane, Span


@dataclass(frozen=True, slots=True)
class _Mark:
    lane: Lane
    action: Action
    start_ns: int
    end_ns: int
    num_bytes: int = 0
    cpu_ns: int = 0


class Recorder:
    """Collects one step at a time, on this process's `time.perf_counter_ns`. Used by one thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._marks: list[_Mark] = []
        self._sent: dict[int, int] = {}

    @contextmanager
    def span(self, lane: Lane, action: Action) -> Iterator[None]:
        """Record what runs inside, also when it raises."""
        start, cpu_start = time.perf_counter_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            cpu_ns = time.thread_time_ns() - cpu_start
            self._marks.append(_Mark(lane, action, start, time.perf_counter_ns(), cpu_ns=cpu_ns))

    def moved(self, lane: Lane, action: Action, moved: Moved | None) -> None:
        """Record a transfer as the transport saw it."""
        if moved is not None:
            self._marks.append(_Mark(lane, action, moved.start_ns, moved.end_ns, moved.num_bytes))

    def sent(self, peer: int, num_bytes: int) -> None:
        self._sent[peer] = self._sent.get(peer, 0) + num_bytes

    @property
    def busy_s(self) -> float:
        """Seconds of compute in this step so far."""
        return sum(m.end_ns - m.start_ns for m in self._marks if m.lane is Lane.COMPUTE) / 1e9

    @property
    def sent_bytes(self) -> dict[int, int]:
        """Bytes queued for each peer in this step so far."""
        return dict(self._sent)

    def take(self, clock_offset_ns: int = 0) -> tuple[Span, ...]:
        """The spans since the last call, in microseconds of the clock `clock_offset_ns` ahead; then start afresh."""
        marks, self._marks, self._sent = self._marks, [], {}
        return tuple(self._span(mark, clock_offset_ns) for mark in marks)

    def _span(self, m: _Mark, offset_ns: int) -> Span:
        start, end = (m.start_ns + offset_ns) / 1e3, (m.end_ns + offset_ns) / 1e3
        return Span(self._rank, m.lane, m.action, start, end, m.num_bytes, m.cpu_ns / 1e3)
