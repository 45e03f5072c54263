"""Where the ranks of a sweep's cell run, and how their network is shaped.

local     processes on this machine, and on its GPUs if configured; not shaped
shaped    processes on this machine with the shaped transport; needs no root
lab       each rank on a host of a `netem lab`: the kernel's TCP over shaped links
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Protocol, assert_never

import click

from dpipe.network.profile import load_network
from netem import lab, measure

Kind = Literal["local", "shaped", "lab"]
_PORT = 7000  # free, because nothing else runs on the hosts of a lab


class Venue(Protocol):
    coordinator: str | None
    environ: Mapping[str, str]

    def become(self, profile: Path) -> dict[str, Any] | None:
        """Switch to the network of `profile`; returns the measured link from host 0 to 1, or None
        if there is no such link.
        """

    def enter(self, rank: int, argv: Sequence[str]) -> list[str]:
        """The command that runs `argv` where `rank` runs."""


class ThisMachine:
    coordinator: str | None = None
    environ: Mapping[str, str] = MappingProxyType({})

    def become(self, profile: Path) -> dict[str, Any] | None:
        return None

    def enter(self, rank: int, argv: Sequence[str]) -> list[str]:
        return list(argv)


@dataclass(frozen=True)
class InLab:
    lab: lab.Lab

    @property
    def coordinator(self) -> str | None:
        return f"{self.lab.addresses[0]}:{_PORT}"

    @property
    def environ(self) -> Mapping[str, str]:
        # By default gloo looks up the host's name, which is the same on all hosts of a lab.
        return {"GLOO_SOCKET_IFNAME": "eth0"}

    def become(self, profile: Path) -> dict[str, Any] | None:
        network = load_network(profile)
        lab.set_profile(self.lab, profile)
        for warning in lab.warnings(self.lab, network):
            click.echo(f"warning: {warning}", err=True)
        first, second = self.lab.hosts[:2]
        return asdict(measure.observe(first, second, network.link(0, 1)))

    def enter(self, rank: int, argv: Sequence[str]) -> list[str]:
        return self.lab.hosts[rank].enter(argv)


def overrides(kind: Kind, profile: Path) -> tuple[str, ...]:
    """The overrides that give a configuration its network."""
    path = json.dumps(str(profile))
    match kind:
        case "local":
            return ()
        case "shaped":
            return (f"transport.shape={path}",)
        case "lab":
            return (f"predict.network={path}", 'node.bind="0.0.0.0"')
        case _:
            assert_never(kind)


@contextmanager
def venue(kind: Kind, num_ranks: int, sysctl: Sequence[str] = ()) -> Iterator[Venue]:
    """A lab is up only within the block. Raises `NetemError` if it cannot be made."""
    if kind != "lab":
        yield ThisMachine()
        return
    with lab_up("sweep", num_ranks, sysctl) as at:
        yield at


@contextmanager
def lab_up(name: str, num_hosts: int, sysctl: Sequence[str] = ()) -> Iterator[InLab]:
    the_lab = lab.up(name, num_hosts, sysctl=sysctl)
    try:
        yield InLab(the_lab)
    finally:
        lab.down(name)
