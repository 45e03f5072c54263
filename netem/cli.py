"""The commands of `python -m netem`: each parses its arguments, then calls one function."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import click

from dpipe.errors import DpipeError
from dpipe.machines.hosts import load_hosts_network
from netem import apply as shaping
from netem import lab, probe
from netem.shell import NetemError
from netem.tc import egress_commands, refuse_ingress

F = TypeVar("F", bound=Callable[..., Any])


class _Commands(click.Group):
    """Turns dpipe's errors into a message and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DpipeError as error:
            click.echo(f"netem: {error}", err=True)
            sys.exit(error.exit_code)


def _addresses(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",")) if value else ()


_PROFILE = click.argument("profile", type=click.Path(dir_okay=False, path_type=Path))
_DEVICE = click.option("--device", required=True, help="The interface, such as eth0.")
_NODE = click.option(
    "--node",
    required=True,
    type=click.IntRange(min=0),
    help="This machine's number in the profile.",
)
_ADDRESSES = click.option(
    "--addresses",
    default="",
    callback=_addresses,
    metavar="IP,IP,...",
    help="The addresses of node 0, 1, ...; needed if links differ.",
)
_PORT = click.option("--port", default=probe.PORT, show_default=True)
_INTERVAL = click.option(
    "--interval",
    default=0.2,
    show_default=True,
    help="Seconds between pings; below 0.2 needs root.",
)
_NAME = click.option("--name", default="lab", show_default=True, help="The name of the lab.")


@click.group(cls=_Commands)
def main() -> None:
    """Make a network slow and uneven with the kernel's own shaping."""


@main.command()
@_PROFILE
@_DEVICE
@_NODE
@_ADDRESSES
def show(profile: Path, device: str, node: int, addresses: tuple[str, ...]) -> None:
    """Print the tc commands of one node; nothing is run."""
    network = load_hosts_network(profile)
    refuse_ingress(network, node)
    for command in egress_commands(network, node, device, addresses):
        click.echo(" ".join(command))


@main.command()
@_PROFILE
@_DEVICE
@_NODE
@_ADDRESSES
@click.option(
    "--detach", is_flag=True, help="Return and leave the shaping on, until `netem clear`."
)
def apply(profile: Path, device: str, node: int, addresses: tuple[str, ...], detach: bool) -> None:
    """Shape an interface until Ctrl-C."""
    network = load_hosts_network(profile)
    if detach:
        shaping.apply(network, node, device, addresses)
        return
    with shaping.applied(network, node, device, addresses) as wait:
        click.echo(f"{device} is shaped as node {node} of {network.name}; Ctrl-C ends it")
        wait()


@main.command()
@_DEVICE
def clear(device: str) -> None:
    """Take the shaping off an interface."""
    click.echo("cleared" if shaping.clear(device) else f"{device} is not shaped")


@main.command()
@_PROFILE
@_NODE
@click.option(
    "--peer", required=True, type=click.IntRange(min=0), help="The node at the other end."
)
@click.argument("address")
@_PORT
@_INTERVAL
def verify(profile: Path, node: int, peer: int, address: str, port: int, interval: float) -> None:
    """Measure the link to a peer at ADDRESS and compare it with the profile.

    The peer must be shaped too, and run `python -m netem answer`.
    """
    network = load_hosts_network(profile)
    forward, backward = network.link(node, peer), network.link(peer, node)
    jitter = forward.jitter_ms + backward.jitter_ms > 0
    observed = probe.observe(
        address, forward.bandwidth_gbps, jitter=jitter, port=port, interval_s=interval
    )
    _report(probe.compare(forward, backward, observed))


@main.command()
@_PORT
def answer(port: int) -> None:
    """Receive what `verify` sends, until no connection has come for ten minutes."""
    probe.answer(port, ready=lambda: click.echo(f"answering on port {port}"))


