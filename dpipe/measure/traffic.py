"""Streams of bytes between ranks, as fast as TCP will: what a link carries, and what it loses.

    sender     o o o o o o O O O O O |DONE n                what is acknowledged, in slices of a
    receiver     o o o o o o O O O O O  GOT n               round trip: growing, then steady
                 growing     steady

The sender alone measures, so that no two clocks need to agree. What it has in flight is at most a
few times what the link carries in a round trip: more would only stand in a queue on the way, where
it makes round trips longer, or is lost and counted as the link's own loss.

Over a relayed link TCP acknowledges what has come to a port of this machine, from where it goes on.
There the receiver says in notes what it has, and of losses nothing is known.
"""

import math
import select
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

from dpipe.errors import TransferError
from dpipe.measure.connections import PeerSockets
from dpipe.measure.notes import NOT_YET, Note, NoteKind
from dpipe.measure.tcp_info import counts, queued_bytes
from dpipe.session.session import reason_of

_CHUNK = memoryview(bytes(64 << 10))
_FEWEST_WRITTEN = 4 << 10
# A record of TLS: of one that is not through when a stream ends, nothing arrives before the next
# stream writes it again. Of a longer chunk some records would, uncounted.
_TLS_CHUNK = _CHUNK[: 16 << 10]
_SINK = bytearray(1 << 20)
_READS = 64  # of one connection in a row
_SLICE_S = 0.05  # at least: shorter ones show how threads are scheduled
_FEWEST_IN_FLIGHT = 512 << 10  # bytes, while nothing is known of the link
_RISING_IN_FLIGHT = 2.5  # round trips' worth: 2 let the rate double each round trip
_STEADY_IN_FLIGHT = 1.5
_LATE_S = 0.02  # by which this thread may be woken late
_STEADY_SLICES = 4
_STEADY_SHARE = 0.05  # by which steady slices differ at most
_RISING = 1.25
_WAIT_S = 0.001  # until a window is looked at again
_IDLE_S = 0.05
_RECEIPTS_S = 0.01  # between what the receiver of a relayed link says


