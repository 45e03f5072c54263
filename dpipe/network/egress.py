"""What one interface sends, and what it takes in: whose message moves, and how fast."""

import math
from collections.abc import Callable
from typing import TypeVar

from dpipe.network.link import Network
from dpipe.network.shared_rate import Flow, SharedRate

T = TypeVar("T")


class Egress(SharedRate[T]):
    """What the ranks of one machine send through its interface.

        to 1   [ a             ]      [ c
        to 2            (waits)[ b    ]

    Messages are served in order of arrival, as by a queue that takes a whole message at once; so
    TCP fills it after a few round trips. Links with a shape of their own have a queue of their own,
    one for each machine that they lead to; queues share the interface equally, as the classes of
    `tc` do.
    """

    def __init__(
        self,
        network: Network,
        rank: int,
        begun: Callable[[T], None] | None = None,
    ) -> None:
        """`rank` is any rank of the machine; `begun` as of `SharedRate`."""
        bits_per_us = network.egress_gbps(rank) * 1e3
        super().__init__(bits_per_us, begun)
        self._network = network
        # Beside a faster interface, the default link of one machine does not hold up another's.
        stated_gbps = network.interface(rank).egress_gbps or 0.0
        default_gbps = math.inf
        if network.default is not None:
            default_gbps = network.default.bandwidth_gbps
        self._apart = stated_gbps > default_gbps

    def flow(self, source: int, target: int) -> Flow:
        bits_per_us = self._network.rate_gbps(source, target) * 1e3
        link = self._network.link(source, target)
        if link == self._network.default and not self._apart:
            return Flow(bits_per_us, queue=None)
        machine = self._network.interface(target).ranks[0]
        link_bits_per_us = link.bandwidth_gbps * 1e3
        return Flow(bits_per_us, machine, link_bits_per_us)


class Inside(SharedRate[T]):
    """What one rank sends another of its machine: no interface is between them."""

    def __init__(self, network: Network, source: int, target: int) -> None:
        bits_per_us = network.rate_gbps(source, target) * 1e3
        super().__init__(bits_per_us)

    def flow(self, source: int, target: int) -> Flow:
        return Flow(math.inf, queue=None)


class Ingress(SharedRate[T]):
    """What the ranks of one machine take in through its interface, from the first bit of a message
    to its last. Machines that send to it share it equally, as TCP connections do; what comes while
    it is full waits in front of it, and holds up nobody's egress.

        egress of 0   [ a      ]                    ingress of 2: half as fast as their egresses
        egress of 1   [ b      ]
        ingress of 2      [ a, b                           ]
                      `---' delay
    """

    def __init__(self, network: Network, rank: int) -> None:
        """`rank` is any rank of the machine."""
        bits_per_us = network.ingress_gbps(rank) * 1e3
        super().__init__(bits_per_us)
        self._network = network

    def flow(self, source: int, target: int) -> Flow:
        # Bits come no faster than they are sent.
        rate_gbps = self._network.rate_gbps(source, target)
        egress_gbps = self._network.egress_gbps(source)
        bits_per_us = min(rate_gbps, egress_gbps) * 1e3
        machine = self._network.interface(source).ranks[0]
        link = self._network.link(source, target)
        link_bits_per_us = link.bandwidth_gbps * 1e3
        return Flow(bits_per_us, machine, link_bits_per_us)
