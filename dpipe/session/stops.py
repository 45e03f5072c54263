"""When this process did not run: in a debugger, on a suspended or an overloaded machine. What came
meanwhile is unread, so that silence is no sign that the other end is lost.

    heard       stopped         now
    ──┼─────────▒▒▒▒▒▒▒┄┄┄┄┄┄┄───┼──▶ t
      └─ silent ┘             └──┘      ▒ not counted
                                        ┄ nor as long again: TCP sends ever less often what nobody
                                          acknowledges
"""

import time
from collections import deque

_LATE = 2  # intervals between two ticks, above which this process was stopped
_MOST_STOPS = 256  # that are remembered; of older ones the time counts


class Stops:
    """`tick` each `interval_s`; `silence_s` is how long the other end may be silent."""

    def __init__(self, interval_s: float, silence_s: float) -> None:
        self._late_s = _LATE * interval_s
        self._silence_s = silence_s
        self._ticked_at = time.monotonic()
        self._stops: deque[tuple[float, float]] = deque(maxlen=_MOST_STOPS)  # from, to

    def tick(self, now: float) -> None:
        """`now` is by `time.monotonic`."""
        if now - self._ticked_at > self._late_s:
            self._stops.append((self._ticked_at, now))
        self._ticked_at = now

    def silent_s(self, heard_at: float, now: float) -> float:
        """For how many seconds nothing has come that would have been read; may be negative."""
        return now - heard_at - sum(self._excused_s(heard_at, *stop) for stop in self._stops)

    def _excused_s(self, heard_at: float, began_at: float, ended_at: float) -> float:
        stopped_s = max(0.0, ended_at - max(began_at, heard_at))
        return stopped_s + min(stopped_s, self._silence_s)
