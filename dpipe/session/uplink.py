"""Turns on the way out of a machine, where all links of its rank share one slow uplink.

    at once   to rank 1   [ a  a  a  a ]              each connection gets half of the rate, and
              to rank 3   [ b  b  b  b ]              has it to find again when it is alone

    in turn   to rank 1   [ aaaa ]                    a arrives in half the time, and b no later
              to rank 3           [ bbbb ]

So does the simulator count. A message that hardly takes time waits for nobody.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from dpipe.session.frames import Stream

LOG = logging.getLogger("dpipe")
_LONG_S = 0.2  # a message that takes turns: several round trips between regions
# A turn lapses after so many times what it should take, and so long: its connection may have
# broken, or its other end may take nothing.
_LATE = 2
_LEAST_S = 1.0
# Of the rate, for messages: what comes in is acknowledged by a packet of 66 bytes for each two.
_SHARE = 0.99
_WAKE_S = 1.0  # poll interval of waits without a deadline of their own


class _Turn:
    def __init__(self, may_take_s: float) -> None:
        self.may_take_s = may_take_s
        self.lapses_at = math.inf  # it has not begun


class Uplink:
    """Of one rank. Threads take turns in the order in which they ask."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        """What the links send together; infinite where they share nothing."""
        self.bytes_per_s = bytes_per_s
        self._changed = Condition()
        self._turns: deque[_Turn] = deque()  # the first is on
        self._is_told = False  # to whoever reads the log

    @property
    def is_taken(self) -> bool:
        """Whether it is somebody's turn. From any thread."""
        return bool(self._turns)

    @contextmanager
    def turn(self, num_bytes: int, stream: Stream | None) -> Iterator[None]:
        """Inside, `stream` alone sends a message that takes long, unless another is very late."""
        takes_s = num_bytes / self.bytes_per_s
        # A path that is short is not the slow one that was predicted: a job that is tried at home.
        if takes_s < _LONG_S or stream is None or not stream.pace(_SHARE * self.bytes_per_s):
            yield
            return
        turn = _Turn(_LATE * takes_s + _LEAST_S)
        self._await(turn)
        try:
            yield
        finally:
            self._end(turn)

    def _await(self, turn: _Turn) -> None:
        with self._changed:
            self._turns.append(turn)
            while (first := self._turns[0]) is not turn:
                left_s = first.lapses_at - time.monotonic()
                if left_s > 0:
                    self._changed.wait(min(left_s, _WAKE_S))
                else:
                    self._end(first)
            turn.lapses_at = time.monotonic() + turn.may_take_s
            if not self._is_told:
                self._is_told = True
                LOG.info(
                    "long messages leave one after another, at most %.3g MB a second, which the "
                    "predicted network says that all links of this rank share",
                    _SHARE * self.bytes_per_s / 1e6,
                )

    def _end(self, turn: _Turn) -> None:
        with self._changed:
            if turn in self._turns:  # it may have lapsed
                self._turns.remove(turn)
            self._changed.notify_all()
