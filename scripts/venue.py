"""Where the ranks of a sweep's cell run, and what makes their network slow.

local     processes of this machine, on its GPUs where the configuration says so; its own network
shaped    processes of this machine behind the shaped transport; needs no root
lab       a host of a `netem lab` each: the kernel's own TCP over shaped links
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
_PORT = 7000  # the hosts of a lab have nothing else on it


class Venue(Protocol):
    coordinator: str | None
    environ: Mapping[str, str]

    def become(self, profile: Path) -> dict[str, Any] | None:
        """Take on a network; returns what the link from host 0 to 1 then gives, where that is for
        us to measure.
        """

    def enter(self, rank: int, argv: Sequence[str]) -> list[str]:
        """What runs `argv` as `rank`."""


class Here:
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
        return {
            "GLOO_SOCKET_IFNAME": "eth0"
        }  # else gloo looks up the host's name, which is the same on all

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
    """What a configuration says of its network there."""
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
    """A lab is up for as long as the block runs; raises `NetemError` where it cannot be."""
    if kind != "lab":
        yield Here()
        return
    with lab_up("sweep", num_ranks, sysctl) as at:
        yield at


@contextmanager
def lab_up(name: str, num_hosts: int, sysctl: Sequence[str] = ()) -> Iterator[InLab]:
    made = lab.up(name, num_hosts, sysctl=sysctl)
    try:
        yield InLab(made)
    finally:
        lab.down(name)
