"""Measured in a lab whose profile is known: namespaces, a router with sch_netem, the kernel's TCP.
A quarter of a minute each, as root.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.settled import settled

from dpipe.machines.file import load_machines
from dpipe.machines.machine import Cluster
from dpipe.network.link import PAYLOAD_SHARE, Link
from netem import lab as labs
from netem.lab import Lab

pytestmark = [
    pytest.mark.lab,
    pytest.mark.usefixtures("possible"),
    pytest.mark.timeout(600),
]

NAME = f"m{os.getpid()}"
PORT = 7100
# So slow that a busy router carries them: 0 to 1 is asymmetric, 0 and 2 are far apart, 1 and 2
# lossy.
PROFILE = """
[[link]]
from = 0
to = 1
delay_ms = 5
bandwidth_gbps = 0.1
[[link]]
from = 1
to = 0
delay_ms = 5
bandwidth_gbps = 0.02
[[link]]
from = 0
to = 2
delay_ms = 40
bandwidth_gbps = 0.05
[[link]]
from = 1
to = 2
delay_ms = 10
bandwidth_gbps = 0.04
jitter_ms = 2
"""
# The profile's rates are of packets with their headers, those that are measured of messages.
LINKS = {
    ("a", "b"): Link(5, 0.1 * PAYLOAD_SHARE),
    ("b", "a"): Link(5, 0.02 * PAYLOAD_SHARE),
    ("a", "c"): Link(40, 0.05 * PAYLOAD_SHARE),
    ("c", "a"): Link(40, 0.05 * PAYLOAD_SHARE),
}


@pytest.fixture
def lab(
    possible: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Lab]:
    profile = tmp_path_factory.mktemp("lab") / "profile.toml"
    profile.write_text(PROFILE)
    # What its router carries is measured as a lab comes up: far more than these links ask for.
    monkeypatch.setattr(labs, "measured", lambda lab: lab)
    yield labs.up(NAME, num_hosts=3, profile=profile)
    assert labs.down(NAME)


def measure(lab: Lab, folder: Path, python: str) -> tuple[Cluster, str]:
    """What rank 0 writes, and its text."""
    job = folder / "job.toml"
    job.write_text('[model]\nlayers = "replay"\n[timeouts]\nconnect = 20\n[node]\ntoken = "t"\n')
    out = folder / "machines.toml"
    out.unlink(missing_ok=True)
    processes = []
    for rank, (name, host) in enumerate(zip("abc", lab.hosts, strict=True)):
        argv = [python, "-m", "dpipe", "measure", str(job), "--name", name]
        argv += ["--rank", str(rank), "--world-size", "3", "--out", str(out)]
        argv += ["--coordinator", f"{lab.addresses[0]}:{PORT}"]
        processes.append(subprocess.Popen(host.enter(argv), stderr=subprocess.PIPE, text=True))
    try:
        errors = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0], errors
    return load_machines(out), out.read_text()


def off(cluster: Cluster) -> list[str]:
    """The links that are not as in the profile."""
    different = []
    for ends, expected in LINKS.items():
        link = cluster.link(*ends)
        if link is None:
            different.append(f"{ends}: none")
            continue
        if link.delay_ms != pytest.approx(expected.delay_ms, rel=0.05, abs=0.6):
            different.append(f"{ends}: {link.delay_ms} ms")
        if link.bandwidth_gbps != pytest.approx(expected.bandwidth_gbps, rel=0.06):
            different.append(f"{ends}: {link.bandwidth_gbps} Gbit/s")
        if link.loss_percent > 0.1:
            different.append(f"{ends}: {link.loss_percent} % lost")
    return different


@pytest.mark.slow
@pytest.mark.waits  # beside what sleeps its delays and rates are as on a quiet machine
def test_links_are_measured_as_in_the_profile(lab: Lab, tmp_path: Path, warm_python: str) -> None:
    """Also one that is slower one way than the other."""
    cluster, text = settled(
        lambda: measure(lab, tmp_path, warm_python), lambda found: not off(found[0]), tries=5
    )
    assert not off(cluster), text
    assert cluster.names == ("a", "b", "c")
    assert cluster.machine("a").host == lab.addresses[0]
    jittery = cluster.link("b", "c")
    assert jittery is not None
    assert 1 < jittery.jitter_ms < 4


@pytest.mark.slow
def test_pair_without_a_route_is_measured_through_the_relay(
    lab: Lab, tmp_path: Path, warm_python: str
) -> None:
    """Machine a is the coordinator's."""
    route = ["ip", "route", "add", "blackhole", f"{lab.addresses[2]}/32"]
    subprocess.run(lab.hosts[1].enter(route), check=True)
    try:
        cluster, text = measure(lab, tmp_path, warm_python)
    finally:
        route[2] = "del"
        subprocess.run(lab.hosts[1].enter(route), check=True)
    assert text.startswith("# b and c cannot dial each other: ")
    assert cluster.relayed == {("b", "c"), ("c", "b")}
    for ends, by_way_of in ((("b", "c"), ("b", "a")), (("c", "b"), ("c", "a"))):
        link = cluster.link(*ends)
        assert link is not None, text
        # Both halves of the way are as long as in the profile, and the slower one bounds the rate.
        assert 45 <= link.delay_ms < 90
        slowest_gbps = LINKS[by_way_of].bandwidth_gbps
        assert 0.5 * slowest_gbps < link.bandwidth_gbps < 1.2 * slowest_gbps
