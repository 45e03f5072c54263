"""A node's share of a network profile, as `tc` commands. Pure: nothing is run here.

    all links alike:                 links that differ by peer:

    device ── netem                  device ── htb ── :1 the interface, at the fastest link's rate
                                                       ├── :f   netem   addresses of no peer
                                                       ├── :10  netem   node 0
                                                       └── :12  netem   node 2

What leaves the node is shaped, what arrives is not: each direction of a link is shaped once, by its
sender. A node's links share its egress: `tc` shapes an interface, not a peer. Its ingress, where
one is stated, is shaped on the last hop towards it, by whoever sends there (`ingress_commands`).
"""

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import replace

from dpipe.errors import ProfileError
from dpipe.network.link import Link, Network

Argv = list[str]

HANDLE = "d1be:"  # tells our qdisc from others
NETEM_DEFAULT_LIMIT = 1000
FULL_PACKET_BYTES = 1500
_FIRST_PEER = 0x10
_OTHERS = 0xF


def egress_commands(
    network: Network, node: int, device: str, addresses: Sequence[str] = ()
) -> list[Argv]:
    """The commands that shape `device` as the interface of `node`; `addresses[i]` is the IP address
    of node i.

    Raises `ProfileError` if the node's links differ and no addresses are given to tell them apart,
    or if the interface is that of several nodes.
    """
    interface = network.interface(node)
    if len(interface.ranks) > 1:
        raise ProfileError(
            f"machine {interface.machine!r} is nodes {', '.join(map(str, interface.ranks))} of "
            f"network {network.name!r}; tc shapes an interface: make each machine one node"
        )
    peers = {peer: network.link(node, peer) for peer in _peers(network, node, addresses)}
    others = {network.default} if network.default and not addresses else set()
    links = set(peers.values()) | others
    # One link takes all that a slower interface sends; a faster one needs a class for each.
    fastest_gbps = max(link.bandwidth_gbps for link in links)
    egress_gbps = interface.egress_gbps or fastest_gbps
    if len(links) == 1 and egress_gbps <= fastest_gbps:
        return [_root_netem(device, replace(links.pop(), bandwidth_gbps=egress_gbps))]
    if not addresses:
        raise ProfileError(
            f"profile {network.name!r} gives node {node} other links to nodes "
            f"{', '.join(map(str, peers))}: "
            f"tc tells peers apart by address; give the address of every node"
        )
    by_address = {addresses[peer]: (peer, link) for peer, link in peers.items()}
    return _classes(device, network.default, by_address, interface.egress_gbps)


def ingress_commands(network: Network, node: int, device: str) -> list[Argv]:
    """The commands that shape what leaves `device` towards the interface of `node`: the last hop,
    on whatever sends to that machine alone, such as the port of a lab's router. None where only
    links bound what comes in.
    """
    ingress_gbps = network.ingress_gbps(node)
    if math.isinf(ingress_gbps):
        return []
    sources = [source for source, target in network.links if target == node]
    delays_ms = [network.link(source, node).delay_ms for source in sources]
    if network.default is not None:
        delays_ms.append(network.default.delay_ms)
    # Room for a round trip, as in front of any bottleneck; the delay itself is the senders'.
    limit = limit_packets(Link(max(delays_ms, default=0.0), ingress_gbps))
    queue = ["netem", "limit", str(limit), "rate", _rate(ingress_gbps)]
    return [["tc", "qdisc", "add", "dev", device, "root", "handle", HANDLE, *queue]]


def refuse_ingress(network: Network, node: int) -> None:
    """Raises `ProfileError` where what comes in is bounded: a host's own `tc` shapes what leaves
    it.
    """
    if not math.isinf(network.ingress_gbps(node)):
        raise ProfileError(
            f"node {node} of network {network.name!r} has ingress_gbps, and tc on its own "
            "interface shapes what it sends; take it out, or rebuild the network in a lab "
            "(python -m netem lab), whose router shapes the last hop"
        )


def _root_netem(device: str, link: Link) -> Argv:
    return ["tc", "qdisc", "add", "dev", device, "root", "handle", HANDLE, *netem(link)]


def clear_command(device: str) -> Argv:
    return ["tc", "qdisc", "del", "dev", device, "root"]


