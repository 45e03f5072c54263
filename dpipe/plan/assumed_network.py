"""The network that a prediction assumes. No torch."""

import math
from dataclasses import replace
from typing import Literal

from dpipe.config.load import Config
from dpipe.machines.file import lists_machines, load_machines
from dpipe.machines.seats import Seats, message_network_of, seats_in_order
from dpipe.network.link import Network
from dpipe.network.profile import load_network
from dpipe.transport.kinds import TRANSPORTS


def configured_network(config: Config, profile: str | None) -> Network:
    """The network of `profile`, or loopback without one, as the run's connections use it."""
    return assumed_network(
        profile,
        config.transport.connections,
        headers=config.counts_headers,
        devices_per_seat=config.ranks_per_machine,
        seats=config.predict.seats,
        outruns_loss=losses_are_outrun(config),
    )


def losses_are_outrun(config: Config) -> bool:
    """Whether packets that are lost at random do not make the windows of a run's links small."""
    transport = config.transport
    takes_bbr = transport.congestion_control in ("auto", "bbr")
    return takes_bbr and TRANSPORTS[transport.kind].sets_congestion_control


def assumed_network(
    profile: str | None,
    connections: int | Literal["auto"],
    *,
    headers: bool = False,
    devices_per_seat: int = 1,
    seats: Seats = (),
    outruns_loss: bool = False,
) -> Network:
    """The network of `profile`, or loopback without one, with `connections` TCP connections a link.

    With `headers` the profile's rates include packet headers, so messages get less than these. A
    `machines.toml` may stand for a profile: its ranks sit on `seats`, or in the order of the file,
    and its rates are those of messages, as they are measured. `outruns_loss` is its own.
    """
    if profile and lists_machines(profile):
        cluster = load_machines(profile)
        network = message_network_of(cluster, seats or seats_in_order(cluster, devices_per_seat))
    else:
        network = load_network(profile) if profile else Network()
        if profile and headers:
            network = network.for_payload()
    network = replace(network, outruns_loss=outruns_loss)
    return network.over_enough() if connections == "auto" else network.over(connections)


def connections_of(config: Config) -> int:
    """How many TCP connections a link of the run has."""
    return configured_network(config, config.network_profile).connections


def leaves_all_to_one(config: Config) -> bool:
    """Whether one of them carries everything while it outruns losses. As many as somebody asked for
    are used.
    """
    network = configured_network(config, config.network_profile)
    return config.transport.connections == "auto" and network.one_will_do


def uplink_bytes_per_s(config: Config, rank: int) -> float:
    """What all links of `rank` share, if the configuration says so and a message has a connection
    of dpipe's own to itself; infinite where not, and where dpipe itself imitates a slow network.
    """
    transport = config.transport
    is_known = config.network_profile is not None and transport.shape is None
    if not is_known or not TRANSPORTS[transport.kind].sets_congestion_control:
        return math.inf
    network = configured_network(config, config.network_profile)
    has_one = network.connections == 1 or leaves_all_to_one(config)
    uplink_gbps = network.uplink_gbps(rank)
    if uplink_gbps is None or not has_one:
        return math.inf
    return uplink_gbps * 1e9 / 8
