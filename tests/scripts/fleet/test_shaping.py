"""Profiles on machines: applied to all or to none, and removed again if they cut off the
connection.
"""

import json
import time

import pytest
from fleet import shaping
from fleet.ssh import Machine, Unreachable

NEAR = "delay_ms = 10\nbandwidth_gbps = 1\n"
PAIRS = "[[link]]\nfrom = 0\nto = 1\ndelay_ms = 1\nbandwidth_gbps = 1\n"


@pytest.fixture
def profile(cloud):
    def write(text, name="near.toml"):
        (cloud.root / name).write_text(text)
        return cloud.root / name

    return write


def calls(cloud, number):
    log = cloud.folder(number) / "netem.log"
    return log.read_text().splitlines() if log.exists() else []


def test_profile_is_applied_as_the_host_s_own_node(cloud, profile):
    done = cloud("netem", profile(NEAR))
    assert done.exit_code == 0, done.output
    for number in range(2):
        path = cloud.folder(number) / "near.toml"
        assert calls(cloud, number) == [f"apply {path} --device lo --node {number} --detach"]
        assert path.read_text() == NEAR
    assert f"127.0.0.2:{cloud.port}: lo is shaped as" in done.output
    assert "near on lo" in cloud("status").output


def test_links_that_differ_are_told_apart_by_address(cloud, profile):
    both = PAIRS + PAIRS.replace("from = 0\nto = 1", "from = 1\nto = 0")
    assert cloud("netem", profile(both)).exit_code == 0
    assert calls(cloud, 0)[0].endswith("--detach --addresses 127.0.0.1,127.0.0.2")


def test_host_that_refuses_leaves_none_shaped(cloud, profile):
    (cloud.folder(1) / "refuse").touch()
    done = cloud("netem", profile(NEAR))
    assert done.exit_code == 2
    assert f"host 127.0.0.2:{cloud.port}: netem: refused by the kernel" in done.output
    assert calls(cloud, 0)[-1] == "clear --device lo"
    assert not (cloud.folder(0) / "shaped").exists()


def test_machine_that_is_cut_off_removes_its_profile(cloud, profile, monkeypatch):
    monkeypatch.setattr(shaping, "REVERT_S", 0.5)
    agent = Machine.agent

    def cut_off(machine, verb, **spec):
        """Drop the connection once the profile is applied."""
        if verb != "shape":
            raise Unreachable(f"host {machine.host.name} does not answer")
        return agent(machine, verb, **spec)

    monkeypatch.setattr(Machine, "agent", cut_off)
    done = cloud("netem", profile(NEAR))
    assert done.exit_code == 2
    assert f"host 127.0.0.2:{cloud.port} does not answer" in done.output
    deadline = time.monotonic() + 20
    while (cloud.folder(0) / "shaped").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert calls(cloud, 0)[-1] == "clear --device lo"


def test_clear_removes_our_profiles_and_no_others(cloud, profile):
    cloud("netem", profile(NEAR))
    assert "cleared lo" in cloud("netem", "clear").output
    assert calls(cloud, 1)[-1] == "clear --device lo"
    assert cloud("netem", "clear").output.count("was not shaped") == 2
    assert len(calls(cloud, 1)) == 2


def test_verify_prints_observed_against_asked(cloud, profile):
    done = cloud("netem", profile(NEAR), "--verify")
    assert done.exit_code == 0, done.output
    assert "host 1 to 0:\n  round trip, ms  ok" in done.output
    assert calls(cloud, 0)[1:] == [
        "answer",
        f"verify {cloud.folder(0)}/near.toml --node 0 --peer 1 127.0.0.2",
    ]


def test_verify_fails_where_a_link_is_off(cloud, profile):
    (cloud.folder(1) / "off").touch()
    done = cloud("netem", profile(NEAR), "--verify")
    assert done.exit_code == 1
    assert "asked 20 observed 40 OFF" in done.output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("delay = 1", "unknown key 'delay'"),
        (PAIRS.replace("to = 1", "to = 2"), "no link"),
        ("delay_ms = -1\nbandwidth_gbps = 1", "delay_ms"),
    ],
)
def test_invalid_profile_is_refused_before_any_host_is_shaped(cloud, profile, text, words):
    done = cloud("netem", profile(text))
    assert done.exit_code == 2
    assert words in done.output
    assert calls(cloud, 0) == []


def test_host_known_only_by_name_is_refused(cloud, profile):
    both = PAIRS + PAIRS.replace("from = 0\nto = 1", "from = 1\nto = 0")
    path = cloud.write_hosts(name="named.toml")
    path.write_text(
        path.read_text().replace(
            'address = "127.0.0.2"', 'address = "127.0.0.2"\nadvertise = "second"'
        )
    )
    done = cloud("netem", profile(both), hosts=path)
    assert done.exit_code == 2
    assert "tc tells peers apart by IP address; set advertise to its own" in done.output


def test_shaped_file_names_profile_and_device(cloud, profile):
    cloud("netem", profile(NEAR))
    assert json.loads((cloud.folder(0) / "shaped").read_text()) == {
        "profile": "near",
        "device": "lo",
        "kept": True,
    }
