"""A network as a run sees it: one directed link between each two ranks, and each rank's own egress.

A message of n bytes on a link takes n * 8 / bandwidth to put on the wire, then the link's delay to arrive.
What a rank sends to several peers at once shares its egress, because `tc` shapes an interface and not a peer: one
message after another (`Egress`).
One TCP connection carries at most a window a round trip, whatever the bandwidth.
"""

import math
import tomllib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, permutations
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any, Generic, TypeVar

from dpipe.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks: one-way delay and its jitter in milliseconds, bandwidth in gigabits a second,
    the share of packets that is lost, in percent, and TCP's window: the bytes that a connection has under way at most
    (None: no limit)."""

    delay_ms: float
    bandwidth_gbps: float
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    window_bytes: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms < math.inf:
            raise ProfileError(f"delay_ms must be a number that is not negative, got {self.delay_ms}")
        if self.delay_ms > MAX_DELAY_MS:
            raise ProfileError(f"delay_ms must be at most {MAX_DELAY_MS}, an hour, got {self.delay_ms}")
        if not 0 < self.bandwidth_gbps < math.inf:
            raise ProfileError(f"bandwidth_gbps must be a positive number, got {self.bandwidth_gbps}")
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise ProfileError(f"jitter_ms must lie between 0 and delay_ms {self.delay_ms}, got {self.jitter_ms}")
        if not 0 <= self.loss_percent < 100:
            raise ProfileError(f"loss_percent must be at least 0 and below 100, got {self.loss_percent}")
        if self.window_bytes is not None and not 0 < self.window_bytes < math.inf:
            raise ProfileError(f"window_bytes must be a positive number, got {self.window_bytes}")

    @property
    def delay_us(self) -> float:
        return self.delay_ms * 1e3

    def serialisation_us(self, num_bytes: int) -> float:
        return num_bytes * 8 / (self.bandwidth_gbps * 1e3)

    def rate_gbps(self, connections: int = 1) -> float:
        """What `connections` carry together: a window each a round trip (twice the delay), up to the bandwidth."""
        if self.window_bytes is None or self.delay_ms == 0:
            return self.bandwidth_gbps
        return min(self.bandwidth_gbps, connections * self.window_bytes * 8 / (2 * self.delay_ms * 1e6))

    @property
    def connections(self) -> int:
        """How many TCP connections fill the link: what is under way in a round trip, a window each."""
        under_way = self.bandwidth_gbps * 1e9 / 8 * 2 * self.delay_ms * 1e-3
        window = min(SURE_WINDOW_BYTES, self.window_bytes or SURE_WINDOW_BYTES)
        return max(1, math.ceil(min(MAX_CONNECTIONS, under_way / window)))  # the quotient may be infinite


# Linux lets a send buffer grow to 4 MiB, and counts the packets' own overhead in it: at 50 ms and 1 Gbit/s one
# connection was seen to keep 2.6 to 3.3 MB under way (scripts/link.py). This is what can be counted on.
SURE_WINDOW_BYTES = 2 << 20
MAX_CONNECTIONS = 16
MAX_DELAY_MS = 3_600_000
PAYLOAD_SHARE = 1448 / 1514  # of a full Ethernet frame that carries TCP with its timestamps

LOOPBACK = Link(delay_ms=0.1, bandwidth_gbps=8.0)


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a run by (from rank, to rank); pairs that are not listed use `default`, if there is one.

    `connections` is how many TCP connections a run opens for each link.
    """

    name: str = "loopback"
    default: Link | None = LOOPBACK
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    connections: int = 1

    def link(self, source: int, target: int) -> Link:
        """Raises `ProfileError` for a pair that the profile does not list and has no default for."""
        link = self.links.get((source, target), self.default)
        if link is None:
            raise self._missing([(source, target)])
        return link

    def rate_gbps(self, source: int, target: int) -> float:
        """What the link carries alone, over its connections."""
        return self.link(source, target).rate_gbps(self.connections)

    def egress_gbps(self, rank: int) -> float:
        """What `rank` can send in all: the fastest of its links, as an interface shaped to that rate would."""
        links = [k for (source, _), k in self.links.items() if source == rank]
        return max((k.bandwidth_gbps for k in [*links, self.default] if k is not None), default=0.0)

    def over(self, connections: int) -> "Network":
        """The same network for a run that opens so many connections a link."""
        return replace(self, connections=connections)

    def over_enough(self) -> "Network":
        """The same network for a run whose connections fill the longest and fattest of its links."""
        links = [*self.links.values(), *([] if self.default is None else [self.default])]
        return self.over(max((link.connections for link in links), default=1))

    def with_links(self, change: Callable[[Link], Link]) -> "Network":
        """The same network, each of its links as `change` makes it."""
        links = {ends: change(link) for ends, link in self.links.items()}
        return replace(self, default=self.default and change(self.default), links=links)

    def for_payload(self) -> "Network":
        """The same network as messages see it where its rates are interfaces': packets' headers take their share."""
        return self.with_links(lambda link: replace(link, bandwidth_gbps=link.bandwidth_gbps * PAYLOAD_SHARE))

    def shared_by(self, count: int) -> "Network":
        """The same network where each rank of it is a machine of `count` ranks, who share what it sends fairly."""

        def less(link: Link) -> Link:
            return replace(link, bandwidth_gbps=link.bandwidth_gbps / count)

        links = {
            (source * count + i, target * count + j): less(link)
            for (source, target), link in self.links.items()
            for i in range(count)
            for j in range(count)
        }
        return replace(self, default=self.default and less(self.default), links=links)

    def check(self, num_ranks: int) -> None:
        """Raise `ProfileError`, naming the pairs, where `num_ranks` ranks need a link that is not there."""
        pairs = permutations(range(num_ranks), 2)
        if missing := [pair for pair in pairs if self.default is None and pair not in self.links]:
            raise self._missing(missing)

    def _missing(self, pairs: list[tuple[int, int]]) -> ProfileError:
        named = ", ".join(f"{source} to {target}" for source, target in pairs[:_NAMED])
        more = f" and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else ""
        return ProfileError(
            f"network {self.name!r} has no link from rank {named}{more}; list every pair as [[link]], use fewer ranks, "
            "or give delay_ms and bandwidth_gbps for all other pairs on top of the profile"
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of several ranks, with fewer `cores` than they would like to have.

    Each message takes a core of the host at either end for `message_us`, and `us_per_mb` for each megabyte. Ranks whose
    computing takes none (it is waited for: a replay) do not `compute`.
    """

    ranks: tuple[int, ...]
    cores: int
    message_us: float = 0.0
    us_per_mb: float = 0.0
    computes: bool = True

    def moving_us(self, num_bytes: int) -> float:
        """Processor time at one end of a message."""
        return self.message_us + self.us_per_mb * num_bytes / 1e6


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sent(Generic[T]):
    """A message that is through: its last bit left at `end_us`, and arrives the link's delay later."""

    target: int
    item: T
    start_us: float
    end_us: float


@dataclass(slots=True)
class _Moving(Generic[T]):
    target: int
    number: int
    item: T
    bits_left: float
    start_us: float | None = None  # when its first bit left
    bits_per_us: float = 0.0
    left_us: float = math.inf  # how long its bits take as the shares are


class Egress(Generic[T]):
    """What one rank sends through one interface. It has no clock: the simulator drives it by predicted time, the
    shaped transport by real time.

        to 1   [ a             ]      [ c
        to 2            (waits)[ b    ]

    First come, first served, as a queue is that takes a whole message at once, which TCP gives it after its first
    round trips; what a link cannot use (its window is small) goes to the next in the queue. Links that are shaped apart
    from the others have a queue of their own; queues share the interface fairly, as the classes of `tc` do.

    `offer` and `complete` are called in order of time, and `complete` before an `offer` that is later than `due_us`.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self._network, self._rank = network, rank
        self._bits_per_us = network.egress_gbps(rank) * 1e3
        self._limits: dict[int, float] = {}
        self._queues: dict[int, int | None] = {}  # None: that of the links which are as the network is in general
        self._numbers = count()
        self._waiting: dict[int, deque[tuple[int, T, int]]] = {}  # by target: number, what, bytes
        self._moving: dict[int, _Moving[T]] = {}  # by target: one a link
        self._settled_us = 0.0
        self._first: _Moving[T] | None = None

    @property
    def due_us(self) -> float | None:
        """When the next message will be through, if no other is offered before; None if there is none."""
        return None if self._first is None else self._settled_us + self._first.left_us

    def offer(self, target: int, item: T, num_bytes: int, now_us: float) -> None:
        """Queue `num_bytes` for `target`."""
        if target not in self._limits:
            self._limits[target] = self._network.rate_gbps(self._rank, target) * 1e3
            apart = self._network.link(self._rank, target) != self._network.default
            self._queues[target] = target if apart else None
            self._waiting[target] = deque()
        self._waiting[target].append((next(self._numbers), item, num_bytes))
        if target not in self._moving:
            self._settle(now_us)
            self._load(target)
            self._share()

    def complete(self) -> Sent[T]:
        """Take out the message that is due, at the moment when it is."""
        moved, due_us = self._first, self.due_us
        assert moved is not None and due_us is not None, "nothing is due"
        assert moved.start_us is not None
        self._settle(due_us)
        del self._moving[moved.target]
        self._load(moved.target)
        self._share()
        return Sent(moved.target, moved.item, moved.start_us, due_us)

    def _load(self, target: int) -> None:
        """Let the next message of a free link have its turn."""
        if self._waiting[target]:
            number, item, num_bytes = self._waiting[target].popleft()
            self._moving[target] = _Moving(target, number, item, num_bytes * 8)

    def _settle(self, now_us: float) -> None:
        """Account for what has moved since the shares last changed."""
        for moving in self._moving.values():
            moving.bits_left -= moving.bits_per_us * (now_us - self._settled_us)
        self._settled_us = now_us

    def _share(self) -> None:
        """Deal the interface out anew: to each queue what it can use at most, what it leaves to those that can more."""
        moving = sorted(self._moving.values(), key=_by_number)
        queues: dict[int | None, list[_Moving[T]]] = {}
        for each in moving:
            queues.setdefault(self._queues[each.target], []).append(each)
        wanted = [(sum([self._limits[m.target] for m in queue]), queue) for queue in queues.values()]
        left = self._bits_per_us
        for served, (limit, queue) in enumerate(sorted(wanted, key=_by_limit)):
            left -= self._serve(queue, min(limit, left / (len(wanted) - served)))
        self._first = min(moving, key=_by_time_left, default=None)

    def _serve(self, queue: Sequence[_Moving[T]], bits_per_us: float) -> float:
        """Deal `bits_per_us` out in order of arrival; returns what was taken of it."""
        left = bits_per_us
        for moving in queue:
            share = min(self._limits[moving.target], left)
            if share > _NOTHING * bits_per_us:
                moving.bits_per_us, left = share, left - share
                moving.left_us = max(0.0, moving.bits_left / share)
                if moving.start_us is None:
                    moving.start_us = self._settled_us
            else:
                moving.bits_per_us, moving.left_us = 0.0, math.inf
        return bits_per_us - left


_by_limit, _by_number, _by_time_left = itemgetter(0), attrgetter("number"), attrgetter("left_us")
_NOTHING = 1e-9  # of a rate: what a subtraction leaves of it
_NAMED = 6  # missing links that an error names
_SHAPE = {"delay_ms", "bandwidth_gbps", "jitter_ms", "loss_percent", "window_bytes"}
_TOP = {"name", "link"} | _SHAPE
_LINK = {"from", "to"} | _SHAPE


def load_network(path: str | Path) -> Network:
    """Read a network profile (TOML).

        name = "two sites"
        delay_ms = 0.1            # one way, between each two ranks not listed below
        bandwidth_gbps = 10       # leave both out where every pair is listed
        window_bytes = 4e6        # TCP's, if it is known to matter; also for the links below that state none
        [[link]]                  # both directions, unless the opposite pair is listed as well
        from = 0
        to = 1
        delay_ms = 50
        bandwidth_gbps = 1

    Raises `ProfileError` naming the file and the key.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))  # some editors begin a file with a mark
        return parse_network(table, default_name=Path(path).stem)
    except FileNotFoundError:
        raise ProfileError(f"network profile {path} does not exist") from None
    except OSError as error:
        raise ProfileError(f"network profile {path} cannot be read: {error.strerror}") from None
    except (ValueError, ProfileError) as error:  # TOML, UTF-8, or a path that no file can have
        raise ProfileError(f"network profile {path}: {error}") from None


