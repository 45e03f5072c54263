import subprocess
import sys

import pytest
from click.testing import CliRunner

from netem.cli import main

PROFILE = "delay_ms = 50\nbandwidth_gbps = 1\n"
UNEVEN = PROFILE + "[[link]]\nfrom = 0\nto = 1\ndelay_ms = 1\nbandwidth_gbps = 2\n"


@pytest.fixture
def profile(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "profile.toml"
        path.write_text(text)
        return str(path)

    return write


def invoke(*arguments: str):
    return CliRunner().invoke(main, arguments)


def test_show_prints_the_commands(profile):
    shown = invoke("show", profile(PROFILE), "--device", "eth0", "--node", "0")
    assert (
        shown.output
        == "tc qdisc add dev eth0 root handle d1be: netem limit 12500 delay 50ms rate 1gbit\n"
    )


def test_show_takes_addresses_if_links_differ(profile):
    arguments = [
        "show",
        profile(UNEVEN),
        "--device",
        "eth0",
        "--node",
        "0",
        "--addresses",
        "10.0.0.1, 10.0.0.2,10.0.0.3",
    ]
    assert "match ip dst 10.0.0.2/32 flowid d1be:11" in invoke(*arguments).output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delay = 1", "unknown key 'delay'"),
        ("delay_ms = 1", "needs bandwidth_gbps"),
        ("delay_ms = -1\nbandwidth_gbps = 1", "delay_ms must be"),
        (UNEVEN, "give the address of every node"),
    ],
)
def test_profile_with_a_mistake_ends_with_exit_code_2_and_one_line(profile, text, message):
    shown = invoke("show", profile(text), "--device", "eth0", "--node", "0")
    assert (shown.exit_code, shown.output.count("\n")) == (2, 1)
    assert message in shown.output


def test_commands_run_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "netem", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert all(
        command in done.stdout for command in ("show", "apply", "clear", "verify", "answer", "lab")
    )


MACHINES = """
[default_link]
delay_ms = 50
bandwidth_gbps = 0.956
[[machine]]
name = "a"
[[machine]]
name = "b"
ingress_gbps = 0.5
"""


def test_machines_are_taken_where_a_profile_is(profile):
    """A message's 0.956 Gbit/s take an interface of 1."""
    arguments = ["--device", "eth0", "--node"]
    shown = invoke("show", profile(MACHINES), *arguments, "0")
    assert "netem limit 12495 delay 50ms rate 0.999575gbit" in shown.output
    refused = invoke("show", profile(MACHINES), *arguments, "1")
    assert refused.exit_code == 2
    assert "node 1 of network 'profile' has ingress_gbps" in refused.stderr
