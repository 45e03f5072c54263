"""A virtual clock: what happens when, in order."""

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0  # of two events at one time, the one that was asked for first

    def after(self, delay_s: float, event: Callable[..., None], *args: Any) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, event, args))

    def run(self, until_s: float, is_over: Callable[[], bool]) -> None:
        """Until nothing is left to happen, the time is up, or `is_over()`."""
        while self._events and self._events[0][0] <= until_s and not is_over():
            self.now, _, event, args = heapq.heappop(self._events)
            event(*args)
