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
copies from then on. What the two kernels and the path between them hold, and `_REPORT_BYTES`,
bounds them where the other end is honest: an end whose bytes are not taken cannot write on. For one
that takes and never acknowledges, who writes stops at `most_kept_bytes`: see `has_room`.

Either end drops a connection on which nothing came for `silence_s`. The other end writes something
at least four times in that time, so a path that swallows bytes is noticed by both, whatever the
kernel or a proxy has acknowledged. An end that is held back and does not read does not judge. A
path may open connections and lose all that is large: where several of them in a row moved nothing,
and `window_s` has passed, it is over.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from threading import Condition, Lock, RLock

from dpipe.errors import TransferError
from dpipe.session.frames import FRAME_BYTES, PADDING_BYTES, Frames, Stream
from dpipe.session.stops import Stops

_SMALL_BYTES = 4 << 10  # up to here it is cheaper to copy than to keep
_PAGE_BYTES = 4 << 10
_REPORT_BYTES = 4 << 20  # an end that has received so many says so; more often, it costs
_MOST_STALLED = 4  # connections that moved nothing
_BEATS = 4  # signs of life in `silence_s`
LOOK_S = 0.02  # a fraction of TCP's shortest timeout
_PAUSE_S = 0.05  # between two bursts of the caller
_WARM_S = 30.0  # that a window is kept open after the last of them
_ROOM_S = 0.05
_FAREWELL_S = 0.1  # for a frame that is being written
_WAKE_S = 5.0  # poll interval of waits without a deadline of their own
_READER = "reader"
_WRITER = "writer"


class Kept:
    """Written bytes of a session that its other end may not have: `lead`, then `view`."""

    __slots__ = ("_lock", "_owned", "end", "lead", "start", "view")

    def __init__(self, start: int, lead: bytes, view: memoryview, lock: RLock) -> None:
        self.start = start
        self.end = start + len(lead) + len(view)
        self.lead = lead
        self.view: memoryview | None = view  # None once they have arrived
        self._owned = view.readonly
        self._lock = lock

    def own(self) -> None:
        """Copy what has not arrived: the caller's memory may change from now on."""
        with self._lock:
            if self.view is not None and not self._owned:
                self.view = memoryview(bytes(self.view))
                self._owned = True

    def after(self, arrived: int) -> list[memoryview]:
        """What of it stands behind the session's first `arrived` bytes."""
        assert self.view is not None
        lead = memoryview(self.lead)[max(0, arrived - self.start) :]
        view = self.view[max(0, arrived - self.start - len(self.lead)) :]
        return [piece for piece in (lead, view) if piece]


