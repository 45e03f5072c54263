"""Messages that share one rate: whose moves, and how fast."""

import math
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")

Ends = tuple[int, int]  # from rank, to rank


@dataclass(frozen=True, slots=True)
class Sent(Generic[T]):
    """A message that is through."""

    source: int
    target: int
    item: T
    start_us: float
    end_us: float  # its last bit leaves; it arrives the link's delay later


@dataclass(frozen=True, slots=True)
class Flow:
    """What a link may take of the rate."""

    bits_per_us: float  # at most
    queue: Hashable  # which it stands in, with other links
    queue_bits_per_us: float = math.inf  # what all in that queue may take together


@dataclass(slots=True)
class _Moving(Generic[T]):
    ends: Ends
    flow: Flow
    number: int  # in order of arrival
    item: T
    bits_left: float
    start_us: float | None = None  # when its first bit left
    bits_per_us: float = 0.0
    left_us: float = math.inf  # how long the rest takes at that rate


@dataclass(slots=True)
class _Queue(Generic[T]):
    most_bits_per_us: float
    moving: list[_Moving[T]] = field(default_factory=list)  # one a link, in order of arrival
    wanted: float = 0.0  # the rate that it can use; infinite where it is more than there is


@dataclass(slots=True)
class _Link(Generic[T]):
    flow: Flow
    # Number, item, bytes.
    waiting: deque[tuple[int, T, int]] = field(default_factory=deque)
    busy: bool = False  # one message of a link moves at a time