def parse_network(table: dict[str, Any], default_name: str) -> Network:
    _only(table, _TOP, "the profile")
    stated = _SHAPE & set(table) - {"window_bytes"}
    default = _link(table, "the profile") if stated or "link" not in table else None
    links: dict[tuple[int, int], Link] = {}
    for row in _rows(table.get("link", [])):
        _only(row, _LINK, "[[link]]")
        ends = (_rank(row, "from"), _rank(row, "to"))
        if ends[0] == ends[1]:
            raise ProfileError(f"[[link]] from {ends[0]} to itself: a link is between two ranks")
        if ends in links:
            raise ProfileError(f"[[link]] from {ends[0]} to {ends[1]} is listed twice")
        links[ends] = _link({"window_bytes": table.get("window_bytes")} | row, f"[[link]] from {ends[0]} to {ends[1]}")
    mirrored = {(b, a): link for (a, b), link in links.items() if (b, a) not in links}
    return Network(str(table.get("name", default_name)), default, links | mirrored)


def _only(table: dict[str, Any], known: set[str], where: str) -> None:
    if unknown := sorted(set(table) - known):
        raise ProfileError(f"unknown key {unknown[0]!r} in {where}; known keys: {', '.join(sorted(known))}")


def _rows(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not all(isinstance(row, dict) for row in value):
        raise ProfileError("links are written as [[link]] in double brackets, one block a link")
    return value


def _number(table: dict[str, Any], key: str, where: str, default: float | None = None) -> float:
    value = table.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ProfileError(f"{where} needs {key}, a number; got {value!r}")
    return float(value)


def _link(table: dict[str, Any], where: str) -> Link:
    window = None if table.get("window_bytes") is None else _number(table, "window_bytes", where)
    return Link(
        delay_ms=_number(table, "delay_ms", where),
        bandwidth_gbps=_number(table, "bandwidth_gbps", where),
        jitter_ms=_number(table, "jitter_ms", where, default=0.0),
        loss_percent=_number(table, "loss_percent", where, default=0.0),
        window_bytes=window,
    )


def _rank(table: dict[str, Any], key: str) -> int:
    value = table.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ProfileError(f"[[link]] needs {key!r}, a rank (0, 1, ...); got {value!r}")
    return value
