"""The machines as arrays that a search can index."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from dpipe.config.load import Config
from dpipe.machines.machine import Cluster, Machine
from dpipe.network.link import Link

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

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
    price: Floats  # of its machine, an hour
    num_machines: int

    def __len__(self) -> int:
        return len(self.machine)

    @cached_property
    def one_each(self) -> bool:
        """Whether no machine has several."""
        return len(self) == len(np.unique(self.machine))


def units_of(cluster: Cluster, config: Config, group_size: int) -> Units:
    """`group_size` devices make a unit; machines with fewer have none."""
    machines = cluster.machines
    counts = [machine.devices // group_size for machine in machines]
    machine = np.repeat(np.arange(len(machines)), counts)
    gbps, delay_s = _links(cluster)
    egress_gbps = _egress_gbps(machines, gbps)
    itself = np.eye(len(machines), dtype=bool)
    # Between two stages on one machine there is what its groups have between their devices.
    gbps[itself] = config.predict.machine_gbps
    delay_s[itself] = config.predict.machine_delay_ms / 1e3
    memory = [_or(each.memory_gb, np.inf) * _GIGA for each in machines]
    ingress = [_or(each.ingress_gbps, np.inf) for each in machines]
    price = [_or(each.price_per_hour, 0.0) for each in machines]
    # By unit and not by machine, so that an estimate needs one look-up a pair.
    pairs = np.ix_(machine, machine)
    return Units(
        machine=machine,
        kind=np.array(kinds_of(machines))[machine],
        memory_bytes=np.array(memory)[machine],
        egress_gbps=egress_gbps[machine],
        ingress_gbps=np.array(ingress)[machine],
        gbps=gbps[pairs],
        delay_s=delay_s[pairs],
        price=np.array(price)[machine],
        num_machines=len(machines),
    )


def _egress_gbps(machines: Sequence[Machine], gbps: Floats) -> Floats:
    """As stated, or else that of the fastest link."""
    itself = np.eye(len(machines), dtype=bool)
    fastest = gbps.max(axis=1, where=~itself, initial=0.0)
    fastest[fastest == 0] = np.inf  # a machine that talks to nobody is not held up by it
    stated = [machine.egress_gbps for machine in machines]
    return np.array([_or(*each) for each in zip(stated, fastest, strict=True)])


def kinds_of(machines: Sequence[Machine]) -> list[int]:
    """By machine, a number that those have in common on which layers take the same."""
    numbers: dict[object, int] = {}
    return [numbers.setdefault((m.layers, m.gflops), len(numbers)) for m in machines]


def _links(cluster: Cluster) -> tuple[Floats, Floats]:
    """Gbit/s over as many connections as fill the link, and seconds of delay."""
    names = cluster.names
    place = {name: number for number, name in enumerate(names)}
    shape = (len(names), len(names))
    default = cluster.default_link
    gbps = np.full(shape, 0.0 if default is None else _rate(default))
    delay_s = np.full(shape, np.inf if default is None else default.delay_ms / 1e3)
    for (source, target), link in cluster.links.items():
        ends = place[source], place[target]
        gbps[ends] = _rate(link)
        delay_s[ends] = link.delay_ms / 1e3
    return gbps, delay_s


def _rate(link: Link) -> float:
    return link.rate_gbps(link.connections)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
