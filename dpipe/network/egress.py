"""What one rank sends through one interface: whose message moves, and how fast."""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from operator import attrgetter, itemgetter
from typing import Generic, TypeVar

from dpipe.network.link import Network

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sent(Generic[T]):
    """A message that has left."""

    target: int
    item: T
    start_us: float
    end_us: float  # its last bit leaves; it arrives the link's delay later


@dataclass(slots=True)
class _Moving(Generic[T]):
    target: int
    number: int  # in order of arrival
    item: T
    bits_left: float
    start_us: float | None = None  # when its first bit left
    bits_per_us: float = 0.0
    left_us: float = math.inf  # how long the rest takes at that rate


class Egress(Generic[T]):
    """What one rank sends through one interface. It has no clock: the simulator drives it by
    predicted time, the shaped transport by real time.

        to 1   [ a             ]      [ c
        to 2            (waits)[ b    ]

    Messages are served in order of arrival, as by a queue that takes a whole message at once; so
    TCP fills it after a few round trips. What a link cannot use, because its window is small, goes
    to the next message. Links with a shape of their own have a queue of their own; queues share the
    interface equally, as the classes of `tc` do.

    `offer` and `complete` are called in order of time, `complete` before any `offer` later than
    `due_us`.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._bits_per_us = network.egress_gbps(rank) * 1e3
        self._limits: dict[int, float] = {}  # by target: bits a microsecond
        self._queues: dict[int, int | None] = {}  # by target; None: that of the default link
        self._numbers = count()
        # By target: number, item, bytes.
        self._waiting: dict[int, deque[tuple[int, T, int]]] = {}
        self._moving: dict[int, _Moving[T]] = {}  # by target: one a link
        self._settled_us = 0.0  # until when `bits_left` is accounted for
        self._first: _Moving[T] | None = None  # the one that will be through next

    @property
    def due_us(self) -> float | None:
        """When the next message will have left, if no other is offered before; None if nothing is
        moving.
        """
        if self._first is None:
            return None
        return self._settled_us + self._first.left_us

    def offer(
        self,
        target: int,
        item: T,
        num_bytes: int,
        now_us: float,
    ) -> None:
        """Queue `num_bytes` for `target`."""
        if target not in self._limits:
            self._meet(target)
        self._waiting[target].append((next(self._numbers), item, num_bytes))
        if target not in self._moving:
            self._settle(now_us)
            self._load(target)
            self._share()

    def complete(self) -> Sent[T]:
        """Take out the message that is due, at `due_us`."""
        moved = self._first
        due_us = self.due_us
        assert moved is not None and due_us is not None, "nothing is due"
        assert moved.start_us is not None
        self._settle(due_us)
        del self._moving[moved.target]
        self._load(moved.target)
        self._share()
        return Sent(moved.target, moved.item, moved.start_us, due_us)

    def _meet(self, target: int) -> None:
        """Make the queue of a target at its first message."""
        rate_gbps = self._network.rate_gbps(self._rank, target)
        self._limits[target] = rate_gbps * 1e3
        link = self._network.link(self._rank, target)
        apart = link != self._network.default
        self._queues[target] = target if apart else None
        self._waiting[target] = deque()

    def _load(self, target: int) -> None:
        """Start the next message of a link that is free."""
        if self._waiting[target]:
            number, item, num_bytes = self._waiting[target].popleft()
            self._moving[target] = _Moving(target, number, item, num_bytes * 8)

    def _settle(self, now_us: float) -> None:
        """Account for what has left since the rates last changed."""
        for moving in self._moving.values():
            moving.bits_left -= moving.bits_per_us * (now_us - self._settled_us)
        self._settled_us = now_us

    def _share(self) -> None:
        """Set all rates anew: equal shares for the queues, and what one cannot use goes to those
        that can use more.
        """
        if len(self._moving) == 1:
            self._serve_alone(*self._moving.values())
            return
        moving = sorted(self._moving.values(), key=_by_number)
        queues: dict[int | None, list[_Moving[T]]] = {}
        for each in moving:
            queues.setdefault(self._queues[each.target], []).append(each)
        wanted = []
        for queue in queues.values():
            limits = [self._limits[each.target] for each in queue]
            wanted.append((sum(limits), queue))
        # Max-min fairness: the modest are served first, so that what they leave of their share is
        # known when the others' is cut.
        wanted.sort(key=_by_limit)
        left = self._bits_per_us
        for served, (limit, queue) in enumerate(wanted):
            share = left / (len(wanted) - served)
            left -= self._serve(queue, min(limit, share))
        self._first = min(moving, key=_by_time_left, default=None)

    def _serve_alone(self, moving: _Moving[T]) -> None:
        """What is left of `_share` for one message."""
        self._serve([moving], min(self._limits[moving.target], self._bits_per_us))
        self._first = moving

    def _serve(self, queue: Sequence[_Moving[T]], bits_per_us: float) -> float:
        """Give out `bits_per_us` in order of arrival. Returns how much of it is used."""
        left = bits_per_us
        for moving in queue:
            share = min(self._limits[moving.target], left)
            # A share that is a rounding error would start a message that never ends.
            if share > _NOTHING * bits_per_us:
                moving.bits_per_us = share
                left -= share
                # Settling rounds: less than nothing may be left of a message that is due.
                moving.left_us = max(0.0, moving.bits_left / share)
                if moving.start_us is None:
                    moving.start_us = self._settled_us
            else:
                moving.bits_per_us = 0.0
                moving.left_us = math.inf
        return bits_per_us - left


_by_limit = itemgetter(0)
_by_number = attrgetter("number")
_by_time_left = attrgetter("left_us")


_NOTHING = 1e-9  # share of a rate that is only a rounding error
