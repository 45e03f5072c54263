"""What the links between the hosts of a lab give: `probe` run on the hosts themselves."""

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
    def program(self, *words: str) -> Iterator[subprocess.Popen[str]]:
        """One of our own commands on this host, ahead of the programs under test; killed at the end
        of the block.
        """
        argv = self.enter(["nice", "-n", "-10", sys.executable, "-m", "netem", *words])
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
    """Packets of full size that pass the router in a second, there and back, by a flood of
    pings.
    """
    flood = ["ping", "-q", "-f", "-l", "500", "-s", "1400", "-w", "1", target.address]
    received = re.search(r"(\d+) received.* time (\d+)ms", shell.run(source.enter(flood)))
    assert received is not None
    return 2 * int(received[1]) / (int(received[2]) * 1e-3)


def observe(source: Host, target: Host, link: Link, seconds: float = 1.5) -> Observed:
    """What a link gives that is asked to be `link`."""
    return observe_together({(source, target): link}, seconds)[source, target]


def observe_together(
    links: Mapping[tuple[Host, Host], Link], seconds: float = 1.5
) -> dict[tuple[Host, Host], Observed]:
    """What each link gives: its delay with the others at rest, its rate while all of them are used
    at once.
    """
    with ExitStack() as stack:
        _each_says_a_line(
            [
                stack.enter_context(host.program("answer"))
                for host in {target for _, target in links}
            ]
        )
        senders = {
            (source, target): stack.enter_context(
                source.program("probe", target.address, *_words(link, seconds))
            )
            for (source, target), link in links.items()
        }
        _each_says_a_line(senders.values())
        return dict(zip(senders, _results(list(senders.values())), strict=True))


def _each_says_a_line(processes: Iterable[subprocess.Popen[str]]) -> None:
    """Wait until each has come so far; one that ends instead, as all do in the end, has said
    why.
    """
    for process in processes:
        assert process.stdout is not None
        if not process.stdout.readline():
            raise NetemError(
                f"a probe on a host of the lab has failed: {process.communicate()[1].strip()}"
            )


def _words(link: Link, seconds: float) -> list[str]:
    pace = ["--seconds", str(seconds), "--interval", "0.01", "--json", "--wait"]
    return ["--gbps", str(link.bandwidth_gbps), *(["--jitter"] if link.jitter_ms else []), *pace]


def _results(processes: Sequence[subprocess.Popen[str]]) -> list[Observed]:
    """Let all go on at once, and wait for what each has seen."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return [_result(process) for process in processes]


def _result(process: subprocess.Popen[str]) -> Observed:
    said, complaint = process.communicate(timeout=_PROBE_S)
    if process.returncode != 0:
        raise NetemError(f"a probe on a host of the lab has failed: {complaint.strip()}")
    return Observed(**json.loads(said))