class LinkSession:
    """One thread reads, one writes, and any may do the rest. What they wait for raises
    `ConnectionError` once the session is over.
    """

    def __init__(
        self,
        window_s: float,
        *,
        most_kept_bytes: float = math.inf,
        may_resume: Callable[[], bool] = lambda: True,
        on_break: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_break` is called for each connection that broke while `may_resume`."""
        self.secret = b""  # what the two ends alone know
        self.received = 0
        self.stalled = False  # the last connection moved nothing of what this end wrote
        self.fell_silent = False  # the last connection, and was not closed
        self.silence_s = window_s / 8
        self._window_s = window_s
        self._most_kept_bytes = most_kept_bytes
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
        self._awaits_room = False  # the thread that writes
        self._num_stalled = 0  # connections in a row
        self._resumed_at = 0  # bytes acknowledged when the connection was new
        self._moved_at = 0.0  # when bytes on the way arrived last, or the first of them was written
        self._reported = 0  # bytes received, as the last frame said
        self._listening_since: float | None = None
        self._wrote_at = -math.inf  # the caller
        self._burst = 0  # bytes of the caller since it paused
        self._last_burst = 0
        self._ended = False
        self._why = "it has not been opened"
        self._lost_at = math.inf
        self._over: str | None = None

    @property
    def why(self) -> str:
        """What broke the last connection."""
        return self._why

    @property
    def stream(self) -> Stream | None:
        """Of the connection, where there is one."""
        frames = self._frames
        return None if frames is None else frames.stream

    @property
    def has_ended(self) -> bool:
        """Whether this end has written all that it will."""
        return self._ended

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

    def attach(self, frames: Frames, arrived: int, reported: int) -> None:
        """Go on, on a new connection whose other end has received `arrived` bytes, and knows that
        this end has received `reported`. Raises `TransferError` where `arrived` cannot be, and
        `ConnectionError` where more has come meanwhile, or the session is over.
        """
        with self._reading, self._lock:
            self.check_arrived(arrived)
            if self._over is not None:
                raise ConnectionError(self._over)
            if reported != self.received:
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
        while self.send_next():
            continue

    def send_next(self) -> bool:
        """Write one frame of what is to be sent. Returns whether there was one."""
        if not self._outgoing:
            return False
        with suppress(ConnectionError), self._writing:
            return self._write_frame(patient=False)
        return False

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

    def watch(self, now: float, stops: Stops) -> None:
        """Drop a silent connection, and be heard on one where this end has nothing to say. Call it
        a few times in `silence_s`.
        """
        frames = self._frames
        since = self._listening_since
        if frames is None:
            return
        if since is not None:
            heard_at = max(since, frames.heard_at)
            if stops.silent_s(heard_at, now) > self.silence_s:
                self.fell_silent = True
                self.broke(frames, f"nothing came for {self.silence_s:g} s")
        if now - frames.wrote_at > self.silence_s / _BEATS or self.received > self._reported:
            self._report()

    # Bytes

    def has_room(self) -> bool:
        """Whether more should be written now; so it is where that will raise."""
        return self._written - self._acknowledged < self._most_kept_bytes or self._over is not None

    def await_room(self) -> None:
        """Wait for room, a moment at most: a thread may have something else to write."""
        with self._lock:
            self._awaits_room = True
            self._changed.wait_for(self.has_room, _ROOM_S)
            self._awaits_room = False

    def await_drained(self) -> bool:
        """Of the thread that writes: wait a moment for the stream to take more. Returns whether it
        does; true where there is none.
        """
        with self._writing:
            frames = self._using.get(_WRITER)
            return frames is None or frames.stream.can_write(round(_ROOM_S * 1e3))

    def write(self, lead: bytes, view: memoryview) -> Kept | None:
        """Hand `lead`, then `view`, to the kernel. Returns what holds `view`, whose bytes must not
        change before it is `own`ed; None where a copy was made.
        """
        is_copied = len(lead) + len(view) <= _SMALL_BYTES
        if is_copied:
            lead += view
            view = view[:0]
        self._count_burst(len(lead) + len(view))
        with self._writing:
            with self._lock:
                kept = self._keep(lead, view)
                frames = self._frames
                # Most often: the connection is as it was, and nothing is to be sent before.
                in_turn = frames is self._using.get(_WRITER) and not self._outgoing
                if frames is None or not in_turn or self._over is not None:
                    frames = None
                    self._outgoing += kept.after(kept.start)
            if frames is not None:
                self._attempt(frames, (lead, view))
            while self._outgoing:
                self._write_frame(patient=True)
        self._wrote_at = time.monotonic()
        return None if is_copied else kept

    def _count_burst(self, num_bytes: int) -> None:
        now = time.monotonic()
        if now - self._wrote_at > _PAUSE_S:
            self._last_burst = max(self._burst, self._last_burst * 3 // 4)
            self._burst = 0
        self._wrote_at = now
        self._burst += num_bytes

    def end(self) -> None:
        """Write no more; the other end reads what was written, then the end."""
        with self._writing, self._lock:
            self._ended = True
            if self._frames is not None:
                self._frames.stream.end()

    def read(self, view: memoryview) -> None:
        """Fill `view`. Raises `TransferError` where the other end acknowledges nonsense."""
        if self._take_whole(view):
            return
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
            if self.received - self._reported >= _REPORT_BYTES:
                self._report()
        self._listening_since = None

    def skip(self) -> None:
        """Read and drop bytes until the session is over."""
        scratch = memoryview(bytearray(1 << 16))
        with suppress(OSError):
            while True:
                self.read(scratch)

    def _take_whole(self, view: memoryview) -> bool:
        """Fill `view` where all of it is here: no wait, and nothing new that the other end says."""
        with self._reading:
            frames = self._frames
            if frames is None or not frames.take_whole(view):
                return False
            self.received += len(view)
            return True

    def _take(self, frames: Frames, view: memoryview) -> int:
        with self._reading:
            if frames is not self._frames:
                return 0
            num_bytes = frames.receive(view)
            self.received += num_bytes
            return num_bytes

    def _write_frame(self, *, patient: bool) -> bool:
        """Write what is to be sent next; where `patient`, on the next connection too."""
        with self._lock:
            if not self._outgoing or (self._frames is None and not patient):
                return False
            frames = self._current(_WRITER)
            pieces = self._next_pieces()
        if pieces:
            self._attempt(frames, pieces)
        return True

    def _attempt(self, frames: Frames, pieces: Sequence[bytes | memoryview]) -> None:
        try:
            self._put(frames, pieces)
        except OSError as error:
            self.broke(frames, reason_of(error))

    def _report(self) -> None:
        """Write a frame without payload, unless it has to wait."""
        self._write_aside(self._acknowledge_now)

    def keep_warm(self, now: float) -> None:
        """Keep the window open that the caller's bursts need, for `_WARM_S` after the last of them.
        Call it every `LOOK_S`.
        """
        stream = self.stream
        if stream is None or now - self._wrote_at > _WARM_S:
            return
        num_bytes = 0
        with suppress(OSError):  # it is closed meanwhile
            num_bytes = stream.padding(max(self._burst, self._last_burst))
        if num_bytes:
            self._write_aside(partial(self._pad, num_bytes))

    def _acknowledge_now(self, frames: Frames) -> None:
        if frames.stream.can_write():
            self._put(frames, [])

    def _pad(self, num_bytes: int, frames: Frames) -> None:
        left = num_bytes
        while left > 0 and frames.stream.can_write():
            frames.pad(self.received, min(left, PADDING_BYTES))
            left -= PADDING_BYTES

    def _write_aside(self, write: Callable[[Frames], None]) -> None:
        """`write` something that is not of the session, unless a frame is being written."""
        if not self._writing.acquire(blocking=False):
            return
        try:
            with self._lock:
                if self._frames is None or self._ended or self._over is not None:
                    return
                frames = self._current(_WRITER)
            try:
                write(frames)
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

    def _put(self, frames: Frames, pieces: Sequence[bytes | memoryview]) -> None:
        received = self.received
        frames.write(received, pieces)
        self._reported = received

    def _hear(self, frames: Frames) -> None:
        arrived = frames.acknowledged
        with self._lock:
            if frames is not self._frames:
                return
            if arrived > self._written:
                self.check_arrived(arrived)
            self._acknowledge(arrived)
            if self._awaits_room:
                self._changed.notify_all()

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

    def _keep(self, lead: bytes, view: memoryview) -> Kept:
        if self._acknowledged == self._written:
            self._moved_at = time.monotonic()
        kept = Kept(self._written, lead, view, self._lock)
        self._kept.append(kept)
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
        if arrived > self._acknowledged:
            self._moved_at = time.monotonic()
        self._acknowledged = arrived
        while self._kept and self._kept[0].end <= arrived:
            self._kept.popleft().view = None

    def _after(self, arrived: int) -> list[memoryview]:
        """The kept bytes from `arrived` on."""
        views: list[memoryview] = []
        for kept in self._kept:
            views += kept.after(arrived)
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
        # Several: a peer that is held back takes nothing either, and may lose a connection.
        self._num_stalled = self._num_stalled + 1 if self.stalled else 0
        if self._num_stalled >= _MOST_STALLED and now - self._moved_at > self._window_s:
            self._end(
                f"{why}, and on connections opened since nothing arrived in {self._window_s:g} s: "
                "the path may lose large packets (see net.ipv4.tcp_mtu_probing)"
            )
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
