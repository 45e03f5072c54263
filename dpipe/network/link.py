"""A network as a run sees it: a directed link between any two ranks, and the interfaces of the
machines that they are on.

A message of n bytes takes n * 8 / bandwidth to put on the wire, and then the link's delay to
arrive. What a machine sends to several peers at once shares its egress, one message after another
(`Egress`), because `tc` shapes an interface and not a peer; what several send to it shares its
ingress (`Ingress`). One TCP connection carries at most one window a round trip, whatever the
bandwidth, and loss keeps that window small.
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import permutations, product

from dpipe.errors import ProfileError


@dataclass(frozen=True, slots=True)
class Link:
    """One direction between two ranks."""

    delay_ms: float  # one way
    bandwidth_gbps: float
    jitter_ms: float = 0.0  # of the delay
    loss_percent: float = 0.0  # of the packets
    window_bytes: float | None = None  # most bytes in flight on a TCP connection; None: no limit
    reorder_percent: float = 0.0  # of the packets: they overtake those that wait for the delay

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
        if not 0 <= self.reorder_percent < 100:
            raise ProfileError(
                f"reorder_percent must be at least 0 and below 100, got {self.reorder_percent}"
            )

    @property
    def delay_us(self) -> float:
        return self.delay_ms * 1e3

    def rate_gbps(self, connections: int = 1, *, outruns_loss: bool = False) -> float:
        """What `connections` carry together: each one window a round trip, which is twice the
        delay, up to the bandwidth. Loss makes windows small unless they `outrun` it.
        """
        window_bytes = self.window_bytes or math.inf
        if not outruns_loss:
            window_bytes = min(window_bytes, self.loss_window_bytes)
        if math.isinf(window_bytes) or self.delay_ms == 0:
            return self.bandwidth_gbps
        # A window goes out and is acknowledged: there and back takes twice the delay.
        windows_gbps = connections * window_bytes * 8 / (2 * self.delay_ms * 1e6)
        return min(self.bandwidth_gbps, windows_gbps)

    @property
    def loss_window_bytes(self) -> float:
        """What a connection keeps in flight on average where packets are lost at random; infinite
        without loss.

        A loss cuts the window, which then grows again. Reno's is 1.22 / sqrt(loss) packets (Mathis
        et al. 1997). CUBIC, which Linux uses, grows by time: 1.054 (round trip / loss) ^ 3/4, and
        never less than Reno's (RFC 9438, section 5). Both without delayed acknowledgements and
        timeouts, so that a real connection has rather less.
        """
        loss = self.loss_percent / 100
        if loss == 0:
            return math.inf
        reno = math.sqrt(1.5 / loss)
        cubic = 1.054 * math.pow(2 * self.delay_ms * 1e-3 / loss, 0.75)
        return max(reno, cubic) * SEGMENT_BYTES

    def with_rate_of_messages(self) -> "Link":
        """The same link where `bandwidth_gbps` is what messages got in spite of the loss: no more
        of it than lets the most connections carry that much, or the loss would count twice.
        """
        bytes_per_s = self.bandwidth_gbps * 1e9 / 8
        in_flight = bytes_per_s * 2 * self.delay_ms * 1e-3
        packets = in_flight / MAX_CONNECTIONS / SEGMENT_BYTES
        if self.loss_percent == 0 or packets == 0:
            return self
        # `loss_window_bytes` solved for the loss.
        reno = 1.5 / packets**2
        cubic = 2 * self.delay_ms * 1e-3 / math.pow(packets / 1.054, 4 / 3)
        most_percent = 100 * max(reno, cubic)
        return replace(self, loss_percent=min(self.loss_percent, most_percent))

    def late_us(self, num_bytes: int) -> float:
        """How much later than the delay a message is whole because of jitter, on average.

        Packets stay in order behind the latest of them: of n delays that are even over the delay
        plus or minus the jitter, the longest is jitter (n - 1) / (n + 1) above the middle.
        """
        packets = max(1, math.ceil(num_bytes / SEGMENT_BYTES))
        return self.jitter_ms * 1e3 * (packets - 1) / (packets + 1)

    def recovery(self, num_bytes: int, rate_gbps: float) -> "Recovery":
        """How likely loss delays a message that is sent at `rate_gbps`, and by how much.

        A packet that is lost is sent again when those behind it have been acknowledged, a quarter
        of a round trip later than reordering would explain (RACK: RFC 8985). A message that takes
        longer than a round trip queues behind itself, at most another round trip's bytes (BBR lets
        twice the path's be in flight). Of what came earlier the rest of the message hides it.
        """
        loss = self.loss_percent / 100
        if loss == 0:
            return Recovery(0.0, 0.0)
        round_trip_us = 2 * (self.delay_us + self.late_us(num_bytes))
        own_us = num_bytes * 8 / (rate_gbps * 1e3)
        queued_us = max(0.0, own_us - round_trip_us)
        loaded_us = round_trip_us + min(queued_us, round_trip_us)
        in_flight = rate_gbps * 1e3 * loaded_us / 8
        packets = math.ceil(min(num_bytes, in_flight) / SEGMENT_BYTES)
        chance = 1 - math.pow(1 - loss, packets)
        return Recovery(chance, _NOTICED * loaded_us)

    @property
    def connections(self) -> int:
        """How many TCP connections fill the link: what is in flight in a round trip, by windows."""
        bytes_per_s = self.bandwidth_gbps * 1e9 / 8
        in_flight = bytes_per_s * 2 * self.delay_ms * 1e-3
        window = min(
            SURE_WINDOW_BYTES,
            self.window_bytes or SURE_WINDOW_BYTES,
            self.loss_window_bytes,
        )
        # The quotient may be infinite.
        return max(1, math.ceil(min(MAX_CONNECTIONS, in_flight / window)))


# Linux lets a send buffer grow to 4 MiB, including the packets' overhead: at 50 ms and 1 Gbit/s one
# connection kept 2.6 to 3.3 MB in flight (scripts/link.py). This much can be relied on.
SURE_WINDOW_BYTES = 2 << 20
MAX_CONNECTIONS = 16
# Percent of packets: where more are lost, or some overtake others, one connection stalls too often.
_FEW_LOSSES = 0.5
_FEW_CONNECTIONS = 4  # that a lossy link needs at most where a loss does not make windows small
_AS_MEASURED = 0.95  # of a rate: one that was measured to be as much
_NOTICED = 1.25  # round trips until a lost packet is sent again
MAX_DELAY_MS = 3_600_000  # an hour
SEGMENT_BYTES = 1448  # that a full packet carries
PAYLOAD_SHARE = (
    SEGMENT_BYTES / 1514
)  # of a full Ethernet frame that carries TCP with its timestamps

LOOPBACK = Link(delay_ms=0.1, bandwidth_gbps=8.0)


@dataclass(frozen=True, slots=True)
class Recovery:
    """Of a message some of whose packets may be lost."""

    chance: float  # that it is late
    late_us: float  # then

    @property
    def mean_us(self) -> float:
        return self.chance * self.late_us


@dataclass(frozen=True, slots=True)
class Interface:
    """What the ranks of one machine send and receive through, all together. Messages between them
    do not pass it.
    """

    ranks: tuple[int, ...]
    egress_gbps: float | None = None  # None: as much as the fastest of its links
    ingress_gbps: float | None = None  # None: only links bound what comes in
    machine: str = ""  # its name, for messages

    def __post_init__(self) -> None:
        for key in ("egress_gbps", "ingress_gbps"):
            value = getattr(self, key)
            if value is not None and not 0 < value < math.inf:
                raise ProfileError(f"{key} must be a positive number, got {value}")

    def scaled(self, by: float) -> "Interface":
        """The same with `by` times the rates that it states."""
        egress_gbps = None if self.egress_gbps is None else self.egress_gbps * by
        ingress_gbps = None if self.ingress_gbps is None else self.ingress_gbps * by
        return replace(self, egress_gbps=egress_gbps, ingress_gbps=ingress_gbps)


@dataclass(frozen=True)
class Network:
    """The links of a run, and the interfaces that their ends share."""

    name: str = "loopback"
    default: Link | None = LOOPBACK  # of pairs that `links` does not have; None: there is no link
    links: dict[tuple[int, int], Link] = field(default_factory=dict)  # by (from rank, to rank)
    connections: int = 1  # TCP connections that a run opens for each link
    interfaces: tuple[Interface, ...] = ()  # a rank that is in none has one to itself
    relayed: frozenset[tuple[int, int]] = frozenset()  # links that rank 0's machine passes on
    # Whether windows stay large where packets are lost at random, as BBR's do.
    outruns_loss: bool = False
    seed: int | None = None  # losses are drawn; None: each message is late by the mean

    def link(self, source: int, target: int) -> Link:
        """Raises `ProfileError` for a pair that is not listed, if there is no default."""
        link = self.links.get((source, target), self.default)
        if link is None:
            raise self._missing([(source, target)])
        return link

    def rate_gbps(self, source: int, target: int) -> float:
        """What the link carries over its connections, with nothing beside it."""
        return self._rate_of(self.link(source, target))

    def _rate_of(self, link: Link) -> float:
        return link.rate_gbps(self.connections, outruns_loss=self.outruns_loss)

    def delay_us(self, source: int, target: int, num_bytes: int) -> float:
        """How long after it has left a message is there: the link's delay, and what jitter and loss
        add. Packets out of order add nothing: TCP holds the early ones.

        Where losses are drawn, each call is another message.
        """
        link = self.link(source, target)
        recovery = link.recovery(num_bytes, self.rate_gbps(source, target))
        late_us = recovery.mean_us
        if self._draws is not None:
            is_late = self._draws.random() < recovery.chance
            late_us = recovery.late_us if is_late else 0.0
        return link.delay_us + link.late_us(num_bytes) + late_us

    @cached_property
    def _draws(self) -> random.Random | None:
        return None if self.seed is None else random.Random(self.seed)

    @property
    def loses(self) -> bool:
        """Whether a link loses packets."""
        default = [] if self.default is None else [self.default]
        return any(link.loss_percent for link in (*default, *self.links.values()))

    def drawn(self, seed: int) -> "Network":
        """The same network, on which some messages are late by a loss and others are not."""
        return replace(self, seed=seed)

    def interface(self, rank: int) -> Interface:
        """What `rank` sends and receives through."""
        if rank not in self._interfaces:
            self._interfaces[rank] = Interface((rank,))
        return self._interfaces[rank]

    def share_machine(self, rank: int, other: int) -> bool:
        """Whether what they send each other passes no interface."""
        return other in self.interface(rank).ranks

    def egress_gbps(self, rank: int) -> float:
        """What the interface of `rank` sends in all: where it is not said, as much as its fastest
        link, like one that is shaped to that rate.
        """
        interface = self.interface(rank)
        if interface.egress_gbps is not None:
            return interface.egress_gbps
        rates = [self._fastest_gbps.get(rank, 0.0) for rank in interface.ranks]
        if self.default is not None:
            rates.append(self.default.bandwidth_gbps)
        return max(rates)

    def uplink_gbps(self, rank: int) -> float | None:
        """What the links of `rank` share, where each of them by itself carries all that its
        interface sends; None where one carries less, or other ranks send by it as well.
        """
        interface = self.interface(rank)
        targets = [target for source, target in self.links if source == rank]
        links = [self.links[rank, target] for target in targets]
        if self.default is not None:
            links.append(self.default)
        if len(interface.ranks) > 1 or not links:
            return None
        egress_gbps = self.egress_gbps(rank)
        carried = [self._rate_of(link) for link in links]
        return egress_gbps if min(carried) >= _AS_MEASURED * egress_gbps else None

    def ingress_gbps(self, rank: int) -> float:
        """What the interface of `rank` takes in from all; infinite where its links alone bound
        it.
        """
        ingress_gbps = self.interface(rank).ingress_gbps
        return math.inf if ingress_gbps is None else ingress_gbps

    @cached_property
    def _interfaces(self) -> dict[int, Interface]:
        """By rank."""
        by_rank: dict[int, Interface] = {}
        for interface in self.interfaces:
            by_rank |= dict.fromkeys(interface.ranks, interface)
        return by_rank

    @cached_property
    def _fastest_gbps(self) -> Mapping[int, float]:
        """By rank, the fastest of the links that are listed and leave its interface."""
        fastest: dict[int, float] = {}
        for (source, target), link in self.links.items():
            if not self.share_machine(source, target):
                fastest[source] = max(fastest.get(source, 0.0), link.bandwidth_gbps)
        return fastest

    def over(self, connections: int) -> "Network":
        """The same network for a run that opens `connections` TCP connections a link."""
        return replace(self, connections=connections)

    def over_enough(self) -> "Network":
        """The same network for a run with enough connections to fill any of its links."""
        links = [*self.links.values()]
        if self.default is not None:
            links.append(self.default)
        return self.over(max(map(self._enough, links), default=1))

    def _enough(self, link: Link) -> int:
        if not self.outruns_loss or link.loss_percent == 0:
            return link.connections
        # Pieces on several connections do not wait for what another one has lost. On many each
        # sends too little at a time.
        whole = replace(link, loss_percent=0.0).connections
        return max(whole, min(link.connections, _FEW_CONNECTIONS))

    @property
    def one_will_do(self) -> bool:
        """Whether every link loses packets, and a connection that outruns that carries more by
        itself than beside others: of several that send now and then BBR learns for each a rate that
        is too low.
        """
        links = [*self.links.values()]
        if self.default is not None:
            links.append(self.default)
        return self.outruns_loss and all(map(_one_outruns_loss, links))

    def with_links(self, change: Callable[[Link], Link]) -> "Network":
        """The same network with every link replaced by `change(link)`."""
        links = {ends: change(link) for ends, link in self.links.items()}
        default = None if self.default is None else change(self.default)
        return replace(self, default=default, links=links)

    def for_payload(self) -> "Network":
        """The same network for messages, if its rates are those of interfaces: the headers of
        packets take a share.
        """
        return self._scaled(PAYLOAD_SHARE)

    def for_interfaces(self) -> "Network":
        """The same network for interfaces, if its rates are those of messages."""
        return self._scaled(1 / PAYLOAD_SHARE)

    def _scaled(self, by: float) -> "Network":
        network = self.with_links(
            lambda link: replace(link, bandwidth_gbps=link.bandwidth_gbps * by)
        )
        interfaces = tuple(interface.scaled(by) for interface in self.interfaces)
        return replace(network, interfaces=interfaces)

    def shared_by(self, count: int) -> "Network":
        """Replace each node by `count` ranks that share its bandwidth equally.

        Raises `ProfileError` for interfaces that several nodes share, or that say what they carry.
        """
        if count == 1:
            return self
        if self.interfaces:
            raise ProfileError(
                f"network {self.name!r} has interfaces of their own rate; it cannot be shared out "
                "over the ranks of tensor-parallel groups"
            )

        def share_of(link: Link) -> Link:
            return replace(link, bandwidth_gbps=link.bandwidth_gbps / count)

        links: dict[tuple[int, int], Link] = {}
        for (source, target), link in self.links.items():
            # Each of the one node's ranks to each of the other's; ranks of a node have no link
            # here, and get the default.
            for i, j in product(range(count), repeat=2):
                links[source * count + i, target * count + j] = share_of(link)
        default = None if self.default is None else share_of(self.default)
        return replace(self, default=default, links=links)

    def check(self, num_ranks: int) -> None:
        """Raises `ProfileError`, naming the pairs, if a link between two of `num_ranks` ranks is
        missing.
        """
        if self.default is not None:
            return
        pairs = permutations(range(num_ranks), 2)
        missing = [pair for pair in pairs if pair not in self.links]
        if missing:
            raise self._missing(missing)

    def _missing(self, pairs: list[tuple[int, int]]) -> ProfileError:
        named = ", ".join(f"{source} to {target}" for source, target in pairs[:_NAMED])
        more = f" and {len(pairs) - _NAMED} more" if len(pairs) > _NAMED else ""
        return ProfileError(
            f"network {self.name!r} has no link from rank {named}{more}; list every pair as "
            "[[link]], use fewer ranks, or give delay_ms and bandwidth_gbps for all other pairs on "
            "top of the profile"
        )


@dataclass(frozen=True, slots=True)
class Host:
    """Cores that ranks share with each other and with their messages: a machine's, or those that
    the ranks are pinned to.
    """

    ranks: tuple[int, ...]
    cores: float  # 0.5: a rank that gets half of one
    threads: int = 1  # that a rank computes with, each on a core
    message_us: float = 0.0  # of a core, at either end of each message
    us_per_mb: float = 0.0  # the same, for each megabyte
    computes: bool = True  # False: computing takes no core, as in a replay, which waits

    def bytes_us(self, num_bytes: int) -> float:
        """Processor time of a message's bytes at one end."""
        return self.us_per_mb * num_bytes / 1e6


_NAMED = 6  # missing links that an error names


def _one_outruns_loss(link: Link) -> bool:
    is_seldom = 0 < link.loss_percent <= _FEW_LOSSES and link.reorder_percent == 0
    return is_seldom and replace(link, loss_percent=0.0).connections == 1
