"""The network between hosts, for what shapes their interfaces."""

from pathlib import Path

from dpipe.machines.file import lists_machines, load_machines
from dpipe.machines.seats import network_of
from dpipe.network.link import Network
from dpipe.network.profile import load_network


def load_hosts_network(path: str | Path) -> Network:
    """A network profile, or a file of machines: each of them is one node, in the order of the file.

    The rates are those of interfaces, which count packet headers. What was measured between
    machines is what messages got, and so it is raised by the headers' share.
    """
    if not lists_machines(path):
        return load_network(path)
    cluster = load_machines(path)
    return network_of(cluster, cluster.names).for_interfaces()
