"""Frames on one connection: bytes of a session, and how many of the other direction have arrived.

    | 4: size of the payload | 8: bytes received | payload |       big-endian, again and again

A frame without payload acknowledges, and shows that this end is alive. One of an impossible size is
the last: its end has given the session up.
"""

import struct
import time
from collections.abc import Sequence
from typing import Protocol

FRAME_BYTES = 4 << 20  # about the most; an acknowledgement waits for no more
# Read with a prefix: small messages take one system call.
_AHEAD_BYTES = 8 << 10
_LARGE_BYTES = 64 << 10  # a frame that is not read ahead
_FAREWELL = (1 << 32) - 1
_PREFIX = struct.Struct(">IQ")


class Stream(Protocol):
    """Bytes over one connection. Every failure is an `OSError`, an early end too."""

    def write(self, *parts: bytes | memoryview) -> None:
        """Hand all `parts` over, in order."""

    def can_write(self) -> bool:
        """Whether a few bytes can be written without waiting."""

    def await_bytes(self, num_bytes: int) -> None:
        """Wait until there is something to receive: at best `num_bytes`, which will come."""

    def receive(self, view: memoryview, behind: memoryview) -> int:
        """Fill `view`, then `behind`, with what is there. Returns how many bytes were."""

    def end(self) -> None:
        """Write no more; the peer reads what was written, then the end."""

    def shut(self) -> None:
        """End both directions and wake threads at either end, behind what was written. From any
        thread.
        """

    def give_up(self) -> None:
        """Shut at once, past bytes that the peer never gets."""

    def close(self) -> None:
        """Let it go, once no thread uses it."""


class Frames:
    """What has come and gone on one connection. One thread receives while another writes."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.acknowledged = 0  # bytes of this end, as the last frame of the other said
        self.said_farewell = False  # the other end
        self.opened_at = time.monotonic()
        self.heard_at = self.opened_at
        self.wrote_at = self.opened_at
        self._left = 0  # bytes of the payload that is being read
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))
        self._start = 0  # of what is ahead and was not taken
        self._end = 0

    def write(self, received: int, pieces: Sequence[memoryview]) -> None:
        size = sum(map(len, pieces))
        self.stream.write(_PREFIX.pack(size, received), *pieces)
        self.wrote_at = time.monotonic()

    def say_farewell(self, received: int) -> None:
        self.stream.write(_PREFIX.pack(_FAREWELL, received))

    def await_bytes(self, num_bytes: int) -> None:
        """Wait until there is something to receive, of a message of so many bytes."""
        if not self._has_next():
            self.stream.await_bytes(num_bytes)

    def receive(self, view: memoryview) -> int:
        """Take what is there, and no more payload than `view` holds. Returns the bytes of it."""
        if self._has_next():
            return self._take(view)
        room = view[: self._left]
        behind = self._ahead[self._end :]
        if self._left < _LARGE_BYTES:
            room = room[:0]
        elif len(room) < self._left:
            behind = behind[:0]
        else:
            behind = behind[: _PREFIX.size]
        num_bytes = self.stream.receive(room, behind)
        if num_bytes:
            self.heard_at = time.monotonic()
        num_payload = min(num_bytes, len(room))
        self._left -= num_payload
        self._end += num_bytes - num_payload
        return num_payload or self._take(view)

    def _has_next(self) -> bool:
        """Whether there is payload ahead, or a whole prefix."""
        num_ahead = self._end - self._start
        return num_ahead >= (1 if self._left else _PREFIX.size)

    def _take(self, view: memoryview) -> int:
        """Fill `view` from what is ahead, as far as one frame goes."""
        if not self._left and self._has_next():
            self._left, self.acknowledged = _PREFIX.unpack_from(self._ahead, self._start)
            self._start += _PREFIX.size
            if self._left == _FAREWELL:
                self._left = 0
                self.said_farewell = True
        num_bytes = min(self._left, self._end - self._start, len(view))
        view[:num_bytes] = self._ahead[self._start : self._start + num_bytes]
        self._start += num_bytes
        self._left -= num_bytes
        if not self._has_next():
            left = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(left)] = left
            self._start = 0
            self._end = len(left)
        return num_bytes
