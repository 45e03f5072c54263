"""What a lab refuses before it changes anything, and what it warns of. Needs no root."""

import shutil
from dataclasses import replace

import pytest

from dpipe.errors import ProfileError
from dpipe.network.link import Link, Network
from netem import lab as labs
from netem import router, shell
from netem.lab import Lab
from netem.router import GuestRouter
from netem.shell import NetemError


@pytest.fixture(autouse=True)
def _root_of_an_empty_machine(monkeypatch, tmp_path):
    monkeypatch.setattr(shell.os, "geteuid", lambda: 0)
    monkeypatch.setattr(shell, "require_programs", lambda *programs: None)
    monkeypatch.setattr(labs, "STATE", tmp_path / "labs")


@pytest.mark.parametrize(
    ("refused", "call"),
    [
        ("a lab's name is 1 to 16 small letters and digits, got 'a-1'", lambda: labs.up("a-1", 2)),
        ("a lab's name is .* got '../x'", lambda: labs.down("../x")),
        ("a lab has 2 to 64 hosts, got 1", lambda: labs.up("a", 1)),
        ("a lab has 2 to 64 hosts, got 65", lambda: labs.up("a", 65)),
        ("no lab 'a' is up; labs that are up: none", lambda: labs.load("a")),
    ],
)
def test_impossible_lab_is_refused(refused, call, monkeypatch):
    monkeypatch.setattr(labs, "_namespaces", lambda name: pytest.fail("nothing may be looked for"))
    with pytest.raises(NetemError, match=refused):
        call()
    assert not labs.STATE.exists()


@pytest.mark.parametrize(
    "call", [lambda: labs.up("a", 2), lambda: labs.down("a"), lambda: labs.load("a")]
)
def test_lab_without_root_names_the_shaped_transport(call, monkeypatch):
    monkeypatch.setattr(shell.os, "geteuid", lambda: 1000)
    with pytest.raises(NetemError, match="a lab needs root; .*`shaped` transport"):
        call()


def test_profile_is_read_before_anything_is_made(tmp_path):
    with pytest.raises(ProfileError, match="does not exist"):
        labs.up("a", 2, tmp_path / "nowhere.toml")
    assert not labs.STATE.exists()


def test_profile_with_too_few_nodes_is_refused_before_anything_is_changed(tmp_path):
    (tmp_path / "pair.toml").write_text(
        "[[link]]\nfrom = 0\nto = 1\ndelay_ms = 1\nbandwidth_gbps = 1\n"
    )
    with pytest.raises(ProfileError, match="no link from rank 0 to 2"):
        labs.up("a", 3, tmp_path / "pair.toml")
    assert not labs.STATE.exists()


def test_lab_whose_up_was_killed_says_so():
    (labs.STATE / "a").mkdir(parents=True)
    with pytest.raises(NetemError, match="lab 'a' did not come up completely: lab down --name a"):
        labs.load("a")


def test_guest_without_modules_names_the_script(monkeypatch, tmp_path):
    monkeypatch.setattr(router, "MODULES", tmp_path)
    with pytest.raises(NetemError, match=r"holds no sch_netem.ko; run scripts/apt-lab"):
        GuestRouter("nowhere", tmp_path).start(["a", "b"])


LAB = Lab("a", 3, 100, "guest", own_delay_ms=0.12, carries_gbps=6.0, carries_packets=40_000)


@pytest.mark.parametrize(
    ("default", "expected"),
    [
        (Link(50, 0.1), []),
        (Link(0.1, 0.1), ["a link asks 0.1 ms; the router alone takes 0.12 ms"]),
        (Link(1, 10), ["a link asks 10 Gbit/s; the router carries 6 in all"]),
        (
            Link(1, 1),
            [
                "all hosts may send 3 Gbit/s together; the router carries 6 in all, and 0.32 where "
                "TCP coalesces no "
                "packets, as over many slow connections"
            ],
        ),
    ],
)
def test_warning_says_what_the_router_cannot_do(default, expected):
    assert labs.warnings(LAB, Network(default=default)) == expected


def test_warning_names_the_congestion_control_that_spaces_packets():
    (warning,) = labs.warnings(replace(LAB, congestion_control="bbr"), Network(default=Link(1, 1)))
    assert "BBR, which spaces them: --sysctl net.ipv4.tcp_congestion_control=reno" in warning


def test_own_delay_of_the_router_is_subtracted_from_each_link():
    network = Network(
        default=Link(0.1, 10), links={(0, 1): Link(5, 2, jitter_ms=5, loss_percent=1)}
    )
    less = labs._less(network, 0.2)
    assert less.default == Link(0, 10)
    assert less.link(0, 1) == Link(4.8, 2, jitter_ms=4.8, loss_percent=1)


def test_labs_that_come_up_together_have_addresses_of_their_own() -> None:
    octets = [labs._claim(name) for name in "abc"]
    assert octets == [100, 101, 102]
    shutil.rmtree(labs.STATE / "b")
    assert labs._claim("d") == 101
    with pytest.raises(NetemError, match="lab 'd' is up already"):
        labs._claim("d")
