"""The machines as arrays that a search can index."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

import numpy as np
import numpy.typing as npt

from dpipe.config.load import Config
from dpipe.machines.machine import Cluster, Machine
from dpipe.network.link import Link

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

_GIGA = 1e9


@dataclass(frozen=True)
class Units:
    """What can hold a stage: a device of a machine, or a tensor-parallel group of its devices."""

    machine: Ints  # by unit, its place in the file
    kind: Ints  # machines of one kind compute alike
    memory_bytes: Floats  # of a device
    egress_gbps: Floats  # of its machine
    ingress_gbps: Floats
    gbps: Floats  # [from, to]; 0 where there is no link
    delay_s: Floats  # [from, to]; infinite where there is none
    relayed: Bools  # [from, to]; by the machine of the first seat
    price: Floats  # of its machine, an hour
    cores: Floats  # of its machine, for all ranks on it; infinite where computing takes none
    num_machines: int

    def __len__(self) -> int:
        return len(self.machine)

    @cached_property
    def gbps_apart(self) -> Floats:
        """As `gbps`, with no bound of a unit by itself: flat, by source * units + target."""
        gbps = self.gbps.copy()
        np.fill_diagonal(gbps, np.inf)
        return gbps.ravel()

    def gbit_s(self, replicas: int) -> Floats:
        """Seconds a Gbit takes while each of `replicas` units sends as much to all others, and gets
        as much: over the link, or through an interface that all of them share. Nothing of a unit to
        itself. Flat, by source * units + target.
        """
        if replicas not in self._gbit_s:
            self._gbit_s[replicas] = self._seconds_a_gbit(replicas - 1)
        return self._gbit_s[replicas]

    @cached_property
    def _gbit_s(self) -> dict[int, Floats]:
        """By the number of replicas: a search looks the same up again and again."""
        return {}

    def _seconds_a_gbit(self, others: int) -> Floats:
        with np.errstate(divide="ignore"):
            over_link_s = 1 / self.gbps
        out_s = others / self.egress_gbps[:, None]
        in_s = others / self.ingress_gbps[None, :]
        through_s = np.maximum(out_s, in_s)
        # What stays on a machine does not pass its interface.
        inside = self.machine[:, None] == self.machine
        through_s[inside] = 0.0
        seconds: Floats = np.maximum(over_link_s, through_s)
        np.fill_diagonal(seconds, 0.0)
        return seconds.ravel()

    @cached_property
    def delay_s_apart(self) -> Floats:
        """`delay_s`, and none of a unit to itself: flat as well."""
        delay_s = self.delay_s.copy()
        np.fill_diagonal(delay_s, 0.0)
        return delay_s.ravel()

    @cached_property
    def one_each(self) -> bool:
        """Whether no machine has several."""
        used = np.unique(self.machine)
        return len(self) == len(used)


def units_of(cluster: Cluster, config: Config, group_size: int) -> Units:
    """`group_size` devices make a unit; machines with fewer have none."""
    machines = cluster.machines
    num_machines = len(machines)
    numbers = np.arange(num_machines)
    counts = [machine.devices // group_size for machine in machines]
    machine = np.repeat(numbers, counts)
    kind = np.array(kinds_of(machines))
    gbps, delay_s = _links(cluster, config.transport.connections)
    egress_gbps = _egress_gbps(machines, gbps)
    # A machine holds no more on a device than the job allows a rank.
    most_gb = config.pipeline.memory_gb or np.inf
    # What is not known binds nothing, and costs nothing.
    memory_gb = np.array([_or(each.memory_gb, np.inf) for each in machines])
    memory_gb = np.minimum(memory_gb, most_gb)
    ingress = np.array([_or(each.ingress_gbps, np.inf) for each in machines])
    price = np.array([_or(each.price_per_hour, 0.0) for each in machines])
    cores = np.array([_cores(each) for each in machines])
    memory = memory_gb * _GIGA
    # By unit and not by machine, so that an estimate needs one look-up a pair.
    pairs = np.ix_(machine, machine)
    return Units(
        machine=machine,
        kind=kind[machine],
        memory_bytes=memory[machine],
        egress_gbps=egress_gbps[machine],
        ingress_gbps=ingress[machine],
        gbps=gbps[pairs],
        delay_s=delay_s[pairs],
        relayed=_relayed(cluster)[pairs],
        price=price[machine],
        cores=cores[machine],
        num_machines=num_machines,
    )


def _egress_gbps(machines: Sequence[Machine], gbps: Floats) -> Floats:
    """As stated, or else that of the fastest link."""
    itself = np.eye(len(machines), dtype=bool)
    fastest = gbps.max(axis=1, where=~itself, initial=0.0)
    fastest[fastest == 0] = np.inf  # a machine that talks to nobody is not held up by it
    egress: Floats = fastest.copy()
    for number, machine in enumerate(machines):
        if machine.egress_gbps is not None:
            egress[number] = machine.egress_gbps
    return egress


def kinds_of(machines: Sequence[Machine]) -> list[int]:
    """By machine, a number that those have in common on which layers take the same."""
    numbers: dict[object, int] = {}
    kinds = []
    for machine in machines:
        key = (machine.layers, machine.gflops)
        kind = numbers.setdefault(key, len(numbers))
        kinds.append(kind)
    return kinds


def _links(cluster: Cluster, connections: int | str) -> tuple[Floats, Floats]:
    """Gbit/s over so many connections ("auto": as fill the link), and seconds of delay."""
    names = cluster.names
    count = len(names)
    place = {name: number for number, name in enumerate(names)}
    shape = (count, count)
    gbps = np.zeros(shape)
    delay_s = np.full(shape, np.inf)
    default = cluster.default_link
    # Of hundreds of thousands of links most are as others are.
    rate = cache(partial(_rate, connections=connections))
    if default is not None:
        gbps[:] = rate(default)
        delay_s[:] = default.delay_ms / 1e3
    for (source, target), link in cluster.links.items():
        ends = place[source], place[target]
        gbps[ends] = rate(link)
        delay_s[ends] = link.delay_ms / 1e3
    # Two stages on one machine talk past its interface.
    for number, name in enumerate(names):
        inside = cluster.link(name, name)
        if inside is not None:
            gbps[number, number] = rate(inside)
            delay_s[number, number] = inside.delay_ms / 1e3
    return gbps, delay_s


def _relayed(cluster: Cluster) -> Bools:
    place = {name: number for number, name in enumerate(cluster.names)}
    count = len(place)
    shape = (count, count)
    relayed = np.zeros(shape, dtype=bool)
    for source, target in cluster.relayed:
        # Of ranks that are in one group only the first has a place.
        if source in place and target in place:
            here = place[source]
            there = place[target]
            relayed[here, there] = True
    return relayed


def _rate(link: Link, connections: int | str) -> float:
    measured = link.with_rate_of_messages()
    if isinstance(connections, int):
        return measured.rate_gbps(connections)
    return measured.rate_gbps(measured.connections)


def _cores(machine: Machine) -> float:
    if not machine.device.startswith("cpu"):
        return np.inf
    return _or(machine.cores, np.inf)


def _or(value: float | None, default: float) -> float:
    if value is None:
        return default
    return value
