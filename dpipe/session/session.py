"""`LinkSession`: bytes both ways between two ranks, whatever becomes of the connections under them.

             attach                   broke: reset, ended, silent
    (new) ----------> connected -------------------------------> broken ----.
                          ^                                         |       | not in `window_s`,
                          | attach: from the byte that the other    |       | or refused,
                          | end has received, and no other          |       | or an end closes
                          `-- resumed <-- detach, dialled again <---'       v
                                                                          over

    What was written and is not acknowledged is kept:

    bytes written   |--- acknowledged ---|--- on the way, kept ---|--- to be sent, kept ---|
                                         ^ where the next connection goes on

Kept bytes are the caller's own memory until the caller says that it will change (`Kept.own`), and
copies from then on. They are bounded by what the two kernels and the path between them hold, and
`_TELL_BYTES`: an end whose bytes are not taken cannot write on.

Either end drops a connection on which nothing came for `silence_s`. The other end writes something
at least four times in that time, so a path that swallows bytes is noticed by both, whatever the
kernel or a proxy has acknowledged. An end that is held back and does not read does not judge.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from threading import Condition, Lock, RLock

from dpipe.errors import TransferError
from dpipe.session.frames import FRAME_BYTES, Frames

_SMALL_BYTES = 4 << 10  # up to here it is cheaper to copy than to keep
_PAGE_BYTES = 4 << 10
_TELL_BYTES = 4 << 20  # an end that has received so many says so; more often, it costs
_BEATS = 4  # signs of life in `silence_s`
_FAREWELL_S = 0.1  # for a frame that is being written
_WAKE_S = 5.0  # poll interval of waits without a deadline of their own
_READER = "reader"
_WRITER = "writer"


class Kept:
    """Written bytes of a session that its other end may not have."""

    __slots__ = ("_lock", "_owned", "end", "start", "view")

    def __init__(self, start: int, view: memoryview, lock: RLock) -> None:
        self.start = start
        self.end = start + len(view)
        self.view: memoryview | None = view  # None once they have arrived
        self._owned = view.readonly
        self._lock = lock

    def own(self) -> None:
        """Copy what has not arrived: the caller's memory may change from now on."""
        with self._lock:
            if self.view is not None and not self._owned:
                self.view = memoryview(bytes(self.view))
                self._owned = True


