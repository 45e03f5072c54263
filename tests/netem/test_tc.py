"""The tc commands of profiles; no test runs them."""

import pytest

from dpipe.errors import ProfileError
from dpipe.network.link import Interface, Link, Network
from netem.tc import egress_commands, ingress_commands, limit_packets, netem, refuse_ingress

ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.0.0.3"]


def lines(network: Network, node: int, addresses=()) -> list[str]:
    return [" ".join(command) for command in egress_commands(network, node, "eth0", addresses)]


def test_link_is_one_netem():
    assert " ".join(netem(Link(1, 5, jitter_ms=0.5, loss_percent=0.1))) == (
        "netem limit 1875 delay 1ms 0.5ms loss 0.1% rate 5gbit"
    )


def test_reordered_packets_overtake_the_delay():
    assert " ".join(netem(Link(1, 5, reorder_percent=0.5))) == (
        "netem limit 1250 delay 1ms reorder 0.5% rate 5gbit"
    )


def test_alike_links_are_one_netem_at_the_root():
    assert lines(Network(default=Link(50, 1)), 0) == [
        "tc qdisc add dev eth0 root handle d1be: netem limit 12500 delay 50ms rate 1gbit"
    ]


def test_links_that_differ_are_classes_by_address():
    network = Network(default=Link(0.1, 10), links={(0, 2): Link(67, 0.79), (2, 0): Link(1, 1)})
    burst = "burst 1250000b cburst 1250000b quantum 60000"
    assert lines(network, 0, ADDRESSES) == [
        "tc qdisc add dev eth0 root handle d1be: htb default f",
        f"tc class add dev eth0 parent d1be: classid d1be:1 htb rate 10gbit ceil 10gbit {burst}",
        "tc class add dev eth0 parent d1be:1 classid d1be:f htb rate 9.26784gbit ceil 10gbit "
        f"{burst}",
        "tc qdisc add dev eth0 parent d1be:f netem limit 1000 delay 0.1ms rate 10gbit",
        "tc class add dev eth0 parent d1be:1 classid d1be:12 htb rate 0.732159gbit ceil 10gbit "
        f"{burst}",
        "tc qdisc add dev eth0 parent d1be:12 netem limit 13233 delay 67ms rate 0.79gbit",
        "tc filter add dev eth0 parent d1be: protocol ip prio 1 u32 match ip dst 10.0.0.3/32 "
        "flowid d1be:12",
    ]


def test_traffic_to_others_is_not_shaped_without_a_default_link():
    network = Network(default=None, links={(0, 1): Link(50, 1), (0, 2): Link(1, 2)})
    commands = lines(network, 0, ADDRESSES)
    assert commands[0] == "tc qdisc add dev eth0 root handle d1be: htb default 0"
    assert [line for line in commands if "classid d1be:f " in line] == []


def test_addresses_change_nothing_if_links_are_alike():
    network = Network(default=Link(5, 2))
    assert lines(network, 1, ADDRESSES) == lines(network, 1)


def test_links_of_other_nodes_do_not_matter():
    network = Network(default=Link(5, 2), links={(0, 1): Link(50, 1), (1, 0): Link(50, 1)})
    assert lines(network, 2) == lines(Network(default=Link(5, 2)), 2)


def test_all_peers_listed_alike_need_no_classes():
    network = Network(default=Link(5, 2), links={(0, 1): Link(50, 1), (0, 2): Link(50, 1)})
    assert len(lines(network, 0, ADDRESSES)) == 1


def test_peers_of_another_family_have_filters_of_their_own():
    network = Network(default=Link(5, 2), links={(0, 1): Link(50, 1)})
    assert lines(network, 0, ["fd00::1", "fd00::2", "fd00::3"])[-1] == (
        "tc filter add dev eth0 parent d1be: protocol ipv6 prio 2 u32 match ip6 dst fd00::2/128 "
        "flowid d1be:11"
    )


@pytest.mark.parametrize(
    ("link", "packets"),
    [
        (Link(0.1, 10), 1000),  # netem's default is the least
        (Link(10, 1), 2500),
        (Link(50, 1), 12_500),
        (Link(50, 1, jitter_ms=50), 25_000),
        (Link(100, 10), 250_000),
    ],
)
def test_limit_is_three_times_the_packets_in_flight(link, packets):
    assert limit_packets(link) == packets


def test_links_that_differ_without_addresses_are_refused():
    network = Network("two sites", Link(5, 2), links={(0, 1): Link(50, 1)})
    with pytest.raises(
        ProfileError,
        match="'two sites' gives node 0 other links to nodes 1: .* address of every node",
    ):
        lines(network, 0)


def test_node_without_an_address_is_refused():
    with pytest.raises(ProfileError, match="node 3 has no address: 3 are given, of nodes 0 to 2"):
        lines(Network(), 3, ADDRESSES)


def test_name_for_an_address_is_refused():
    network = Network(default=Link(5, 2), links={(0, 1): Link(50, 1)})
    with pytest.raises(ProfileError, match="'alpha' is not an IP address"):
        lines(network, 0, ["10.0.0.1", "alpha", "10.0.0.3"])


def test_slow_interface_bounds_the_one_link_of_all_peers():
    network = Network(default=Link(50, 1), interfaces=(Interface((0,), 0.25),))
    assert lines(network, 0) == [
        "tc qdisc add dev eth0 root handle d1be: netem limit 3125 delay 50ms rate 0.25gbit"
    ]


def test_interface_with_room_for_several_links_has_a_class_for_each():
    network = Network(default=Link(50, 1), interfaces=(Interface((0,), 2),))
    commands = lines(network, 0, ADDRESSES)
    assert "classid d1be:1 htb rate 2gbit ceil 2gbit" in commands[1]
    leaves = [line.split("parent ")[1] for line in commands if "netem" in line]
    queue = "netem limit 12500 delay 50ms rate 1gbit"
    assert leaves == [f"d1be:f {queue}", f"d1be:11 {queue}", f"d1be:12 {queue}"]
    with pytest.raises(ProfileError, match="tc tells peers apart by address"):
        lines(network, 0)


def test_interface_of_several_nodes_is_refused():
    network = Network("n", Link(1, 1), interfaces=(Interface((0, 2), machine="a"),))
    with pytest.raises(ProfileError, match="machine 'a' is nodes 0, 2 of network 'n'; tc shapes"):
        lines(network, 0)


def test_ingress_is_one_queue_on_the_last_hop():
    """With room for a round trip of the longest link that leads there."""
    links = {(1, 0): Link(10, 1), (2, 0): Link(50, 1)}
    network = Network("n", Link(1, 1), links, interfaces=(Interface((0,), ingress_gbps=0.5),))
    assert [" ".join(command) for command in ingress_commands(network, 0, "port0")] == [
        "tc qdisc add dev port0 root handle d1be: netem limit 6250 rate 0.5gbit"
    ]
    assert ingress_commands(network, 1, "port1") == []


def test_ingress_of_a_host_of_ones_own_is_refused():
    network = Network("n", Link(1, 1), interfaces=(Interface((0,), ingress_gbps=0.5),))
    refuse_ingress(network, 1)
    with pytest.raises(ProfileError, match="node 0 of network 'n' has ingress_gbps, and tc on its"):
        refuse_ingress(network, 0)
