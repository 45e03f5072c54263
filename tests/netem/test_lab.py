"""A real lab that shapes as it promises: namespaces, a router with sch_netem, the kernel's TCP. As
root.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import pytest
from click.testing import CliRunner
from leftovers import left_of
from support.settled import settled

from dpipe.errors import ProfileError
from dpipe.network.link import Link
from dpipe.network.profile import load_network
from netem import lab as labs
from netem import measure, probe
from netem.cli import main
from netem.lab import Lab
from netem.probe import TOLERANCE

pytestmark = [pytest.mark.alone, pytest.mark.lab, pytest.mark.usefixtures("possible")]

ROOT = Path(__file__).resolve().parent.parent.parent
NAME, OTHER = f"t{os.getpid()}", f"u{os.getpid()}"
PUBLISHED = [Link(0.1, 10), Link(1, 5), Link(5, 2), Link(10, 1), Link(50, 1)]
GUEST_WAKES_MS = 0.1
FULL_FRAME_BITS = 1514 * 8


@pytest.fixture(scope="module")
def lab(possible) -> Iterator[Lab]:
    lab = labs.up(NAME, num_hosts=3)
    yield lab
    assert labs.down(NAME)
    assert left_of(NAME) == []


def text(link: Link, head: str = "") -> str:
    return f"{head}\ndelay_ms = {link.delay_ms}\nbandwidth_gbps = {link.bandwidth_gbps}\n"


def close(rows: list[probe.Row]) -> bool:
    return all(row.close for row in rows)


def python(host: measure.Host, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = host.enter([sys.executable, "-m", "netem", *arguments])
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)


@pytest.mark.slow
def test_router_carries_coalesced_packets(lab):
    """Several times what it carries packet by packet; half of that where the router's devices
    cannot segment.
    """

    def coalesces(lab: Lab) -> bool:
        return lab.carries_gbps > 1.5 * lab.carries_packets * FULL_FRAME_BITS * 1e-9

    assert coalesces(lab) or coalesces(labs.measured(lab))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    "link", PUBLISHED, ids=lambda link: f"{link.delay_ms:g}ms-{link.bandwidth_gbps:g}gbps"
)
def test_published_network_is_measured_as_published_unless_the_lab_warns(lab, profile, link):
    """Delay and rate within 10 %. Delays may differ by the 0.1 ms that a guest takes to wake, each
    way. A rate may be lower if the router cannot carry it, as 10 Gbit/s on two cores: the lab must
    warn of that then. If the machine has become busy since the lab came up, what its router takes
    and carries is measured anew. No rate may be exceeded.
    """
    path = profile(text(link))

    def measured() -> tuple[list[probe.Row], bool]:
        labs.set_profile(lab, path)
        rows = probe.compare(link, link, measure.observe(*lab.hosts[:2], link, seconds=1.0))
        return rows, explained(rows, lab) or explained(rows, labs.measured(lab))

    def explained(rows: list[probe.Row], router: Lab) -> bool:
        delay, rate = rows
        late_ms = max(0.0, router.own_delay_ms - lab.own_delay_ms) + GUEST_WAKES_MS
        in_time = delay.close or abs(delay.observed - delay.expected) < 2 * late_ms
        return in_time and (rate.close or warned(router, path))

    def passes(outcome: tuple[list[probe.Row], bool]) -> bool:
        (_, rate), is_explained = outcome
        return is_explained and rate.observed < (1 + TOLERANCE) * rate.expected

    rows, _ = outcome = settled(measured, passes)
    assert passes(outcome), "\n".join(map(str, rows))


def warned(lab: Lab, path: Path) -> bool:
    warnings = labs.warnings(lab, load_network(path))
    return any(
        re.match(r"a link asks .* Gbit/s; the router carries", warning) for warning in warnings
    )


@pytest.mark.slow
def test_links_that_differ_are_each_measured_as_in_the_profile(lab, profile):
    far, near = Link(20, 0.04), Link(40, 0.03)  # slow enough for a busy router
    blocks = text(far, "[[link]]\nfrom = 0\nto = 1") + text(near, "[[link]]\nfrom = 0\nto = 2")
    labs.set_profile(lab, profile(text(Link(5, 0.02)) + blocks))
    for target, link in ((1, far), (2, near)):
        ends = lab.hosts[0], lab.hosts[target]
        rows = settled(
            lambda ends=ends, link=link: probe.compare(link, link, measure.observe(*ends, link)),
            close,
        )
        assert close(rows), "\n".join(map(str, rows))
    assert measure.delay_ms(lab.hosts[1], lab.hosts[2]) == pytest.approx(5, rel=0.1)


def test_links_of_a_host_share_its_egress(lab, profile):
    fast, slow = Link(5, 0.4), Link(5, 0.3)
    blocks = text(slow, "[[link]]\nfrom = 0\nto = 2")
    labs.set_profile(lab, profile(text(fast) + blocks))
    links = {(lab.hosts[0], lab.hosts[1]): fast, (lab.hosts[0], lab.hosts[2]): slow}
    observed = measure.observe_together(links, seconds=1.0)
    assert sum(link.bandwidth_gbps for link in observed.values()) < 0.4 * 1.1


@pytest.mark.slow
def test_window_stays_open_through_a_pause(lab, profile):
    """A message of 400 kB takes a round trip and 32 ms then, and three round trips where the window
    has closed.
    """
    labs.set_profile(lab, profile(text(Link(40, 0.1))))
    script = ROOT / "tests/netem/paused_link.py"
    near, far = lab.hosts[:2]

    def began(host: measure.Host, *words: str) -> subprocess.Popen[str]:
        argv = host.enter([sys.executable, str(script), *words])
        return subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, text=True)

    def looked() -> dict[str, float]:
        took = {}
        for how, port in (("warm", "7101"), ("cold", "7102")):
            words = ("call", far.address, port, how)
            with began(far, "listen", port) as listening, began(near, *words) as calling:
                written, _ = calling.communicate(timeout=60)
                took[how] = median(map(float, written.split()))
                assert [calling.wait(timeout=20), listening.wait(timeout=20)] == [0, 0]
        return took

    took = settled(looked, lambda took: took["warm"] < 0.6 * took["cold"])
    assert took["warm"] < 0.6 * took["cold"]


@pytest.mark.slow
def test_those_who_send_to_a_host_share_its_ingress(lab, profile):
    machines = text(Link(5, 0.4), "[default_link]")
    for name in "abc":
        machines += f'[[machine]]\nname = "{name}"\n'
    machines = machines.replace('name = "a"', 'name = "a"\ningress_gbps = 0.3')
    labs.set_profile(lab, profile(machines))
    link = Link(5, 0.4)
    links = {(lab.hosts[1], lab.hosts[0]): link, (lab.hosts[2], lab.hosts[0]): link}
    observed = measure.observe_together(links, seconds=1.0)
    together_gbps = sum(link.bandwidth_gbps for link in observed.values())
    assert 0.3 * 0.7 < together_gbps < 0.3 * 1.15
    labs.set_profile(lab, profile(text(link)))  # which takes the last hop's shaping away
    alone = measure.observe_together({(lab.hosts[1], lab.hosts[0]): link}, seconds=1.0)
    assert sum(link.bandwidth_gbps for link in alone.values()) > 0.3 * 1.1


def test_jitter_and_loss_are_measured_as_in_the_profile(lab, profile):
    labs.set_profile(lab, profile(text(Link(20, 1), "jitter_ms = 5\nloss_percent = 5")))
    within = lab.hosts[0].enter([])
    round_trips, lost = probe.ping(
        lab.hosts[1].address, count=600, interval_s=0.0025, within=within
    )
    assert sorted(round_trips)[len(round_trips) // 2] == pytest.approx(40, rel=0.1)
    assert max(round_trips) - min(round_trips) > 5
    assert 4.5 < lost < 15  # 9.75 %, there or back; four standard deviations are 4.9


def test_profile_that_cannot_be_read_changes_nothing(lab, profile):
    labs.set_profile(lab, profile(text(Link(5, 1), 'name = "kept"')))
    with pytest.raises(ProfileError, match="unknown key 'delay'"):
        labs.set_profile(lab, profile("delay = 1"))
    assert labs.load(NAME).network().name == "kept"
    assert measure.delay_ms(*lab.hosts[:2]) == pytest.approx(5, rel=0.1)


def test_set_and_status_describe_the_lab(lab, profile):
    path = profile(text(Link(10, 0.05), 'name = "ten"'))
    was_set = CliRunner().invoke(main, ["lab", "set", str(path), "--name", NAME])
    status = CliRunner().invoke(main, ["lab", "status", "--name", NAME])
    assert was_set.output == status.output
    assert f"lab {NAME}: ten" in status.output
    assert f"host 2: {lab.hosts[2].address}" in status.output
    verified = CliRunner().invoke(main, ["lab", "verify", "--name", NAME])
    assert verified.output.count("expected    20.000") == 3


def test_verify_compares_a_link_with_its_profile(lab, profile):
    slow = profile(text(Link(5, 0.1)))
    labs.set_profile(lab, slow)
    with lab.hosts[1].program("answer") as answering:
        assert answering.stdout.readline() == "answering on port 7990\n"
        arguments = ["--node", "0", "--peer", "1", "--interval", "0.01", lab.hosts[1].address]
        matching = python(lab.hosts[0], "verify", str(slow), *arguments)
        differing = python(lab.hosts[0], "verify", str(profile(text(Link(1, 0.1)))), *arguments)
    assert (matching.returncode, matching.stdout.count("ok")) == (0, 2)
    assert (differing.returncode, differing.stdout.splitlines()[0][-3:]) == (1, "OFF")
