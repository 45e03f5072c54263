"""What a rank has sent and has not arrived yet, on a given network, at a given time."""

import heapq
import math
from itertools import count
from typing import Generic, TypeVar

from dpipe.errors import ProfileError
from dpipe.network.egress import Egress
from dpipe.network.link import Network
from dpipe.network.shared_rate import Sent

Item = TypeVar("Item")


class InTransit(Generic[Item]):
    """What one rank has sent and has not arrived: first in its slot, then for the link's delay.

    It has no clock of its own. Called with the time, it gives what has arrived by then, to the
    microsecond as in the simulator.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._egress = Egress[Item](network, rank)
        # A heap by arrival; the number keeps the order of equal times.
        self._flying: list[tuple[float, int, Sent[Item]]] = []
        self._numbers = count()

    def offer(
        self,
        target: int,
        item: Item,
        num_bytes: int,
        now_us: float,
    ) -> None:
        # An egress wants its calls in order of time.
        self._end_slots(now_us)
        self._egress.offer(self._rank, target, item, num_bytes, now_us)

    def arrived(self, now_us: float) -> Sent[Item] | None:
        """Remove and return the next item that has arrived by now; None where there is none."""
        self._end_slots(now_us)
        if self._flying and self._flying[0][0] <= now_us:
            return heapq.heappop(self._flying)[-1]
        return None

    @property
    def due_us(self) -> float:
        """When the next slot ends or the next item arrives; infinite where there is none."""
        due_us = math.inf
        if self._egress.due_us is not None:
            due_us = self._egress.due_us
        if self._flying:
            due_us = min(due_us, self._flying[0][0])
        return due_us

    def _end_slots(self, now_us: float) -> None:
        """Items whose slot has ended by now begin their delay."""
        while (due_us := self._egress.due_us) is not None and due_us <= now_us:
            sent = self._egress.complete()
            link = self._network.link(self._rank, sent.target)
            arrival_us = sent.end_us + link.delay_us
            number = next(self._numbers)
            heapq.heappush(self._flying, (arrival_us, number, sent))


def refuse_what_needs_tc(network: Network) -> None:
    """Raises `ProfileError` where `network` does what nothing here imitates."""
    links = list(network.links.values())
    if network.default is not None:
        links.append(network.default)
    if any(link.jitter_ms or link.loss_percent or link.reorder_percent for link in links):
        raise ProfileError(
            f"network {network.name!r} has jitter, loss or reordering, and the shaped transport "
            "imitates delay and rate alone; take them out of the profile, or shape the "
            "interface itself: python -m netem apply (needs root)"
        )
    for interface in network.interfaces:
        name = interface.machine
        if len(interface.ranks) > 1:
            raise ProfileError(
                f"several ranks share the interface of machine {name!r}, and the shaped transport "
                "slows each rank by itself; give the machine one device, or shape the hosts (netem)"
            )
        if interface.ingress_gbps is not None:
            raise ProfileError(
                f"machine {name!r} has ingress_gbps, and the shaped transport slows what is sent "
                "alone; take it out, or shape the hosts in a lab (python -m netem lab)"
            )
