"""`Goodput`: what a run has lost to machines that came and went, in steps and in seconds.

steps    0 1 2 3 4 5 | 3 4 5 6 7         three of eleven were made again
seconds  ------------xxxxxxxxx----       lost: from an epoch's end to a step that is new
"""

from collections.abc import Mapping
from typing import Any


class Goodput:
    """Since a coordinator started, whose journal ends with the state of `best`. `now` as in
    `Rendezvous`.
    """

    def __init__(self, best: int) -> None:
        self._best = best
        self._newest = best
        self._made = 0
        self._repeated = 0
        self._lost_s = 0.0
        self._first_at: float | None = None
        self._ended_at: float | None = None

    def begin(self, resume_step: int, now: float) -> int:
        """An epoch begins; returns how many steps it makes again."""
        if self._first_at is None:
            self._first_at = now
        repeated = max(0, self._newest - resume_step)
        self._repeated += repeated
        self._newest = resume_step
        return repeated

    def end(self, now: float) -> None:
        """An epoch has ended."""
        if self._first_at is not None and self._ended_at is None:
            self._ended_at = now

    def reach(self, step: int, now: float) -> None:
        """The state of `step` counts, which is newer than any of its epoch."""
        self._made += step - self._newest
        self._newest = step
        if step > self._best:
            self._best = step
            self._lost_s += self._standing_s(now)
            self._ended_at = None

    @property
    def share(self) -> float | None:
        """Of the steps made, those that were not made again."""
        return None if self._made == 0 else 1 - self._repeated / self._made

    def added_to(self, row: Mapping[str, Any], now: float) -> dict[str, Any]:
        """A row of metrics with what was lost until then."""
        extended = dict(row)
        if "loss" in row and self.share is not None:
            extended["goodput"] = self.share
            extended["lost_s"] = round(self.lost_s(now), 3)
        return extended

    def lost_s(self, now: float) -> float:
        return self._lost_s + self._standing_s(now)

    def run_s(self, now: float) -> float:
        """Since the first epoch."""
        return 0.0 if self._first_at is None else now - self._first_at

    def _standing_s(self, now: float) -> float:
        return 0.0 if self._ended_at is None else now - self._ended_at