@main.command("probe")
@click.argument("address")
@_PORT
@click.option("--gbps", default=1.0, show_default=True, help="What the link is expected to carry.")
@click.option(
    "--jitter", is_flag=True, help="Report the median round trip instead of the shortest."
)
@click.option("--seconds", default=1.5, show_default=True, help="How long to time the transfer.")
@_INTERVAL
@click.option(
    "--wait",
    is_flag=True,
    help="Print a line after the pings, then wait for a line of input before the transfer.",
)
@click.option("--json", "as_json", is_flag=True)
def probe_link(
    address: str, gbps: float, interval: float, wait: bool, as_json: bool, **options: Any
) -> None:
    """Measure the link to ADDRESS: round trip, loss and rate."""

    def pinged() -> None:
        if wait:
            click.echo("pinged")
            sys.stdin.readline()

    observed = probe.observe(address, gbps, interval_s=interval, pinged=pinged, **options)
    for line in (
        [json.dumps(asdict(observed))]
        if as_json
        else [f"{k} {v:.3f}" for k, v in asdict(observed).items()]
    ):
        click.echo(line)


@main.group("lab")
def lab_group() -> None:
    """Hosts as network namespaces around one router that shapes every link."""


@lab_group.command("up")
@click.option("--hosts", required=True, type=int, help="How many.")
@click.option(
    "--profile", type=click.Path(dir_okay=False, path_type=Path), help="Default: unshaped."
)
@click.option(
    "--router", type=click.Choice(lab.ROUTERS), help="Default: the one that this kernel allows."
)
@click.option(
    "--sysctl",
    multiple=True,
    metavar="KEY=VALUE",
    help="A TCP setting of the hosts; may be repeated.",
)
@_NAME
def lab_up(
    hosts: int, profile: Path | None, router: str | None, sysctl: tuple[str, ...], name: str
) -> None:
    """Make a lab."""
    _describe(lab.up(name, hosts, profile, router, sysctl))


@lab_group.command("exec")
@_NAME
@click.argument("host", type=int)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def lab_exec(name: str, host: int, command: tuple[str, ...]) -> None:
    """Run a command on a host: `lab exec 0 -- ping 10.100.0.2`."""
    lab.execute(lab.load(name), host, command)


@lab_group.command("set")
@_PROFILE
@_NAME
def lab_set(profile: Path, name: str) -> None:
    """Change the network of a lab; programs in it keep running."""
    lab.set_profile(lab.load(name), profile)
    _describe(lab.load(name))


@lab_group.command("status")
@_NAME
def lab_status(name: str) -> None:
    """Print a lab's hosts, their network, and the capacity of its router."""
    _describe(lab.load(name))


@lab_group.command("verify")
@_NAME
def lab_verify(name: str) -> None:
    """Measure each host's link to the next one, all at once, and compare with the profile."""
    the_lab = lab.load(name)
    network = the_lab.network()
    if network is None:
        raise NetemError(
            f"lab {name!r} is unshaped: there is no profile to compare with; set one first: "
            "lab set PROFILE"
        )
    rows = []
    for (i, j), observed in lab.observe_ring(the_lab, network).items():
        click.echo(f"host {i} to {j}: {observed}")
        rows += probe.compare(network.link(i, j), network.link(j, i), observed)
    _report(rows)


@lab_group.command("down")
@_NAME
def lab_down(name: str) -> None:
    """Remove a lab and end what runs in it."""
    click.echo("removed" if lab.down(name) else f"no lab {name!r} was up")


def _describe(the_lab: lab.Lab) -> None:
    network = the_lab.network()
    click.echo(f"lab {the_lab.name}: {network.name if network else 'unshaped'}")
    click.echo(
        f"router: {the_lab.router_kind}; carries {the_lab.carries_gbps:.2g} Gbit/s coalesced, "
        f"{the_lab.carries_packets:,.0f} packets/s; adds {the_lab.own_delay_ms:.2g} ms itself"
    )
    click.echo(f"TCP: {the_lab.congestion_control}")
    for i, host in enumerate(the_lab.hosts):
        click.echo(f"host {i}: {host.address}  {host.namespace}")
    for line in lab.warnings(the_lab, network) if network else []:
        click.echo(f"warning: {line}", err=True)


def _report(rows: list[probe.Row]) -> None:
    for row in rows:
        click.echo(str(row))
    if not all(row.close for row in rows):
        raise click.exceptions.Exit(1)