def netem(link: Link) -> Argv:
    """`netem limit 12500 delay 50ms loss 1% rate 1gbit`: one direction of one link. Packets that
    are reordered leave at once, before those that wait.
    """
    jitter = [f"{link.jitter_ms:g}ms"] if link.jitter_ms else []
    loss = ["loss", f"{link.loss_percent:g}%"] if link.loss_percent else []
    reorder = ["reorder", f"{link.reorder_percent:g}%"] if link.reorder_percent else []
    delay = ["delay", f"{link.delay_ms:g}ms", *jitter, *reorder]
    return [
        "netem",
        "limit",
        str(limit_packets(link)),
        *delay,
        *loss,
        "rate",
        _rate(link.bandwidth_gbps),
    ]


def limit_packets(link: Link) -> int:
    """Packets of full size that netem may hold: those in flight, and a queue of one round trip."""
    one_way_bytes = link.bandwidth_gbps * 1e9 / 8 * (link.delay_ms + link.jitter_ms) * 1e-3
    return max(NETEM_DEFAULT_LIMIT, math.ceil(3 * one_way_bytes / FULL_PACKET_BYTES))


def _peers(network: Network, node: int, addresses: Sequence[str]) -> list[int]:
    if not addresses:
        return sorted(target for source, target in network.links if source == node)
    if node >= len(addresses):
        raise ProfileError(
            f"node {node} has no address: {len(addresses)} are given, of nodes 0 to "
            f"{len(addresses) - 1}"
        )
    return [peer for peer in range(len(addresses)) if peer != node]


def _classes(
    device: str,
    default: Link | None,
    peers: dict[str, tuple[int, Link]],
    stated_gbps: float | None,
) -> list[Argv]:
    """A class for each peer whose link is not `default`, or whose interface has room for several
    of these. Other traffic is shaped as `default`, or not at all (class 0).
    """
    roomy = default is not None and (stated_gbps or 0.0) > default.bandwidth_gbps
    apart = {}
    for address, (peer, link) in peers.items():
        if link != default or roomy:
            apart[address] = (peer, link)
    leaves = {_OTHERS: default} if default else {}
    leaves |= {_FIRST_PEER + peer: link for peer, link in apart.values()}
    egress = stated_gbps or max(link.bandwidth_gbps for link in leaves.values())
    together = sum(link.bandwidth_gbps for link in leaves.values())
    commands = [
        [
            "tc",
            "qdisc",
            "add",
            "dev",
            device,
            "root",
            "handle",
            HANDLE,
            "htb",
            "default",
            f"{_OTHERS:x}" if default else "0",
        ],
        _htb_class(device, HANDLE, 1, egress, egress),
    ]
    for minor, link in leaves.items():
        # The guaranteed rates must add up to the interface's: htb lets a class below its own rate
        # send at once.
        share = egress * link.bandwidth_gbps / together
        commands.append(_htb_class(device, f"{HANDLE}1", minor, share, egress))
        commands.append(
            ["tc", "qdisc", "add", "dev", device, "parent", f"{HANDLE}{minor:x}", *netem(link)]
        )
    return commands + [
        _filter(device, address, _FIRST_PEER + peer) for address, (peer, _) in apart.items()
    ]


def _htb_class(device: str, parent: str, minor: int, rate_gbps: float, ceil_gbps: float) -> Argv:
    # A burst of a millisecond, and of one coalesced packet at least: a late timer must be able to
    # catch up.
    burst = f"{max(65536, round(ceil_gbps * 1e9 / 8 * 1e-3))}b"
    rates = [
        "rate",
        _rate(rate_gbps),
        "ceil",
        _rate(ceil_gbps),
        "burst",
        burst,
        "cburst",
        burst,
        "quantum",
        "60000",
    ]
    return [
        "tc",
        "class",
        "add",
        "dev",
        device,
        "parent",
        parent,
        "classid",
        f"{HANDLE}{minor:x}",
        "htb",
        *rates,
    ]


def _filter(device: str, address: str, minor: int) -> Argv:
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        raise ProfileError(
            f"{address!r} is not an IP address; tc cannot tell peers apart by name"
        ) from None
    # All filters of one priority must have one protocol.
    protocol, word, bits, priority = (
        ("ip", "ip", 32, "1") if version == 4 else ("ipv6", "ip6", 128, "2")
    )
    match = ["u32", "match", word, "dst", f"{address}/{bits}", "flowid", f"{HANDLE}{minor:x}"]
    return [
        "tc",
        "filter",
        "add",
        "dev",
        device,
        "parent",
        HANDLE,
        "protocol",
        protocol,
        "prio",
        priority,
        *match,
    ]


def _rate(gbps: float) -> str:
    return f"{gbps:g}gbit"
