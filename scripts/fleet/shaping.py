"""A network profile on every machine, by its own `tc`; node i is the i-th host of the file.

shape on all ──► keep on all      a machine that `keep` cannot reach takes its profile off by itself
    └── one refuses: off on all
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from dpipe.errors import DpipeError
from dpipe.network.profile import load_network
from fleet.ssh import HostRefused, Machine, as_line, each

DOUBT_S = 45.0  # until a profile that has locked us out is taken off
VERIFY_S = 120.0


@dataclass(frozen=True)
class Shape:
    """A profile for these machines. `addresses` are empty where the links are alike: tc then needs
    none.
    """

    name: str
    text: str
    addresses: tuple[str, ...]

    @classmethod
    def of(cls, profile: Path, machines: Sequence[Machine]) -> "Shape":
        """Raises `ProfileError` for a profile that cannot be read or lacks a pair, `HostRefused`
        for a host by name.
        """
        network = load_network(profile)
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
    """Shape every machine; returns their devices. Where one cannot be shaped, none stays so."""
    numbers = {machine: number for number, machine in enumerate(machines)}

    def put_on(machine: Machine) -> str:
        node = numbers[machine]
        peer = machines[(node + 1) % len(machines)].host.reached_at
        spec: dict[str, Any] = {
            "name": shape.name,
            "profile": shape.text,
            "addresses": shape.addresses,
            "doubt_s": DOUBT_S,
        }
        given: dict[str, Any] = {"node": node, "device": machine.host.interface, "toward": peer}
        return str(machine.agent("shape", **spec, **given)["device"])

    try:
        devices = each(machines, put_on)
        each(machines, lambda machine: machine.agent("keep", timeout_s=DOUBT_S))
    except BaseException:
        clear_what_answers(machines)
        raise
    return devices


def clear(machines: Sequence[Machine]) -> list[str | None]:
    """Take profiles off; returns the devices, None where there was none."""
    return each(machines, lambda machine: machine.agent("unshape")["cleared"])


def clear_what_answers(machines: Sequence[Machine]) -> list[str]:
    """The same, whatever is wrong with some of them; returns what was."""

    def take_off(machine: Machine) -> str | None:
        try:
            machine.agent("unshape")
        except DpipeError as error:
            return str(error)
        return None

    return [error for error in each(machines, take_off) if error is not None]


def verify(machines: Sequence[Machine], shape: Shape) -> list[dict[str, Any]]:
    """What each machine's link to the next one gives, all at once: rows as text, and whether they
    are close.
    """
    ring = [(node, (node + 1) % len(machines)) for node in range(len(machines))]

    def measure(pair: tuple[int, int]) -> Any:
        node, peer = pair
        given = {
            "name": shape.name,
            "node": node,
            "peer": peer,
            "address": machines[peer].host.reached_at,
        }
        return machines[node].agent("verify", timeout_s=VERIFY_S, **given)

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
