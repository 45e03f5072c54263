"""A network as a run sees it: one directed link between each two ranks, and each rank's own egress.

A message of n bytes on a link takes n * 8 / bandwidth to put on the wire, then the link's delay to
arrive. What a rank sends to several peers at once shares its egress, because `tc` shapes an
interface and not a peer: one message after another (`Egress`). One TCP connection carries at most a
window a round trip, whatever the bandwidth.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import permutations

from dpipe.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks: one-way delay and its jitter in milliseconds, bandwidth in
    gigabits a second, the share of packets that is lost, in percent, and TCP's window: the bytes
    that a connection has under way at most (None: no limit).
    """

    delay_ms: float
    bandwidth_gbps: float
    jitter_ms: float = 0.0
    loss_percent: float = 0.0
    window_bytes: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.delay_ms < math.inf:
            raise ProfileError(
                f"delay_ms must be a number that is not negative, got {self.delay_ms}"
            )
        if self.delay_ms > MAX_DELAY_MS:
            raise ProfileError(
                f"delay_ms must be at most {MAX_DELAY_MS}, an hour, got {self.delay_ms}"
            )
        if not 0 < self.bandwidth_gbps < math.inf:
            raise ProfileError(
                f"bandwidth_gbps must be a positive number, got {self.bandwidth_gbps}"
            )
        if not 0 <= self.jitter_ms <= self.delay_ms:
            raise ProfileError(
                f"jitter_ms must lie between 0 and delay_ms {self.delay_ms}, got {self.jitter_ms}"
            )
        if not 0 <= self.loss_percent < 100:
            raise ProfileError(
                f"loss_percent must be at least 0 and below 100, got {self.loss_percent}"
            )
        if self.window_bytes is not None and not 0 < self.window_bytes < math.inf:
            raise ProfileError(f"window_bytes must be a positive number, got {self.window_bytes}")

    @property
    def delay_us(self) -> float:
        return self.delay_ms * 1e3

    def serialisation_us(self, num_bytes: int) -> float:
        return num_bytes * 8 / (self.bandwidth_gbps * 1e3)

    def rate_gbps(self, connections: int = 1) -> float:
        """What `connections` carry together: a window each a round trip (twice the delay), up to
        the bandwidth.
        """
        if self.window_bytes is None or self.delay_ms == 0:
            return self.bandwidth_gbps
        return min(
            self.bandwidth_gbps, connections * self.window_bytes * 8 / (2 * self.delay_ms * 1e6)
        )

    @property
    def connections(self) -> int:
        """How many TCP connections fill the link: what is under way in a round trip, a window
        each.
        """
        under_way = self.bandwidth_gbps * 1e9 / 8 * 2 * self.delay_ms * 1e-3
        window = min(SURE_WINDOW_BYTES, self.window_bytes or SURE_WINDOW_BYTES)
        return max(
            1, math.ceil(min(MAX_CONNECTIONS, under_way / window))
        )  # the quotient may be infinite


# Linux lets a send buffer grow to 4 MiB, and counts the packets' own overhead in it: at 50 ms and 1
# Gbit/s one connection was seen to keep 2.6 to 3.3 MB under way (scripts/link.py). This is what can
# be counted on.
SURE_WINDOW_BYTES = 2 << 20
MAX_CONNECTIONS = 16
MAX_DELAY_MS = 3_600_000
PAYLOAD_SHARE = 1448 / 1514  # of a full Ethernet frame that carries TCP with its timestamps

LOOPBACK = Link(delay_ms=0.1, bandwidth_gbps=8.0)


@dataclass(frozen=True, slots=True)
class Network:
    """The links of a run by (from rank, to rank); pairs that are not listed use `default`, if there
    is one.

    `connections` is how many TCP connections a run opens for each link.
    """

    name: str = "loopback"
    default: Link | None = LOOPBACK
    links: dict[tuple[int, int], Link] = field(default_factory=dict)
    connections: int = 1

    def link(self, source: int, target: int) -> Link:
        """Raises `ProfileError` for a pair that the profile does not list and has no default
        for.
        """
        link = self.links.get((source, target), self.default)
        if link is None:
            raise self._missing([(source, target)])
        return link

    def rate_gbps(self, source: int, target: int) -> float:
        """What the link carries alone, over its connections."""
        return self.link(source, target).rate_gbps(self.connections)

    def egress_gbps(self, rank: int) -> float:
        """What `rank` can send in all: the fastest of its links, as an interface shaped to that
        rate would.
        """
        links = [k for (source, _), k in self.links.items() if source == rank]
        return max((k.bandwidth_gbps for k in [*links, self.default] if k is not None), default=0.0)

    def over(self, connections: int) -> "Network":
        """The same network for a run that opens so many connections a link."""
        return replace(self, connections=connections)

    def over_enough(self) -> "Network":
        """The same network for a run whose connections fill the longest and fattest of its
        links.
        """
        links = [*self.links.values(), *([] if self.default is None else [self.default])]
        return self.over(max((link.connections for link in links), default=1))

    def with_links(self, change: Callable[[Link], Link]) -> "Network":
        """The same network, each of its links as `change` makes it."""
        links = {ends: change(link) for ends, link in self.links.items()}
        return replace(self, default=self.default and change(self.default), links=links)

    def for_payload(self) -> "Network":
        """The same network as messages see it where its rates are interfaces': packets' headers
        take their share.
        """
        return self.with_links(
            lambda link: replace(link, bandwidth_gbps=link.bandwidth_gbps * PAYLOAD_SHARE)
        )

    def shared_by(self, count: int) -> "Network":
        """The same network where each rank of it is a machine of `count` ranks, who share what it
        sends fairly.
        """

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
        """Raise `ProfileError`, naming the pairs, where `num_ranks` ranks need a link that is not
        there.
        """
        pairs = permutations(range(num_ranks), 2)
        if missing := [pair for pair in pairs if self.default is None and pair not in self.links]:
            raise self._missing(missing)

    def _missing(self, pairs: list[tuple[int, int]]) -> ProfileError:
        named = ", ".join(f"{source} to {target}" for source, target in pairs[:_NAMED])
        more = f" and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else ""
        return ProfileError(
            f"network {self.name!r} has no link from rank {named}{more}; list every pair as "
            "[[link]], use fewer ranks, "
            "or give delay_ms and bandwidth_gbps for all other pairs on top of the profile"
        )


@dataclass(frozen=True, slots=True)
class Host:
    """A machine of several ranks, with fewer `cores` than they would like to have.

    Each message takes a core of the host at either end for `message_us`, and `us_per_mb` for each
    megabyte. Ranks whose computing takes none (it is waited for: a replay) do not `compute`.
    """

    ranks: tuple[int, ...]
    cores: int
    message_us: float = 0.0
    us_per_mb: float = 0.0
    computes: bool = True

    def moving_us(self, num_bytes: int) -> float:
        """Processor time at one end of a message."""
        return self.message_us + self.us_per_mb * num_bytes / 1e6


_NAMED = 6  # missing links that an error names