class Meter:
    """A count of bytes over time, in slices that need not be alike in length."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, int]] = []

    def note(self, now: float, total_bytes: int) -> None:
        self.samples.append((now, total_bytes))

    def rates(self) -> list[float]:
        """Bytes a second of each slice."""
        return [_rate(pair) for pair in pairwise(self.samples)]

    def rate_between(self, start: float, end: float) -> float:
        """Bytes a second, by the samples from `start` to `end`; 0 where there are not two."""
        return _rate([sample for sample in self.samples if start <= sample[0] <= end])

    def steady_rate(self) -> float | None:
        """Of the last slices where they are alike, and none before was better."""
        rates = self.rates()
        last = rates[-_STEADY_SLICES:]
        if len(rates) <= _STEADY_SLICES or not max(last):
            return None
        alike = max(last) - min(last) <= _STEADY_SHARE * max(last)
        if alike and max(last) >= (1 - _STEADY_SHARE) * max(rates):
            return _rate(self.samples[-_STEADY_SLICES - 1 :])
        return None

    def late_rate(self) -> float:
        """Of the second half: single slices may be late and others early."""
        return _rate(self.samples[(len(self.samples) - 1) // 2 :])

    def is_rising(self) -> bool:
        """Whether it ended before its rate was found: it grew all the time."""
        grew = [later >= _RISING * earlier for earlier, later in pairwise(self.rates())]
        return all(grew[-_STEADY_SLICES:])


def _rate(samples: Sequence[tuple[float, int]]) -> float:
    """Bytes a second from the first sample to the last."""
    if len(samples) < 2:
        return 0.0
    began, first = samples[0]
    ended, last = samples[-1]
    return (last - first) / max(ended - began, 1e-9)


def gbps(bytes_per_s: float) -> float:
    """Of messages, without the headers of packets: what a file of machines says."""
    return bytes_per_s * 8e-9


class Outflow:
    """A stream of bytes to one peer."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        round_trip_s: float,
        lasts_s: float,
        *,
        until_steady: bool = True,
        relayed: bool = False,
    ) -> None:
        """It ends after `lasts_s`, or as soon as its rate is steady."""
        self.meter = Meter()
        self.said_done = False
        self.loss_percent = 0.0
        self.blocked: list[socket.socket] = []  # whose buffer is full
        self._sockets = sockets
        self._round_trip_s = round_trip_s
        self._lasts_s = lasts_s
        self._until_steady = until_steady
        self._slice_s = max(_SLICE_S, round_trip_s)
        self._window_bytes = float(_FEWEST_IN_FLIGHT)
        self._written = 0
        self._had: int | None = 0 if relayed else None  # by the receiver, as it has said
        self._before = counts(sockets)
        self._began: float | None = None
        self._acked_bytes: int | None = None  # when a slice was long enough to end

    @property
    def gbps(self) -> float:
        return gbps(self.meter.steady_rate() or self.meter.late_rate())

    @property
    def rising(self) -> bool:
        """Whether its time was over before its rate was found."""
        return self.meter.steady_rate() is None and self.meter.is_rising()

    def step(self, now: float) -> int | None:
        """Write what may be in flight. Returns how many bytes that were, once no more follow."""
        if self._began is None:
            self._began = now
            self.meter.note(now, self._acked())
        if self._is_over(now):
            self.blocked = []
            self.said_done = True
            return self._written
        self.blocked = [sock for sock in self._sockets if not self._fill(sock)]
        return None

    def _is_over(self, now: float) -> bool:
        assert self._began is not None
        if self._ends_slice(now):
            self._window_bytes = self._bytes_in_flight()
            if self._until_steady and self.meter.steady_rate() is not None:
                return True
        return now - self._began >= self._lasts_s

    def _bytes_in_flight(self) -> float:
        """That fill the link, and let the rate grow where it still does."""
        *before, last = self.meter.rates()
        best = max([last, *before])
        round_trips = _STEADY_IN_FLIGHT
        if last >= _RISING * max(before, default=0.0):
            round_trips = _RISING_IN_FLIGHT
        # A thread that wakes late must not find the link idle.
        in_flight_s = round_trips * self._round_trip_s + _LATE_S
        return max(_FEWEST_IN_FLIGHT, best * in_flight_s)

    def _ends_slice(self, now: float) -> bool:
        """Whether a slice has ended: with an acknowledgement, since they come in bursts, of which a
        slice by the clock would have one more or one less.
        """
        last_look, _ = self.meter.samples[-1]
        if now - last_look < self._slice_s:
            return False
        acked_bytes = self._acked()
        awaited = self._acked_bytes is not None and acked_bytes > self._acked_bytes
        if awaited:
            self.meter.note(now, acked_bytes)
        self._acked_bytes = None if awaited else acked_bytes
        return awaited

    def _fill(self, sock: socket.socket) -> bool:
        """Write its share of the window. False where its buffer holds no more."""
        share = self._window_bytes / len(self._sockets)
        # One share a step: a link that takes bytes as fast as they are written never fills, and
        # this thread would neither look at the clock nor read what comes.
        left = share
        try:
            while (room := min(left, share - self._in_flight(sock))) > 0:
                if isinstance(sock, ssl.SSLSocket):
                    chunk = _TLS_CHUNK
                else:
                    chunk = _CHUNK[: max(_FEWEST_WRITTEN, math.ceil(room))]
                written = sock.send(chunk)
                self._written += written
                left -= written
        except NOT_YET:
            return False
        return True

    def _acked(self) -> int:
        return counts(self._sockets).acked_bytes if self._had is None else self._had

    def _in_flight(self, sock: socket.socket) -> float:
        if self._had is None:
            return queued_bytes(sock)
        return (self._written - self._had) / len(self._sockets)

    def hear(self, had: int) -> None:
        """The receiver has got so much. Raises `TransferError` where that cannot be."""
        if self._had is None or not self._had <= had <= self._written:
            raise TransferError(f"it says that it has {had} bytes of {self._written}")
        self._had = had

    def arrive(self) -> None:
        """All of it has arrived: only now it is known what was sent again in vain."""
        if self._had is not None:
            return
        after = counts(self._sockets)
        segments = after.segments - self._before.segments
        lost = after.lost - self._before.lost
        self.loss_percent = 100 * lost / max(segments, lost + 1)


class Inflow:
    """A stream of bytes from one peer."""

    def __init__(self, sockets: Sequence[socket.socket], *, relayed: bool = False) -> None:
        self.sockets = sockets
        self._relayed = relayed
        self._said = 0
        self._say_at = 0.0
        self.meter = Meter()
        self.sent: int | None = None  # bytes, as the peer has said at the end
        self._received = 0

    def step(self, now: float) -> int | None:
        """Returns how many bytes have come, once they are all that were sent."""
        samples = self.meter.samples
        if not samples or now - samples[-1][0] >= _SLICE_S:
            self.meter.note(now, self._received)
        if self.sent is None or self._received < self.sent:
            return None
        # A count that does not agree is no measurement, whichever end is wrong.
        if self._received > self.sent:
            raise TransferError(f"{self._received} bytes came of {self.sent} that were sent")
        return self._received

    def receipt(self, now: float) -> int | None:
        """What the sender of a relayed link is to hear now."""
        if not self._relayed or now < self._say_at or self._received == self._said:
            return None
        self._said = self._received
        self._say_at = now + _RECEIPTS_S
        return self._said

    def pull(self, sock: socket.socket) -> None:
        """Take what has come, and discard it."""
        # MSG_TRUNC drops bytes in the kernel, without a copy: the reader is never the limit.
        flags = 0 if isinstance(sock, ssl.SSLSocket) else getattr(socket, "MSG_TRUNC", 0)
        for _ in range(_READS):
            try:
                received = sock.recv_into(_SINK, 0, flags)
            except NOT_YET:
                return
            if not received:
                raise ConnectionError("it closed the connection")
            self._received += received


