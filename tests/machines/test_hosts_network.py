"""The network that shapes the interfaces of hosts."""

from pathlib import Path

import pytest

from dpipe.errors import ProfileError
from dpipe.machines.hosts import load_hosts_network
from dpipe.network.link import PAYLOAD_SHARE, Interface, Link

MACHINES = """
[[machine]]
name = "a"
devices = 2
egress_gbps = 1
[[machine]]
name = "b"
ingress_gbps = 2
[[link]]
from = "a"
to = "b"
delay_ms = 10
bandwidth_gbps = 1
loss_percent = 0.5
"""


def test_machines_are_nodes_with_the_rates_of_interfaces(tmp_path: Path) -> None:
    """What was measured is payload."""
    path = tmp_path / "office.toml"
    path.write_text(MACHINES)
    network = load_hosts_network(path)
    more = 1 / PAYLOAD_SHARE
    link = Link(10, more, loss_percent=0.5)
    assert (network.name, network.links) == ("office", {(0, 1): link, (1, 0): link})
    assert network.interfaces == (
        Interface((0,), more, None, "a"),
        Interface((1,), None, 2 * more, "b"),
    )
    assert network.for_payload().link(0, 1).bandwidth_gbps == pytest.approx(1)


def test_profile_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "slow.toml"
    path.write_text("delay_ms = 50\nbandwidth_gbps = 1\n")
    assert load_hosts_network(path).default == Link(50, 1)


@pytest.mark.parametrize("text", ["machine = 3", "[[machine]]"])
def test_error_is_that_of_the_kind_of_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "m.toml"
    path.write_text(text)
    with pytest.raises(ProfileError, match="machines file"):
        load_hosts_network(path)
    with pytest.raises(ProfileError, match="network profile .* does not exist"):
        load_hosts_network(tmp_path / "none.toml")
