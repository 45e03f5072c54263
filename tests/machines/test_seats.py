"""Seats, rank by rank, as a network, as hosts and as times of stages."""

import math

import pytest

from dpipe.errors import ProfileError
from dpipe.machines.machine import Cluster, LayerTime, Machine
from dpipe.machines.seats import (
    hosts_of,
    network_of,
    seats_in_order,
)
from dpipe.network.link import LOOPBACK, Host, Interface, Link

FAST = Machine(
    "fast",
    devices=2,
    cores=3,
    egress_gbps=2,
    ingress_gbps=1,
    layers=(LayerTime("embedding", 1, 1, 2), LayerTime("block", 1, 10, 20, 12, 8)),
)
SLOW = Machine("slow")
CLUSTER = Cluster((FAST, SLOW), {("fast", "slow"): Link(10, 1), ("slow", "fast"): Link(20, 0.5)})
SEATS = ("fast", "slow", "fast")


def test_ranks_sit_in_the_order_of_the_file() -> None:
    assert seats_in_order(CLUSTER) == ("fast", "fast", "slow")


def test_network_has_the_links_of_machines_by_rank() -> None:
    network = network_of(CLUSTER, SEATS)
    assert network.links == {
        (0, 1): Link(10, 1),
        (2, 1): Link(10, 1),
        (1, 0): Link(20, 0.5),
        (1, 2): Link(20, 0.5),
        (0, 2): LOOPBACK,
        (2, 0): LOOPBACK,
    }
    assert network.interfaces == (Interface((0, 2), 2, 1, "fast"), Interface((1,), machine="slow"))
    network.check(3)


def test_default_link_stays_the_default() -> None:
    cluster = Cluster((Machine("a"), Machine("b")), default_link=Link(1, 2))
    network = network_of(cluster, ("a", "b"))
    assert network.default == Link(1, 2)
    assert network.links == {}


def test_rates_are_those_of_the_interface() -> None:
    network = network_of(CLUSTER, SEATS)
    assert [network.egress_gbps(rank) for rank in range(3)] == [2, 0.5, 2]
    assert [network.ingress_gbps(rank) for rank in range(3)] == [1, math.inf, 1]
    # Loopback, at 8 Gbit/s, does not pass the interface.
    bare = Cluster((Machine("fast", devices=2), SLOW), CLUSTER.links)
    assert network_of(bare, SEATS).egress_gbps(0) == 1


def test_machines_that_cannot_talk_have_no_link() -> None:
    cluster = Cluster((FAST, SLOW))
    with pytest.raises(ProfileError, match="has no link from rank 0 to 1, 1 to 0, 1 to 2, 2 to 1"):
        network_of(cluster, SEATS).check(3)


def test_cores_are_shared_by_the_ranks_of_a_machine() -> None:
    assert hosts_of(CLUSTER, SEATS) == (Host((0, 2), 3),)
    assert hosts_of(CLUSTER, ("fast", "slow")) == ()


@pytest.mark.parametrize("of", [network_of, hosts_of])
def test_seat_that_is_not_there_is_refused(of) -> None:
    with pytest.raises(ProfileError, match="there is no machine 'none'; there are fast, slow"):
        of(CLUSTER, ("fast", "none"))
    with pytest.raises(
        ProfileError, match=r"'slow' holds 1 ranks \(devices = 1\), but 2 are placed on it"
    ):
        of(CLUSTER, ("slow", "slow"))
