"""What comes up with a lab and goes with it, whatever time that takes: these labs are not measured
as they come up. As root.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from leftovers import left_of

from netem import lab as labs
from netem import measure, shell
from netem.cli import main
from netem.lab import Lab
from netem.shell import NetemError

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("possible")]

ROOT = Path(__file__).resolve().parent.parent.parent
FAR = "delay_ms = 50\nbandwidth_gbps = 1\n"
NAME, OTHER = f"v{os.getpid()}", f"w{os.getpid()}"


@pytest.fixture(scope="module", autouse=True)
def _not_measured() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(labs, "measured", lambda lab: lab)
        yield


@pytest.fixture(scope="module")
def lab(possible, _not_measured) -> Iterator[Lab]:
    lab = labs.up(NAME, num_hosts=3)
    yield lab
    assert labs.down(NAME)
    assert left_of(NAME) == []


@pytest.fixture
def other() -> Iterator[str]:
    """The name of a second lab, which must leave nothing."""
    yield OTHER
    labs.down(OTHER)
    assert left_of(OTHER) == []


def test_command_runs_on_its_host(lab):
    argv = [
        sys.executable,
        "-m",
        "netem",
        "lab",
        "exec",
        "--name",
        NAME,
        "1",
        "--",
        "sh",
        "-c",
        "ip -br addr; exit 7",
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 7
    assert lab.hosts[1].address in done.stdout


def test_host_that_does_not_exist_is_refused(lab):
    with pytest.raises(NetemError, match="has hosts 0 to 2, not 3"):
        labs.execute(lab, 3, ["true"])


def test_shaping_of_a_device_ends_with_the_command(lab, profile):
    """`apply` where sch_netem is: on a device beside the router's ports."""
    apply = f"{sys.executable} -m netem apply {profile(FAR)} --node 0 --device dummy"
    shown = lab.router.run(f"""
        cd {ROOT}
        ip link add dummy type ifb; ip link set dummy up
        {apply} & pid=$!
        for _ in $(seq 200); do tc qdisc show dev dummy | grep -q netem && break; sleep 0.1; done
        tc qdisc show dev dummy; kill -TERM $pid; wait $pid; echo ended: $(tc qdisc show dev dummy)
        {apply} --detach
        tc qdisc show dev dummy; {sys.executable} -m netem clear --device dummy
        ip link del dummy
    """)
    lines = [
        line
        for line in shown.splitlines()
        if "netem" in line or "ended" in line or "cleared" in line
    ]
    shaped = "qdisc netem d1be: root refcnt 2 limit 12500 delay 50ms rate 1Gbit"
    assert [line.strip() for line in lines if "pfifo" not in line] in (
        [shaped, "ended:", shaped, "cleared"],
        [shaped, shaped, "cleared"],
    )


def test_kernel_without_netem_says_so(lab, profile):
    apply = [sys.executable, "-m", "netem", "apply", str(profile(FAR)), "--node", "0"]
    argv = lab.hosts[0].enter([*apply, "--device", "eth0", "--detach"])
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    if lab.router_kind == "namespace":
        assert done.returncode == 0
    else:
        assert done.returncode == 2
        assert "this kernel lacks a module (sch_netem" in done.stderr


def test_verify_of_an_unshaped_lab_is_refused(lab, monkeypatch):
    monkeypatch.setattr(Lab, "network", lambda lab: None)
    result = CliRunner().invoke(main, ["lab", "verify", "--name", NAME])
    assert (result.exit_code, result.output) == (
        2,
        f"netem: lab '{NAME}' is unshaped: there is no profile to compare with; set one "
        "first: lab set PROFILE\n",
    )


def answers(lab: Lab, host: int, other: int) -> bool:
    argv = ["ping", "-c", "2", "-i", "0.2", "-W", "1", lab.addresses[other]]
    return subprocess.run(lab.hosts[host].enter(argv), capture_output=True).returncode == 0


def test_host_that_is_cut_off_is_back_once_mended(lab):
    labs.cut(lab, 1)
    assert [answers(lab, 0, 1), answers(lab, 1, 2), answers(lab, 2, 0)] == [False, False, True]
    labs.mend(lab, 1)
    assert [answers(lab, 0, 1), answers(lab, 1, 2)] == [True, True]


def test_name_that_is_up_is_refused_and_stays_up(lab):
    with pytest.raises(NetemError, match=f"lab '{NAME}' is up already: lab down --name {NAME}"):
        labs.up(NAME, num_hosts=2)
    assert measure.delay_ms(*lab.hosts[:2]) < 1000


def test_failure_in_the_router_names_the_device(lab):
    with pytest.raises(NetemError, match=r"(?s)'port9'|\"port9\""):
        lab.router.run("ip link set port9 up")


def test_hosts_have_the_tcp_settings_of_sysctl(other):
    reno = "net.ipv4.tcp_congestion_control=reno"
    lab_up = CliRunner().invoke(
        main, ["lab", "up", "--name", other, "--hosts", "2", "--sysctl", reno]
    )
    assert "TCP: reno" in lab_up.output
    settings = [
        shell.run(host.enter(["sysctl", "-n", reno.partition("=")[0]]))
        for host in labs.load(other).hosts
    ]
    assert settings == ["reno\n", "reno\n"]


def test_setting_that_the_kernel_refuses_leaves_no_lab(other):
    with pytest.raises(NetemError, match="sysctl.*failed"):
        labs.up(other, 2, sysctl=["net.ipv4.tcp_congestion_control=nonsense"])
    assert left_of(other) == []


def test_second_lab_comes_up_beside_the_first_and_goes_alone(lab, other):
    second = labs.up(other, num_hosts=2)
    assert not set(second.addresses) & set(lab.addresses)
    assert measure.delay_ms(*second.hosts) < 1000
    sleeper = subprocess.Popen(second.hosts[0].enter(["sleep", "600"]))
    assert labs.down(other)
    assert sleeper.wait(10) != 0  # what ran on a host has ended with it
    assert left_of(other) == []
    assert not labs.down(other)
    assert measure.delay_ms(*lab.hosts[:2]) < 1000


def test_crashed_router_is_noticed_and_leaves_nothing(possible, other):
    second = labs.up(other, num_hosts=2, router_kind="guest")
    for pid in shell.run(["ip", "netns", "pids", f"dpipe-{other}-router"]).split():
        os.kill(int(pid), 9)
    with pytest.raises(NetemError, match="router has ended .*; take the lab down and up again"):
        second.router.run("sleep 1")
    assert labs.down(other)
    assert left_of(other) == []


def test_lab_that_does_not_come_up_leaves_nothing(possible, other, monkeypatch):
    def interrupt(lab: Lab) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(labs, "measured", interrupt)
    with pytest.raises(KeyboardInterrupt):
        labs.up(other, num_hosts=2)
    assert left_of(other) == []


def test_namespace_routes_between_hosts(possible, other):
    """All but the shaping, which the running kernel may lack."""
    routed = labs.up(other, num_hosts=2, router_kind="namespace")
    assert measure.delay_ms(*routed.hosts) < 1000
    with pytest.raises(NetemError, match="port9"):
        routed.router.run("ip link set port9 up")
