"""Frames on one connection: bytes of a session, and how many of the other direction have arrived.

    | 4: size of the payload | 8: bytes received | payload |       big-endian, again and again

A frame without payload acknowledges, and shows that this end is alive. One whose size has its top
bit set is padding, which is dropped: it keeps TCP's window open through a pause. One of an
impossible size is the last: its end has given the session up.
"""

import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

FRAME_BYTES = 4 << 20  # about the most; an acknowledgement waits for no more
# Read with a prefix: small messages take one system call.
_AHEAD_BYTES = 8 << 10
_LARGE_BYTES = 64 << 10  # a frame that is not read ahead
_FAREWELL = (1 << 32) - 1
_PADDING = 1 << 31
PADDING_BYTES = 16 << 10  # of a frame: so many a stream takes that can be written at all
_ZEROS = bytes(PADDING_BYTES)
_PREFIX = struct.Struct(">IQ")
_NOTHING = memoryview(b"")


class Stream(Protocol):
    """One connection. Every failure is an `OSError`, an early end too."""

    def write(self, *parts: bytes | memoryview) -> None:
        """Hand all `parts` over, in order."""

    def can_write(self, wait_ms: int = 0) -> bool:
        """Whether a few bytes can be written without waiting, after `wait_ms` at most."""

    def padding(self, burst_bytes: int) -> int:
        """How many bytes to write now that the other end drops: `Window.look`. From any thread."""

    def outruns_loss(self) -> bool:
        """Whether it takes no loss for congestion. From any thread."""

    def pace(self, bytes_per_s: float) -> bool:
        """Send no faster, and take little more than is sent soon. Returns whether it does: not on a
        short path. Of the thread that writes.
        """

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


class ByteStream(Stream, Protocol):
    """One connection that brings bytes."""

    def await_bytes(self, num_bytes: int) -> None:
        """Wait until there is something to receive: at best `num_bytes`, which will come."""

    def receive(self, view: memoryview, behind: memoryview) -> int:
        """Fill `view`, then `behind`, with what is there. Returns how many bytes were."""


class MessageStream(Stream, Protocol):
    """One connection that brings messages: what each `write` gave, in one or in several."""

    def next_message(self) -> bytes:
        """Wait for it."""


class Frames(ABC):
    """What has come and gone on one connection. One thread receives while another writes."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.acknowledged = 0  # bytes of this end, as the last frame of the other said
        self.said_farewell = False  # the other end
        self.opened_at = time.monotonic()
        self.heard_at = self.opened_at
        self.wrote_at = self.opened_at
        # What has come and was not taken: from `_start` to `_end` of `_ahead`.
        self._ahead = _NOTHING
        self._start = 0
        self._end = 0
        self._left = 0  # bytes of the payload that is being read
        self._padding = 0  # bytes that are to be dropped

    def write(self, received: int, pieces: Sequence[bytes | memoryview]) -> None:
        size = sum(map(len, pieces))
        self.stream.write(_PREFIX.pack(size, received), *pieces)
        self.wrote_at = time.monotonic()

    def pad(self, received: int, num_bytes: int) -> None:
        """Write a frame of so many bytes, `PADDING_BYTES` at most, that the other end drops."""
        self.stream.write(_PREFIX.pack(_PADDING | num_bytes, received), _ZEROS[:num_bytes])
        self.wrote_at = time.monotonic()

    def say_farewell(self, received: int) -> None:
        self.stream.write(_PREFIX.pack(_FAREWELL, received))

    @abstractmethod
    def await_bytes(self, num_bytes: int) -> None:
        """Wait until there is something to receive, of a message of so many bytes."""

    @abstractmethod
    def receive(self, view: memoryview) -> int:
        """Take what is there, and no more payload than `view` holds. Returns the bytes of it."""

    def take_whole(self, view: memoryview) -> bool:
        """Fill `view` where all of it is here, in the frame that is being read."""
        size = len(view)
        if size > self._left or size > self._end - self._start:
            return False
        self._take(view)
        return True

    def _take(self, view: memoryview) -> int:
        """Fill `view` from what is ahead, as far as the frame goes."""
        start = self._start
        num_bytes = min(self._left, self._end - start, len(view))
        self._start += num_bytes
        view[:num_bytes] = self._ahead[start : self._start]
        self._left -= num_bytes
        return num_bytes

    def _begin(self) -> None:
        """Take the prefix that is ahead."""
        self._left, self.acknowledged = _PREFIX.unpack_from(self._ahead, self._start)
        self._start += _PREFIX.size
        if self._left == _FAREWELL:
            self._left = 0
            self.said_farewell = True
        elif self._left & _PADDING:
            self._padding = self._left ^ _PADDING
            self._left = 0


class ByteFrames(Frames):
    """Read ahead, so that small messages take one system call."""

    def __init__(self, stream: ByteStream) -> None:
        super().__init__(stream)
        self._bytes = stream
        self._ahead = memoryview(bytearray(_AHEAD_BYTES))

    def await_bytes(self, num_bytes: int) -> None:
        if not self._has_next():
            self._bytes.await_bytes(num_bytes)

    def receive(self, view: memoryview) -> int:
        if self._padding:
            self._drop()
            return 0
        if self._has_next():
            return self._take_next(view)
        self._make_room()
        room = view[: self._left]
        behind = self._ahead[self._end :]
        if self._left < _LARGE_BYTES:
            room = room[:0]
        elif len(room) < self._left:
            behind = behind[:0]
        else:
            behind = behind[: _PREFIX.size]
        num_bytes = self._bytes.receive(room, behind)
        if num_bytes:
            self.heard_at = time.monotonic()
        num_payload = min(num_bytes, len(room))
        self._left -= num_payload
        self._end += num_bytes - num_payload
        return num_payload or self._take_next(view)

    def _has_next(self) -> bool:
        """Whether there is payload ahead, or a whole prefix."""
        num_ahead = self._end - self._start
        return num_ahead >= (1 if self._left else _PREFIX.size)

    def _take_next(self, view: memoryview) -> int:
        if not self._left and self._has_next():
            self._begin()
        return self._take(view)

    def _drop(self) -> None:
        """Take what is there of padding, and no more."""
        ahead = min(self._padding, self._end - self._start)
        self._start += ahead
        self._padding -= ahead
        if self._padding:
            dropped = memoryview(bytearray(min(self._padding, _LARGE_BYTES)))
            num_bytes = self._bytes.receive(dropped, _NOTHING)
            self._padding -= num_bytes
            if num_bytes:
                self.heard_at = time.monotonic()

    def _make_room(self) -> None:
        if self._start:
            left = bytes(self._ahead[self._start : self._end])
            self._ahead[: len(left)] = left
            self._start = 0
            self._end = len(left)


class MessageFrames(Frames):
    """Read from messages in place: most frames are one."""

    def __init__(self, stream: MessageStream) -> None:
        super().__init__(stream)
        self._messages = stream

    def await_bytes(self, num_bytes: int) -> None:
        if self._left and self._start < self._end:
            return
        if self._left or self._end - self._start < _PREFIX.size:
            self._next_message()
        if not self._left and self._end - self._start >= _PREFIX.size:
            self._begin()

    def receive(self, view: memoryview) -> int:
        return self._take(view)

    def _next_message(self) -> None:
        rest = bytes(self._ahead[self._start : self._end])  # of a prefix
        self._ahead = _NOTHING  # half a MiB is not kept while nothing comes
        self._start = 0
        self._end = 0
        message = self._messages.next_message()
        self._ahead = memoryview(rest + message if rest else message)
        self._end = len(self._ahead)
        self.heard_at = time.monotonic()
