"""Round trips of small messages to all peers at once: they are too few to be in each other's way.

lower rank   PING 0 ......... PING 1 ......... PING 2 ...   DONE
higher rank     PONG 0 ......... PONG 1 ......... PONG 2
"""

import heapq
import select
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median, quantiles

from dpipe.errors import TransferError
from dpipe.measure.connections import PeerSockets
from dpipe.measure.notes import Note, NoteKind, Notes
from dpipe.session.session import reason_of

# So many that the jitter that they find is between half of the link's and twice as much.
_PINGS = 64
_COLD = 4  # the first, which find caches cold, do not count
_INTERVAL_S = 0.05
_WAIT_S = 0.05
_ANSWER_S = 5.0  # for the last answers to come

# The difference of the quartiles of two uniform jitters' sum, whose half width is 1: half of its
# values lie within 2 - sqrt(2) of the middle.
_QUARTILES = 2 * (2 - 2**0.5)


@dataclass(frozen=True)
class Delay:
    """Of a link, one way, taken as half of the round trip; jitter as a profile says it: delays lie
    within so much of the middle.
    """

    one_way_ms: float
    jitter_ms: float


def delay_of(round_trips_s: Collection[float]) -> Delay:
    """Quartiles, not extremes: a busy machine now and then answers late."""
    low, _, high = quantiles(round_trips_s, n=4)
    one_way_ms = median(round_trips_s) * 1e3 / 2
    jitter_ms = (high - low) * 1e3 / _QUARTILES
    # A profile with more jitter than delay would have messages arrive before they are sent.
    return Delay(one_way_ms, min(jitter_ms, one_way_ms))


@dataclass
class _Pinged:
    """One peer, which this rank pings or which pings it."""

    peer: int
    notes: Notes
    leads: bool  # whether this rank asks
    sent_at: dict[int, float] = field(default_factory=dict)
    round_trips_s: dict[int, float] = field(default_factory=dict)
    over: bool = False
    problem: str = ""

    def ping(self, number: int) -> None:
        self.sent_at[number] = time.perf_counter()
        self.notes.send(NoteKind.PING, number)

    def take(self, note: Note, now: float) -> None:
        """Raises `TransferError` for a note that does not belong here."""
        number = note.value
        if note.kind == NoteKind.PING and not self.leads:
            self.notes.send(NoteKind.PONG, number)
        elif note.kind == NoteKind.DONE and not self.leads:
            self.over = True
        elif note.kind == NoteKind.PONG and number in self.sent_at:
            self.round_trips_s[number] = now - self.sent_at.pop(number)
            if len(self.round_trips_s) == _PINGS:
                self.notes.send(NoteKind.DONE, 0)
                self.over = True
        else:
            raise TransferError(f"it sent {note.kind.name} where no such note belongs")


def ping_all(
    rank: int, peers: Mapping[int, PeerSockets]
) -> tuple[dict[int, Delay], dict[int, str]]:
    """The delay to each peer above `rank`, and why there is none, by rank; the lower ranks find
    theirs meanwhile. All ranks call it at about the same time.
    """
    everyone = []
    for peer, sockets in peers.items():
        assert sockets.notes is not None
        everyone.append(_Pinged(peer, sockets.notes, leads=rank < peer))
    _run(everyone)
    delays = {}
    for pinged in everyone:
        if pinged.leads and not pinged.problem:
            warm = [pinged.round_trips_s[number] for number in range(_COLD, _PINGS)]
            delays[pinged.peer] = delay_of(warm)
    return delays, {pinged.peer: pinged.problem for pinged in everyone if pinged.problem}


def _run(everyone: list[_Pinged]) -> None:
    """Until all have answered, and all others have heard what they asked for."""
    began = time.perf_counter()
    due = _timetable(began, [pinged for pinged in everyone if pinged.leads])
    deadline = began + _PINGS * _INTERVAL_S + _ANSWER_S
    while going := [pinged for pinged in everyone if not (pinged.over or pinged.problem)]:
        now = time.perf_counter()
        if now >= deadline:
            for pinged in going:
                pinged.problem = f"rank {pinged.peer} answers no ping"
        while due and due[0][0] <= now:
            _, _, number, pinged = heapq.heappop(due)
            if not pinged.problem:
                _ping(pinged, number)
        next_s = due[0][0] - now if due else _WAIT_S
        _poll(going, min(next_s, _WAIT_S))


def _timetable(began: float, leading: list[_Pinged]) -> list[tuple[float, int, int, _Pinged]]:
    """When to ping whom: evenly over each interval, as a burst would be answered one by one."""
    due = []
    for place, pinged in enumerate(leading):
        for number in range(_PINGS):
            share = place / len(leading)
            due.append((began + (number + share) * _INTERVAL_S, pinged.peer, number, pinged))
    heapq.heapify(due)
    return due


def _ping(pinged: _Pinged, number: int) -> None:
    try:
        pinged.ping(number)
    except OSError as error:
        pinged.problem = f"rank {pinged.peer}: {reason_of(error)}"


def _poll(going: list[_Pinged], wait_s: float) -> None:
    waiter = select.poll()
    by_number = {pinged.notes.socket.fileno(): pinged for pinged in going}
    for number in by_number:
        waiter.register(number, select.POLLIN)
    ready = waiter.poll(max(0.0, wait_s) * 1e3)
    now = time.perf_counter()
    for number, _ in ready:
        pinged = by_number[number]
        try:
            for note in pinged.notes.take():
                pinged.take(note, now)
        except (OSError, TransferError) as error:
            pinged.problem = f"rank {pinged.peer}: {reason_of(error)}"
