"""Measures the links between the hosts of a lab: `probe`, run on the hosts themselves."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dpipe.network.link import Link
from netem import probe, shell
from netem.probe import Observed
from netem.shell import NetemError

_ROOT = Path(__file__).resolve().parent.parent
_PROBE_S = 90.0


@dataclass(frozen=True, slots=True)
class Host:
    namespace: str
    address: str

    def enter(self, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, *command]

    @contextmanager
    def program(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        """One of our own commands on this host, at a higher priority than the programs under test;
        killed at the end of the block.
        """
        argv = self.enter(["nice", "-n", "-10", sys.executable, "-m", "netem", *arguments])
        pipe = subprocess.PIPE
        process = subprocess.Popen(argv, cwd=_ROOT, text=True, stdin=pipe, stdout=pipe, stderr=pipe)
        with process:
            try:
                yield process
            finally:
                process.kill()


def delay_ms(source: Host, target: Host) -> float:
    """Half of the shortest round trip."""
    round_trips, _ = probe.ping(
        target.address, count=100, interval_s=0.005, within=source.enter([])
    )
    return min(round_trips) / 2


def packets_per_second(source: Host, target: Host) -> float:
    """Packets of full size that pass the router in a second, both ways counted: a flood of
    pings.
    """
    flood = ["ping", "-q", "-f", "-l", "500", "-s", "1400", "-w", "1", target.address]
    received = re.search(r"(\d+) received.* time (\d+)ms", shell.run(source.enter(flood)))
    assert received is not None
    return 2 * int(received[1]) / (int(received[2]) * 1e-3)


def observe(source: Host, target: Host, link: Link, seconds: float = 1.5) -> Observed:
    """Measure a link that is expected to be like `link`."""
    return observe_together({(source, target): link}, seconds)[source, target]


def observe_together(
    links: Mapping[tuple[Host, Host], Link], seconds: float = 1.5
) -> dict[tuple[Host, Host], Observed]:
    """Measure each link: its delay while the others are idle, its rate while all are used at
    once.
    """
    with ExitStack() as stack:
        _wait_for_a_line(
            [
                stack.enter_context(host.program("answer"))
                for host in {target for _, target in links}
            ]
        )
        senders = {
            (source, target): stack.enter_context(
                source.program("probe", target.address, *_options(link, seconds))
            )
            for (source, target), link in links.items()
        }
        _wait_for_a_line(senders.values())
        return dict(zip(senders, _results(list(senders.values())), strict=True))


def _wait_for_a_line(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Wait until each has printed a line. Raises `NetemError` with the message of one that ends
    instead.
    """
    for process in processes:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise NetemError(
                f"a probe on a host of the lab has failed: {process.communicate()[1].strip()}"
            )


def _options(link: Link, seconds: float) -> list[str]:
    pace = ["--seconds", str(seconds), "--interval", "0.01", "--json", "--wait"]
    return ["--gbps", str(link.bandwidth_gbps), *(["--jitter"] if link.jitter_ms else []), *pace]


def _results(processes: Sequence[subprocess.Popen[str]]) -> list[Observed]:
    """Let all start their transfers at once, and wait for their results."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [_result(process) for process in processes]


def _result(process: subprocess.Popen[str]) -> Observed:
    output, errors = process.communicate(timeout=_PROBE_S)
    if process.returncode != 0:
        raise NetemError(f"a probe on a host of the lab has failed: {errors.strip()}")
    return Observed(**json.loads(output))