class SharedRate(ABC, Generic[T]):
    """What shares one rate, link by link. It has no clock: the simulator drives it by predicted
    time, the shaped transport by real time.

    Messages of one queue are served in order of arrival, as by a queue that takes a whole message
    at once. What a link cannot use, because its window is small, goes to the next message. Queues
    share the rate equally.

    `offer` and `complete` are called in order of time, `complete` before any `offer` later than
    `due_us`.
    """

    def __init__(
        self,
        bits_per_us: float,
        begun: Callable[[T], None] | None = None,
    ) -> None:
        """`begun` is told of each message whose first bit moves, within `offer` or `complete`."""
        self._bits_per_us = bits_per_us
        self._begun = begun
        self._links: dict[Ends, _Link[T]] = {}
        self._numbers = count()
        self._queues: dict[Hashable, _Queue[T]] = {}  # those that are not empty
        self._served: list[_Moving[T]] = []  # those that are not at a halt
        self._settled_us = 0.0  # until when `bits_left` is accounted for
        self._first: _Moving[T] | None = None  # the one that will be through next

    @abstractmethod
    def flow(self, source: int, target: int) -> Flow:
        """What the link may take; asked at its first message."""

    @property
    def due_us(self) -> float | None:
        """When the next message will be through, if no other is offered before; None if nothing is
        moving.
        """
        if self._first is None:
            return None
        return self._settled_us + self._first.left_us

    def offer(
        self,
        source: int,
        target: int,
        item: T,
        num_bytes: int,
        now_us: float,
    ) -> None:
        """Queue `num_bytes` from `source` to `target`."""
        ends = source, target
        if ends not in self._links:
            self._links[ends] = _Link(self.flow(source, target))
        link = self._links[ends]
        link.waiting.append((next(self._numbers), item, num_bytes))
        if not link.busy:
            self._settle(now_us)
            self._load(ends, link)
            self._share()

    def complete(self) -> Sent[T]:
        """Take out the message that is due, at `due_us`."""
        moved = self._first
        due_us = self.due_us
        assert moved is not None and due_us is not None, "nothing is due"
        assert moved.start_us is not None
        self._settle(due_us)
        queue = self._queues[moved.flow.queue]
        queue.moving.remove(moved)
        self._measure(queue)
        if not queue.moving:
            del self._queues[moved.flow.queue]
        self._load(moved.ends, self._links[moved.ends])
        self._share()
        return Sent(*moved.ends, moved.item, moved.start_us, due_us)

    def _load(self, ends: Ends, link: _Link[T]) -> None:
        """Start the next message of a link that is free."""
        link.busy = bool(link.waiting)
        if link.busy:
            number, item, num_bytes = link.waiting.popleft()
            moving = _Moving(ends, link.flow, number, item, num_bytes * 8)
            name = link.flow.queue
            if name not in self._queues:
                self._queues[name] = _Queue(link.flow.queue_bits_per_us)
            queue = self._queues[name]
            if queue.moving:
                # Not at its end: it may have waited for its link for longer than others here.
                insort(queue.moving, moving, key=_by_number)
            else:
                queue.moving.append(moving)
            self._measure(queue)

    def _settle(self, now_us: float) -> None:
        """Account for what has left since the rates last changed."""
        passed_us = now_us - self._settled_us
        for moving in self._served:
            moving.bits_left -= moving.bits_per_us * passed_us
        self._settled_us = now_us

    def _share(self) -> None:
        """Set all rates anew: equal shares for the queues, and what one cannot use goes to those
        that can use more.
        """
        for moving in self._served:
            moving.bits_per_us = 0.0
            moving.left_us = math.inf
        self._served = []
        left = self._bits_per_us
        if len(self._queues) == 1:
            self._serve_one(left)
            return
        # Max-min fairness: the modest are served first, so that what they leave of their share is
        # known when the others' is cut.
        queues = sorted(self._queues.values(), key=_by_wish)
        unserved = len(queues)
        for queue in queues:
            share = left / unserved
            unserved -= 1
            most = min(queue.wanted, share)
            used = self._serve(queue.moving, most)
            left -= used
        self._first = _next_of(self._served)
        if self._first is None and queues:
            self._first = min((queue.moving[0] for queue in queues), key=_by_number)

    def _serve_one(self, bits_per_us: float) -> None:
        """Of a single queue, as an interface has most of the time."""
        (queue,) = self._queues.values()
        most = min(queue.wanted, bits_per_us)
        self._serve(queue.moving, most)
        first = queue.moving[0]
        following = _next_of(self._served)
        self._first = following or first

    def _measure(self, queue: _Queue[T]) -> None:
        """Its members have changed."""
        queue.wanted = 0.0
        for moving in queue.moving:
            queue.wanted += moving.flow.bits_per_us
            # A queue may be long, and its first message may take all.
            if queue.wanted > self._bits_per_us:
                queue.wanted = math.inf
                break
        queue.wanted = min(queue.wanted, queue.most_bits_per_us)

    def _serve(self, queue: Sequence[_Moving[T]], bits_per_us: float) -> float:
        """Give out `bits_per_us` in order of arrival. Returns how much of it is used."""
        left = bits_per_us
        # A share that is a rounding error would start a message that never ends.
        nothing = _NOTHING * bits_per_us
        for moving in queue:
            if left <= nothing:
                break
            wanted = moving.flow.bits_per_us
            share = wanted if wanted < left else left
            if share > nothing:
                self._move(moving, share)
                left -= share
        return bits_per_us - left

    def _move(self, moving: _Moving[T], bits_per_us: float) -> None:
        moving.bits_per_us = bits_per_us
        # Settling rounds: less than nothing may be left of a message that is due.
        moving.left_us = max(0.0, moving.bits_left / bits_per_us)
        self._served.append(moving)
        if moving.start_us is None:
            moving.start_us = self._settled_us
            if self._begun is not None:
                self._begun(moving.item)


def _by_wish(queue: _Queue[T]) -> tuple[float, int]:
    return queue.wanted, queue.moving[0].number


def _next_of(served: Sequence[_Moving[T]]) -> _Moving[T] | None:
    """The one that will be through next; of two at once the one that came first."""
    if len(served) < 2:
        return served[0] if served else None
    return min(served, key=_by_time_left)


_by_number = attrgetter("number")
_by_time_left = attrgetter("left_us", "number")

_NOTHING = 1e-9  # share of a rate that is only a rounding error
