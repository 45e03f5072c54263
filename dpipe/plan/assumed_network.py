"""The network that a prediction assumes."""

from typing import Literal

from dpipe.config.load import Config
from dpipe.network.link import Network
from dpipe.network.profile import load_network


def assumed_network(
    profile: str | None, connections: int | Literal["auto"], *, headers: bool = False
) -> Network:
    """What a prediction assumes: the profile, or loopback without one, over a run's TCP connections
    a link.

    With `headers` the profile's rates count those of packets, which messages then do not get.
    """
    network = load_network(profile) if profile else Network()
    if profile and headers:
        network = network.for_payload()
    return network.over_enough() if connections == "auto" else network.over(connections)


def connections_of(config: Config) -> int:
    """How many TCP connections a link of the run has."""
    return assumed_network(config.network_profile, config.transport.connections).connections


def of_config(config: Config, profile: str | None) -> Network:
    return assumed_network(profile, config.transport.connections, headers=config.counts_headers)
