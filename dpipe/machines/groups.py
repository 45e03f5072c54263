"""Ranks that were measured as a machine each, put together as a run takes them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpipe.errors import ConfigError
from dpipe.machines.machine import Cluster


@dataclass(frozen=True)
class RankGroups:
    """The ranks of a run in groups of one size."""

    ranks: Cluster  # each as a machine, in their order
    groups: tuple[tuple[str, ...], ...]  # their names

    @classmethod
    def of(cls, measured: Cluster, size: int) -> "RankGroups":
        """Raises `ConfigError` where the host of rank 0 has no group."""
        ranks = one_rank_each(measured)
        groups = groups_of(ranks, size)
        return cls(ranks, groups)

    @property
    def cluster(self) -> Cluster:
        """Each group as a machine."""
        return with_a_machine_each(self.ranks, self.groups)

    @property
    def ungrouped(self) -> list[str]:
        """Those that are in no group."""
        grouped: set[str] = set()
        for group in self.groups:
            grouped.update(group)
        return [name for name in self.ranks.names if name not in grouped]

    def rank_in(self, seats: Sequence[str], name: str) -> int | None:
        """Which rank of a run the one by this name is, where each of `seats` is the first of a
        group; None if its group has no seat.
        """
        for group in self.groups:
            first = group[0]
            if name in group and first in seats:
                place = seats.index(first)
                return place * len(group) + group.index(name)
        return None


def one_rank_each(cluster: Cluster) -> Cluster:
    """Where several ranks are on one host each has one device, and its part of main memory."""
    hosts = [machine.host for machine in cluster.machines]
    machines = []
    for machine in cluster.machines:
        memory_gb = machine.memory_gb
        host = machine.host
        shared = machine.device == "cpu" and host is not None
        if shared and memory_gb is not None:
            memory_gb /= hosts.count(host)
        machines.append(replace(machine, devices=1, memory_gb=memory_gb))
    return replace(cluster, machines=tuple(machines))


def groups_of(cluster: Cluster, size: int) -> tuple[tuple[str, ...], ...]:
    """The names of `size` ranks of one host each, in the order of ranks; ranks that are left over
    are in none. Raises `ConfigError` where the host of rank 0 has too few.
    """
    of_hosts: dict[str, list[str]] = {}
    for machine in cluster.machines:
        # One that nobody can reach is by itself.
        host = machine.host or machine.name
        names = of_hosts.setdefault(host, [])
        names.append(machine.name)
    groups = []
    for names in of_hosts.values():
        left = len(names) % size
        whole = len(names) - left
        for first in range(0, whole, size):
            group = names[first : first + size]
            groups.append(tuple(group))
    of_rank_0 = next(iter(of_hosts.values()))
    if len(of_rank_0) < size:
        raise ConfigError(
            f"the host of rank 0 has {len(of_rank_0)} ranks, but tensor_parallel.size is {size}: "
            "start so many on each host, or leave it out"
        )
    return tuple(groups)


def with_a_machine_each(cluster: Cluster, groups: Sequence[Sequence[str]]) -> Cluster:
    """Each group as a machine with so many devices, by the name and the links of its first rank."""
    machines = []
    for group in groups:
        first = cluster.machine(group[0])
        size = len(group)
        machines.append(replace(first, devices=size))
    names = {machine.name for machine in machines}
    links = {}
    for ends, link in cluster.links.items():
        if names.issuperset(ends):
            links[ends] = link
    return replace(cluster, machines=tuple(machines), links=links)
