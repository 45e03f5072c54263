#!/usr/bin/env python3
"""Measures what one link carries at full rate, between two hosts of a lab: iperf3 and dpipe in
turns, each over as many connections as `transport.connections = "auto"` opens. Needs root.

    scripts/link.py                                  the five published networks, about six minutes
    scripts/link.py netem/profiles/50ms-1gbps.toml --sysctl net.ipv4.tcp_congestion_control=reno
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click
from venue import InLab, lab_up

from dpipe.errors import DpipeError, RunError
from dpipe.network.profile import load_network
from netem import shell
from netem.measure import Host

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ("0.1ms-10gbps", "1ms-5gbps", "5ms-2gbps", "10ms-1gbps", "50ms-1gbps")
_SECONDS, _TURNS = 5, 3
_START_S = 180.0


def measure(at: InLab, profile: Path, warm_up_s: float | None = None) -> dict[str, Any]:
    """One row: Gbit/s of payload on one link, iperf3 and dpipe in turns; medians of both and of
    their ratio.

    Each warms up until TCP's slow start is over, or for `warm_up_s`, and is then measured long
    enough that half a round trip at either end does not matter.
    """
    observed = at.become(profile)
    network = load_network(profile)
    link = network.link(0, 1)
    round_trip_s = 2 * link.delay_ms * 1e-3
    durations = (
        1.0 + 15 * round_trip_s if warm_up_s is None else warm_up_s,
        _SECONDS + 50 * round_trip_s,
    )
    one_connection_gbps = iperf3(at.lab.hosts, 1, *durations)
    turns = [
        [
            measure_rate(at.lab.hosts, link.connections, *durations)
            for measure_rate in (iperf3, dpipe)
        ]
        for _ in range(_TURNS)
    ]
    iperf3_gbps, dpipe_gbps = (median(rates) for rates in zip(*turns, strict=True))
    return {
        "network": network.name,
        "asked": link.bandwidth_gbps,
        "on the wire": observed["bandwidth_gbps"],
        "iperf3 x1": one_connection_gbps,
        "window MB": one_connection_gbps * 1e3 / 8 * round_trip_s,
        "connections": link.connections,
        "iperf3": iperf3_gbps,
        "dpipe": dpipe_gbps,
        "dpipe / asked": dpipe_gbps / link.bandwidth_gbps,
        "dpipe / iperf3": median(b / a for a, b in turns),
    }


def iperf3(hosts: Sequence[Host], connections: int, warm_up_s: float, seconds: float) -> float:
    with _program(hosts[1], ["iperf3", "--server", "--one-off", "--forceflush"]) as server:
        _until_it_listens(server)
        options = [
            "--time",
            str(round(seconds)),
            "--omit",
            str(round(warm_up_s)),
            "--parallel",
            str(connections),
        ]
        report = shell.run(
            hosts[0].enter(["iperf3", "--client", hosts[1].address, "--json", *options]), _START_S
        )
        server.wait(_START_S)
    return float(json.loads(report)["end"]["sum_received"]["bits_per_second"]) * 1e-9


def dpipe(hosts: Sequence[Host], connections: int, warm_up_s: float, seconds: float) -> float:
    addresses = [host.address for host in hosts]
    options = [
        "--connections",
        str(connections),
        "--seconds",
        str(seconds),
        "--warm-up",
        str(warm_up_s),
    ]
    argv = [
        [sys.executable, "-m", "dpipe.bench.rate", str(rank), *addresses, *options]
        for rank in (0, 1)
    ]
    with _program(hosts[1], argv[1]) as receiver:
        _until_it_listens(receiver)
        shell.run(hosts[0].enter(argv[0]), _START_S)
        rate, errors = receiver.communicate(timeout=_START_S)
    if receiver.returncode != 0:
        raise RunError(f"dpipe between two hosts of the lab has failed:\n{errors}")
    return float(rate)


@contextmanager
def _program(host: Host, argv: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A program on a host of the lab; it is killed at the end of the block."""
    pipe = subprocess.PIPE
    with subprocess.Popen(
        host.enter(argv), cwd=ROOT, text=True, stdout=pipe, stderr=pipe
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _until_it_listens(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while "listening" not in (line := process.stdout.readline()):
        if not line:
            raise RunError(f"{process.args} ended before it listened: {process.communicate()[1]}")


def as_markdown(row: dict[str, Any], heads: bool) -> str:
    cells = [f"{value:.2f}" if isinstance(value, float) else str(value) for value in row.values()]
    return "\n".join(
        f"| {' | '.join(line)} |"
        for line in ([[*row], ["---"] * len(row), cells] if heads else [cells])
    )


@click.command(help=__doc__)
@click.argument("profiles", nargs=-1, type=click.Path(path_type=Path))
@click.option(
    "--sysctl", multiple=True, metavar="KEY=VALUE", help="A TCP setting of the two hosts."
)
@click.option(
    "--warm-up",
    "warm_up_s",
    type=float,
    help="Seconds before each measurement; default: by the link's delay.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a list of rows.")
def main(
    profiles: tuple[Path, ...], sysctl: tuple[str, ...], warm_up_s: float | None, as_json: bool
) -> None:
    rows: list[dict[str, Any]] = []
    try:
        shell.require_programs("iperf3")
        with lab_up("link", 2, sysctl) as at:
            for profile in profiles or [ROOT / f"netem/profiles/{name}.toml" for name in PUBLISHED]:
                rows.append(measure(at, profile, warm_up_s))
                if not as_json:
                    click.echo(as_markdown(rows[-1], heads=len(rows) == 1))
    except DpipeError as error:
        click.echo(f"link: {error}", err=True)
        sys.exit(error.exit_code)
    load = ", ".join(f"{value:.1f}" for value in os.getloadavg())
    click.echo(
        json.dumps(rows, indent=2) if as_json else f"\nGbit/s of payload; load average {load}"
    )


if __name__ == "__main__":
    main()
