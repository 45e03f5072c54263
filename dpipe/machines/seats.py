"""Which rank is on which machine, and what a simulation takes of that."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from dpipe.errors import ProfileError
from dpipe.machines.machine import Cluster
from dpipe.network.link import Host, Interface, Link, Network

Seats = Sequence[str]  # by rank, the name of its machine


def seats_in_order(cluster: Cluster, devices_per_seat: int = 1) -> tuple[str, ...]:
    """One rank for each device, in the order of the file; or for as many devices of one machine as
    a tensor-parallel group takes.
    """
    seats: list[str] = []
    for machine in cluster.machines:
        seats += [machine.name] * (machine.devices // devices_per_seat)
    return tuple(seats)


def check_seats(cluster: Cluster, seats: Seats) -> None:
    """Raises `ProfileError` for a machine that is not there, or has fewer devices than ranks."""
    for name, count in Counter(seats).items():
        machine = cluster.machine(name)
        if count > machine.devices:
            raise ProfileError(
                f"machine {name!r} holds {machine.devices} ranks (devices = {machine.devices}), "
                f"but {count} are placed on it"
            )


def network_of(cluster: Cluster, seats: Seats) -> Network:
    """The network between ranks; the default link stays its default. Where two machines have no
    link, their ranks have none: see `Cluster.check_links`. Errors as of `check_seats`.
    """
    check_seats(cluster, seats)
    links: dict[tuple[int, int], Link] = {}
    relayed = set()
    for source, here in enumerate(seats):
        for target, there in enumerate(seats):
            link = cluster.link(here, there)
            # Of hundreds of machines most pairs have the default, which a network holds once.
            if source != target and link is not None and link != cluster.default_link:
                links[source, target] = link
            if (here, there) in cluster.relayed:
                relayed.add((source, target))
    interfaces = []
    for name, ranks in ranks_by_machine(seats).items():
        machine = cluster.machine(name)
        interface = Interface(ranks, machine.egress_gbps, machine.ingress_gbps, name)
        interfaces.append(interface)
    return Network(
        cluster.name,
        cluster.default_link,
        links,
        interfaces=tuple(interfaces),
        relayed=frozenset(relayed),
    )


def message_network_of(cluster: Cluster, seats: Seats) -> Network:
    """As `network_of`, for a simulation. The rates of a file are those of messages, with what loss
    takes of them; its packets are lost once more in a lab alone.
    """
    network = network_of(cluster, seats)
    return network.with_links(Link.with_rate_of_messages)


def hosts_of(cluster: Cluster, seats: Seats) -> tuple[Host, ...]:
    """The machines whose ranks share cores, where it is known how many there are. On a GPU they
    compute without.
    """
    check_seats(cluster, seats)
    hosts = []
    for name, ranks in ranks_by_machine(seats).items():
        machine = cluster.machine(name)
        cores = machine.cores
        # A rank that is alone has been measured with all cores of its machine.
        if len(ranks) > 1 and cores is not None:
            hosts.append(Host(ranks, cores, computes=machine.device.startswith("cpu")))
    return tuple(hosts)


def ranks_by_machine(seats: Seats) -> Mapping[str, tuple[int, ...]]:
    """In the order of the first rank of each."""
    ranks: defaultdict[str, tuple[int, ...]] = defaultdict(tuple)
    for rank, name in enumerate(seats):
        ranks[name] += (rank,)
    return ranks
