"""Applies a network profile to every machine with its own `tc`; node i is host i of the hosts file.

shape on all ──► keep on all      a machine that `keep` does not reach removes its profile itself
    └── one fails: unshape on all
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from dpipe.errors import DpipeError
from dpipe.machines.hosts import load_hosts_network
from fleet.ssh import HostRefused, Machine, as_line, each

REVERT_S = 45.0  # until a profile that has cut off our connection is removed again
VERIFY_S = 120.0


@dataclass(frozen=True)
class Shape:
    """A profile for these machines. `addresses` is empty if all links are alike: tc then does not
    tell peers apart.
    """

    name: str
    text: str
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, profile: Path, machines: Sequence[Machine]) -> "Shape":
        """Raises `ProfileError` if the profile cannot be read or lacks a pair, `HostRefused` if a
        host is known only by its name.
        """
        network = load_hosts_network(profile)
        network.check(len(machines))
        addresses = tuple(machine.host.reached_at for machine in machines)
        for machine, address in zip(machines, addresses, strict=True):
            if network.links and not _is_address(address):
                raise HostRefused(
                    f"host {machine.host.name}: tc tells peers apart by IP address; set advertise "
                    "to its own"
                )
        return cls(
            profile.name, profile.read_text(encoding="utf-8"), addresses if network.links else ()
        )


def apply(machines: Sequence[Machine], shape: Shape) -> list[str]:
    """Shape every machine; returns their devices. If one cannot be shaped, none is."""
    numbers = {machine: number for number, machine in enumerate(machines)}

    def shape_one(machine: Machine) -> str:
        node = numbers[machine]
        peer = machines[(node + 1) % len(machines)].host.reached_at
        spec: dict[str, Any] = {
            "name": shape.name,
            "profile": shape.text,
            "addresses": shape.addresses,
            "revert_s": REVERT_S,
        }
        spec |= {"node": node, "device": machine.host.interface, "toward": peer}
        return str(machine.agent("shape", **spec)["device"])

    try:
        devices = each(machines, shape_one)
        each(machines, lambda machine: machine.agent("keep", timeout_s=REVERT_S))
    except BaseException:
        clear_reachable(machines)
        raise
    return devices


def clear(machines: Sequence[Machine]) -> list[str | None]:
    """Remove the profiles; returns the devices, None for a machine that had no profile."""
    return each(machines, lambda machine: machine.agent("unshape")["cleared"])


def clear_reachable(machines: Sequence[Machine]) -> list[str]:
    """Remove the profiles wherever that is possible; returns the errors of the other machines."""

    def clear_one(machine: Machine) -> str | None:
        try:
            machine.agent("unshape")
        except DpipeError as error:
            return str(error)
        return None

    return [error for error in each(machines, clear_one) if error is not None]


def verify(machines: Sequence[Machine], shape: Shape) -> list[dict[str, Any]]:
    """Measure each machine's link to the next one, all at the same time. Each answer has its rows
    as text, and whether they are close to the profile.
    """
    ring = [(node, (node + 1) % len(machines)) for node in range(len(machines))]

    def measure(pair: tuple[int, int]) -> Any:
        node, peer = pair
        spec = {
            "name": shape.name,
            "node": node,
            "peer": peer,
            "address": machines[peer].host.reached_at,
        }
        return machines[node].agent("verify", timeout_s=VERIFY_S, **spec)

    with ExitStack() as stack:
        for machine in machines:
            answering = stack.enter_context(machine.process(machine.agent_command("answer")))
            assert answering.stdin is not None and answering.stdout is not None
            answering.stdin.write(as_line({}))
            answering.stdin.flush()
            if not answering.stdout.readline():  # "answering on port ..."
                raise HostRefused(
                    f"host {machine.host.name} cannot answer: "
                    f"{answering.communicate()[1].decode().strip()}"
                )
        with ThreadPoolExecutor(len(ring)) as pool:
            return list(pool.map(measure, ring))


def _is_address(text: str) -> bool:
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