class PeerTraffic:
    """What goes to one peer, and what comes from it."""

    def __init__(
        self,
        peer: int,
        sockets: PeerSockets,
        out: Outflow | None,
        into: Inflow | None,
        *,
        into_first: bool = False,
    ) -> None:
        """With `into_first`, nothing goes out before all that comes has come."""
        assert sockets.notes is not None
        self.peer = peer
        self.out = out
        self.into = into
        self.problem = ""  # why it could not be measured
        self.notes = sockets.notes
        self._into_first = into_first
        self._out_over = out is None
        self._into_over = into is None

    @property
    def over(self) -> bool:
        return bool(self.problem) or (self._out_over and self._into_over)

    @property
    def sends(self) -> bool:
        waits = self._into_first and not self._into_over
        return self.out is not None and not self.out.said_done and not waits

    @property
    def receives(self) -> bool:
        return not self._into_over

    def step(self, now: float) -> None:
        if self.into is not None and not self._into_over:
            received = self.into.step(now)
            had = self.into.receipt(now)
            if had is not None:
                self.notes.send(NoteKind.HAVE, had)
            if received is not None:
                self.notes.send(NoteKind.GOT, received)
                self._into_over = True
        if self.out is not None and self.sends:
            written = self.out.step(now)
            if written is not None:
                self.notes.send(NoteKind.DONE, written)

    def take(self, note: Note) -> None:
        """Raises `TransferError` for a note that does not belong here."""
        if note.kind == NoteKind.DONE and self.into is not None and self.into.sent is None:
            self.into.sent = note.value
        elif note.kind == NoteKind.GOT and self.out is not None and self.out.said_done:
            self.out.arrive()
            self._out_over = True
        elif note.kind == NoteKind.HAVE and self.out is not None:
            self.out.hear(note.value)
        else:
            raise TransferError(f"it sent {note.kind.name} where no such note belongs")


def exchange(flows: Sequence[PeerTraffic], deadline: float) -> None:
    """Run all `flows` until they are over. One that fails says why in its `problem`, and the others
    go on.
    """
    while going := [flow for flow in flows if not flow.over]:
        now = time.monotonic()
        for flow in going:
            if now >= deadline:
                flow.problem = f"rank {flow.peer} fell silent in the middle"
            else:
                _attempt(flow, partial(flow.step, now))
        _poll([flow for flow in going if not flow.over], deadline - now)


def _attempt(flow: PeerTraffic, do: Callable[[], None]) -> None:
    try:
        do()
    except (OSError, TransferError) as error:
        flow.problem = f"rank {flow.peer}: {reason_of(error)}"


def _poll(flows: Sequence[PeerTraffic], left_s: float) -> None:
    """Wait until something can be done, and take what has come."""
    waiter = select.poll()
    incoming: dict[int, tuple[PeerTraffic, socket.socket | None]] = {}
    for flow in flows:
        waiter.register(flow.notes.socket, select.POLLIN)
        incoming[flow.notes.socket.fileno()] = flow, None
        events: dict[socket.socket, int] = {}
        if flow.receives and flow.into is not None:
            events = dict.fromkeys(flow.into.sockets, select.POLLIN)
        if flow.sends and flow.out is not None:
            for sock in flow.out.blocked:
                events[sock] = events.get(sock, 0) | select.POLLOUT
        for data, event in events.items():
            waiter.register(data, event)
            incoming[data.fileno()] = flow, data
    most_s = _WAIT_S if any(flow.sends for flow in flows) else _IDLE_S
    for number, event in waiter.poll(max(0, math.ceil(1e3 * min(most_s, left_s)))):
        # What may be written again is written by the next step, within its window.
        if event & ~select.POLLOUT:
            flow, source = incoming[number]
            _attempt(flow, partial(_receive, flow, source))


def _receive(flow: PeerTraffic, sock: socket.socket | None) -> None:
    if sock is None:
        for note in flow.notes.take():
            flow.take(note)
    elif flow.into is not None and flow.receives:
        flow.into.pull(sock)
    else:
        raise ConnectionError("it closed the connection")
