"""What a standby decides, and what a holder may still answer.

    a standby                                       a holder

    WAIT ◀─────────────────┐                        HOLDS ◀────────────────────────┐
     │  │ over             │ somebody else          │  │ for `lease_s` no beat was │ a beat was
     │  ▼                  │ has created it         │  ▼ written                   │ written
     │ OVER                │                        │ DOUBTS, and answers nobody ──┘
     │ the count has not risen for                  │  │
     │ `patience_s`, or its holder has left         ▼  ▼ a later term is there
     └─▶ CLAIM the next term: create its record     LOST, for good

What keeps the run one, whatever is paused, cut off or slow:

An epoch. A holder copies its journal with the new epoch to the URL, then looks for a later term,
and then tells the machines. Whoever takes over creates its term, and then reads that journal. One
of the two sees the other, and no clock has a part in that.

A step. It counts where all ranks vote for it. The next holder begins no epoch before each rank of
the last one has come to it and stopped, or has been silent for `silence_s`: and a rank stops by
itself when its coordinator has not answered for two thirds of that (`elastic.attendance`). A holder
answers for at most `lease_s` after its term was over, which is a quarter of it at most.

Policy only, as `elastic.rendezvous`: `now` is in seconds of a clock that does not jump.
"""

from dataclasses import dataclass
from enum import StrEnum

from dpipe.terms.records import HolderBeat

_LEASE_SHARE = 1 / 4  # of the silence after which a rank is lost
_MOST_LEASE_S = 10.0  # machines wait for a minute
_MOST_BEAT_S = 1.0
_BEATS = 8  # in a lease, at least


@dataclass(frozen=True)
class TermTimes:
    """Seconds, by the job's timeouts.heartbeat alone: holder and standby have the same."""

    beat_s: float
    lease_s: float  # for which a beat lets its holder answer
    patience_s: float  # without a beat, after which a standby takes over

    @classmethod
    def of(cls, silence_s: float) -> "TermTimes":
        lease_s = min(_MOST_LEASE_S, silence_s * _LEASE_SHARE)
        return cls(min(_MOST_BEAT_S, lease_s / _BEATS), lease_s, lease_s)


class Choice(StrEnum):
    WAIT = "wait"
    CLAIM = "claim"
    OVER = "over"


class TermWatch:
    """A standby's."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._mark: tuple[int, int] | None = None  # the newest term and its count
        self._since = 0.0

    def seen(self, number: int, beat: HolderBeat | None, now: float) -> Choice:
        """The newest term and its beat, if there is one yet, as a look showed them that began at
        `now`.
        """
        if beat is not None and beat.state == "over":
            return Choice.OVER
        if beat is not None and beat.state == "left":
            return Choice.CLAIM
        mark = (number, 0 if beat is None else beat.count)
        if mark != self._mark:
            self._mark = mark
            self._since = now
        is_silent = now - self._since > self._patience_s
        return Choice.CLAIM if is_silent else Choice.WAIT

    def saw_nothing(self) -> None:
        """The URL could not be read, or has no term yet: that says nothing of a holder."""
        self._mark = None


class Tenure(StrEnum):
    HOLDS = "holds"
    DOUBTS = "doubts"
    LOST = "lost"


class TermLease:
    """A holder's."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._until = -float("inf")
        self._is_lost = False

    def confirmed(self, began_at: float) -> None:
        """A beat was written, which began then, and behind it no later term was there."""
        self._until = max(self._until, began_at + self._lease_s)

    def superseded(self) -> None:
        self._is_lost = True

    def tenure(self, now: float) -> Tenure:
        if self._is_lost:
            return Tenure.LOST
        return Tenure.HOLDS if now < self._until else Tenure.DOUBTS