class LinkSession:
    """One thread reads, one writes, and any may do the rest. What they wait for raises
    `ConnectionError` once the session is over.
    """

    def __init__(
        self,
        window_s: float,
        *,
        may_resume: Callable[[], bool] = lambda: True,
        on_break: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_break` is told of each connection that broke while `may_resume`."""
        self.secret = b""  # what the two ends alone know
        self.received = 0
        self.stalled = False  # the last connection moved nothing of what this end wrote
        self.fell_silent = False  # the last connection, and was not closed
        self.silence_s = window_s / 8
        self._window_s = window_s
        self._may_resume = may_resume
        self._on_break = on_break
        # Taken in this order. `_reading` is held while bytes are taken from a connection, so that
        # nobody replaces it meanwhile; `_writing` while a frame is written, which may take long.
        self._writing = Lock()
        self._reading = Lock()
        self._lock = RLock()  # guards all below
        self._changed = Condition(self._lock)
        self._frames: Frames | None = None
        self._retired: list[Frames] = []
        self._using: dict[str, Frames] = {}  # by thread
        self._kept: deque[Kept] = deque()
        self._outgoing: deque[memoryview] = deque()
        self._written = 0
        self._acknowledged = 0
        self._resumed_at = 0  # bytes acknowledged when the connection was new
        self._told = 0  # bytes received, as the last frame said
        self._listening_since: float | None = None
        self._ended = False
        self._why = "it has not been opened"
        self._lost_at = math.inf
        self._over: str | None = None

    @property
    def why(self) -> str:
        """What broke the last connection."""
        return self._why

    @property
    def num_kept(self) -> int:
        """Writes that the other end has not acknowledged."""
        return len(self._kept)

    def awaits_another(self) -> bool:
        """Whether a connection is missing, and it is not too late for another."""
        with self._lock:
            if self._frames is not None or self._over is not None:
                return False
            if time.monotonic() < self._lost_at:
                return True
            self._end(f"{self._why}, and no other was opened in {self._window_s:g} s")
            return False

    # Connections

    def attach(self, frames: Frames, arrived: int, told: int) -> None:
        """Go on, on a new connection whose other end has received `arrived` bytes, and was told
        that this end has received `told`. Raises `TransferError` where `arrived` cannot be, and
        `ConnectionError` where more has come meanwhile, or the session is over.
        """
        with self._reading, self._lock:
            self.check_arrived(arrived)
            if self._over is not None:
                raise ConnectionError(self._over)
            if told != self.received:
                raise ConnectionError("another connection was quicker")
            self._retire("dialled again")
            self._acknowledge(arrived)
            for kept in self._kept:
                kept.own()
            self._outgoing = deque(self._after(arrived))
            self._resumed_at = arrived
            self.fell_silent = False
            self._frames = frames
            self._changed.notify_all()

    def send_again(self) -> None:
        """Write what the last connection has lost, which the writing thread may not come to."""
        with suppress(ConnectionError):
            self._flush(patient=False)

    def detach(self) -> int:
        """Let go of a connection that the other end has given up. Returns how many bytes have
        arrived here.
        """
        with self._reading, self._lock:
            self._retire("dialled again")
            return self.received

    def check_arrived(self, arrived: int) -> None:
        """Raises `TransferError` where the other end cannot have received so many bytes."""
        with self._lock:
            if not self._acknowledged <= arrived <= self._written:
                raise TransferError(
                    f"it says that {arrived} bytes have arrived, of {self._written} that were sent "
                    f"and {self._acknowledged} that it had acknowledged"
                )

    def broke(self, frames: Frames, why: str) -> None:
        """A connection cannot be used further."""
        with self._reading, self._lock:
            if frames is not self._frames or self._over is not None:
                return
            if not self._may_resume():
                self._end(why)
                return
            self._retire(why)
        self._on_break()

    def close(self, why: str = "closed") -> None:
        """It is over; whoever waits is woken, at the other end too."""
        self._say_farewell()
        with self._lock:
            self._end(why)

    def release(self) -> None:
        """Close the sockets, once no thread reads or writes."""
        with self._lock:
            self._using.clear()
            self._close_retired()
            if self._frames is not None:
                self._frames.stream.close()

    def watch(self, now: float, stopped_until: float) -> None:
        """Drop a silent connection, and be heard on one where this end has nothing to say. Call it
        a few times in `silence_s`. Silence is no sign while this process itself was stopped.
        """
        frames = self._frames
        since = self._listening_since
        if frames is None:
            return
        if since is not None:
            silent_s = now - max(since, frames.heard_at, stopped_until)
            if silent_s > self.silence_s:
                self.fell_silent = True
                self.broke(frames, f"nothing came for {self.silence_s:g} s")
        if now - frames.wrote_at > self.silence_s / _BEATS or self.received > self._told:
            self._tell()

    # Bytes

    def write(self, lead: bytes, view: memoryview) -> Kept | None:
        """Hand `lead`, then `view`, to the kernel. Returns what holds `view`, whose bytes must not
        change before it is `own`ed; None where a copy was made.
        """
        if len(lead) + len(view) <= _SMALL_BYTES:
            lead += view
            view = view[:0]
        kept = None
        with self._lock:
            if lead:
                self._keep(memoryview(lead))
            if view:
                kept = self._keep(view)
        self._flush(patient=True)
        return kept

    def end(self) -> None:
        """Write no more; the other end reads what was written, then the end."""
        with self._writing, self._lock:
            self._ended = True
            if self._frames is not None:
                self._frames.stream.end()

    def read(self, view: memoryview) -> None:
        """Fill `view`. Raises `TransferError` where the other end acknowledges nonsense."""
        filled = 0
        self._listening_since = time.monotonic()
        while filled < len(view):
            frames = self._current(_READER)
            try:
                frames.await_bytes(len(view) - filled)
                filled += self._take(frames, view[filled : _aligned_end(filled, len(view))])
            except OSError as error:
                self.broke(frames, reason_of(error))
            if frames.acknowledged > self._acknowledged:
                self._hear(frames)
            if frames.said_farewell:
                self.close("it broke off the link")
            if self.received - self._told >= _TELL_BYTES:
                self._tell()
        self._listening_since = None

    def skip(self) -> None:
        """Read and drop bytes until the session is over."""
        scratch = memoryview(bytearray(1 << 16))
        with suppress(OSError):
            while True:
                self.read(scratch)

    def _take(self, frames: Frames, view: memoryview) -> int:
        with self._reading:
            if frames is not self._frames:
                return 0
            num_bytes = frames.receive(view)
            self.received += num_bytes
            return num_bytes

    def _flush(self, *, patient: bool) -> None:
        """Write what is to be sent; where `patient`, on the next connections too."""
        with self._writing:
            while self._outgoing:
                with self._lock:
                    if self._frames is None and not patient:
                        return
                    frames = self._current(_WRITER)
                    pieces = self._next_pieces()
                try:
                    if pieces:
                        self._put(frames, pieces)
                except OSError as error:
                    self.broke(frames, reason_of(error))

    def _tell(self) -> None:
        """Write a frame without payload, unless one is being written or has to wait."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            with self._lock:
                if self._frames is None or self._ended or self._over is not None:
                    return
                frames = self._current(_WRITER)
            try:
                if frames.stream.can_write():
                    self._put(frames, [])
            except OSError as error:
                self.broke(frames, reason_of(error))
        finally:
            self._writing.release()

    def _say_farewell(self) -> None:
        """Let the other end not wait for another connection, if nothing is being written."""
        if not self._writing.acquire(timeout=_FAREWELL_S):
            return
        try:
            with self._lock:
                frames = self._frames
                if frames is None or self._ended or self._over is not None:
                    return
                frames = self._current(_WRITER)
            with suppress(OSError):
                if frames.stream.can_write():
                    frames.say_farewell(self.received)
        finally:
            self._writing.release()

    def _put(self, frames: Frames, pieces: list[memoryview]) -> None:
        received = self.received
        frames.write(received, pieces)
        self._told = received

    def _hear(self, frames: Frames) -> None:
        with self._lock:
            if frames is self._frames:
                self.check_arrived(frames.acknowledged)
                self._acknowledge(frames.acknowledged)

    def _current(self, thread: str) -> Frames:
        """The connection to use, waited for."""
        frames = self._frames
        if frames is not None and frames is self._using.get(thread) and self._over is None:
            return frames
        with self._lock:
            # It is inside of none while it waits, and those that broke can be closed.
            self._using.pop(thread, None)
            self._close_retired()
            while self.awaits_another():
                left_s = self._lost_at - time.monotonic()
                self._changed.wait(min(_WAKE_S, max(0.0, left_s)))
            if self._over is not None:
                raise ConnectionError(self._over)
            assert self._frames is not None
            self._using[thread] = self._frames
            return self._frames

    # With the lock held

    def _keep(self, view: memoryview) -> Kept:
        kept = Kept(self._written, view, self._lock)
        self._kept.append(kept)
        self._outgoing.append(view)
        self._written = kept.end
        return kept

    def _next_pieces(self) -> list[memoryview]:
        """What fits a frame, of what is to be sent."""
        pieces: list[memoryview] = []
        room = FRAME_BYTES
        while self._outgoing and room > 0:
            pieces.append(self._outgoing.popleft())
            room -= len(pieces[-1])
        return pieces

    def _acknowledge(self, arrived: int) -> None:
        self._acknowledged = arrived
        while self._kept and self._kept[0].end <= arrived:
            self._kept.popleft().view = None

    def _after(self, arrived: int) -> list[memoryview]:
        """The kept bytes from `arrived` on."""
        views = []
        for kept in self._kept:
            assert kept.view is not None
            views.append(kept.view[max(0, arrived - kept.start) :])
        return views

    def _retire(self, why: str) -> None:
        frames = self._frames
        if frames is None:
            return
        now = time.monotonic()
        moved = self._acknowledged > self._resumed_at or self._acknowledged == self._written
        self.stalled = not moved and now - frames.opened_at >= self.silence_s / 2
        self._frames = None
        self._why = why
        self._lost_at = now + self._window_s
        if self._listening_since is None:
            self._using.pop(_READER, None)
        if not self._writing.locked():
            self._using.pop(_WRITER, None)
        frames.stream.give_up()
        self._retired.append(frames)
        self._close_retired()
        self._changed.notify_all()

    def _close_retired(self) -> None:
        """Close what no thread is inside of."""
        for frames in tuple(self._retired):
            if all(frames is not used for used in self._using.values()):
                self._retired.remove(frames)
                frames.stream.close()

    def _end(self, why: str) -> None:
        if self._over is None:
            self._over = why
            if self._frames is not None:
                self._frames.stream.shut()
            self._changed.notify_all()


def _aligned_end(start: int, end: int) -> int:
    """Where to read to from `start`: a copy of many bytes to an odd address is slow."""
    if start % _PAGE_BYTES and end - start > 2 * _PAGE_BYTES:
        return start - start % _PAGE_BYTES + _PAGE_BYTES
    return end


def reason_of(error: Exception) -> str:
    """The error text without errno, which differs between systems."""
    return getattr(error, "strerror", None) or str(error)
