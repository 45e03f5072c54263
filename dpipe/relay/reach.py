"""Who can dial whom, and which way each link takes.

    either end reaches the other   it dials: the lower rank, where both do
    neither does                   both dial the relay, beside the coordinator

Whether an address can be reached is tried, by opening a connection and closing it. All ranks share
what they have found, so that both ends of a link take the same way.
"""

import ipaddress
import socket
import time
from collections.abc import Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field

from dpipe.relay.ends import RelayEnds
from dpipe.wire.schema import Count, Schema, Shape, T

_KNOCK_S = 4.0  # for an address to answer; all are tried at once
_MOST_THREADS = 64

Pair = tuple[int, int]  # ranks, the lower one first


class Knocks(Shape):
    """The ranks that one is to be linked with, and those of them that it could dial."""

    peers: Annotated[list[Count], Field(max_length=4096)]
    reached: Annotated[list[Count], Field(max_length=4096)]


_KNOCKS = Schema[Knocks](Knocks)


class Acquaintance(Protocol):
    """The coordinator, as far as it is asked here."""

    rank: int
    addresses: dict[int, str | None]

    def share(self, key: str, value: Any, timeout_s: float, schema: Schema[T]) -> list[T]: ...


@dataclass(frozen=True)
class Ways:
    """How the links of a run are opened."""

    dials: Mapping[Pair, int]  # which of the two ranks dials the other's address
    relayed: tuple[Pair, ...]

    def routes(
        self, rank: int, addresses: Mapping[int, str | None], here: str, ends: RelayEnds
    ) -> dict[int, str | None]:
        """Where `rank`, which listens at `here`, dials the others; None for one that dials it."""
        routes: dict[int, str | None] = {}
        for pair, dialler in self.dials.items():
            if rank in pair:
                peer = sum(pair) - rank
                routes[peer] = addresses[peer] if dialler == rank else None
        for lower, higher in self.relayed:
            if rank == lower:
                routes[higher] = ends.doorway(higher)
            elif rank == higher:
                ends.listen(lower, here)
                routes[lower] = None
        return routes


def ways_of(coordinator: Acquaintance, peers: Collection[int], timeout_s: float) -> Ways | None:
    """Of all ranks' links, the same on each of them. None where all are on this machine, and nobody
    has to be asked. Raises as `share` of it does.
    """
    if all(map(_is_loopback, coordinator.addresses.values())):
        return None
    # Two private networks may have the same addresses: what this rank would reach there is itself.
    own_address = coordinator.addresses[coordinator.rank]
    theirs = {peer: coordinator.addresses[peer] for peer in peers}
    reached = _knock_at(
        {peer: address for peer, address in theirs.items() if address != own_address}
    )
    own = Knocks(peers=sorted(peers), reached=reached).model_dump()
    return _ways(coordinator.share("links/reached", own, timeout_s + _KNOCK_S, _KNOCKS))


def _ways(knocks: list[Knocks]) -> Ways:
    dials: dict[Pair, int] = {}
    relayed: list[Pair] = []
    for lower, of_lower in enumerate(knocks):
        for higher in sorted(of_lower.peers):
            if not lower < higher < len(knocks):
                continue
            if higher in of_lower.reached:
                dials[lower, higher] = lower
            elif lower in knocks[higher].reached:
                dials[lower, higher] = higher
            else:
                relayed.append((lower, higher))
    return Ways(dials, tuple(relayed))


def _is_loopback(address: str | None) -> bool:
    if address is None:
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _knock_at(addresses: Mapping[int, str | None]) -> list[int]:
    """The ranks whose addresses take a connection."""
    deadline = time.monotonic() + _KNOCK_S
    known = {peer: address for peer, address in addresses.items() if address is not None}
    if not known:
        return []
    with ThreadPoolExecutor(min(len(known), _MOST_THREADS), "dpipe-knock") as pool:
        answers = pool.map(lambda address: _answers(address, deadline), known.values())
        return [peer for peer, answer in zip(known, answers, strict=True) if answer]


def _answers(address: str, deadline: float) -> bool:
    host, _, port = address.rpartition(":")
    left_s = max(0.001, deadline - time.monotonic())
    try:
        socket.create_connection((host.strip("[]"), int(port)), left_s).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True
