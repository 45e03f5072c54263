import pytest

from dpipe.errors import ProfileError
from dpipe.topology import LOOPBACK, Link, Network, load_network

PROFILE = """
    name = "two sites"
    delay_ms = 0.1
    bandwidth_gbps = 10
    [[link]]
    from = 0
    to = 1
    delay_ms = 50
    bandwidth_gbps = 1
"""


@pytest.fixture
def load(tmp_path):
    def write_and_load(text: str | bytes) -> Network:
        path = tmp_path / "profile.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return load_network(path)

    return write_and_load


def test_message_takes_bytes_over_bandwidth():
    assert Link(delay_ms=50, bandwidth_gbps=1).serialisation_us(125_000) == pytest.approx(1_000)
    assert Link(delay_ms=50, bandwidth_gbps=1).delay_us == 50_000


def test_profile_lists_a_link_for_both_directions(load):
    network = load(PROFILE)
    assert network.name == "two sites"
    assert network.link(0, 1) == network.link(1, 0) == Link(50, 1)
    assert network.link(1, 2) == Link(0.1, 10)


def test_profile_may_list_the_directions_apart(load):
    network = load(PROFILE + "[[link]]\nfrom = 1\nto = 0\ndelay_ms = 20\nbandwidth_gbps = 2")
    assert (network.link(0, 1), network.link(1, 0)) == (Link(50, 1), Link(20, 2))


def test_profile_is_named_by_its_file_unless_it_says_otherwise(load):
    assert load("delay_ms = 1\nbandwidth_gbps = 1").name == "profile"


def test_egress_is_the_fastest_link_of_a_rank():
    network = Network(default=Link(1, 5), links={(0, 1): Link(1, 1), (1, 0): Link(1, 8)})
    assert (network.egress_gbps(0), network.egress_gbps(1)) == (5, 8)


def test_network_without_a_profile_is_loopback():
    assert Network().link(0, 1) == LOOPBACK


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delay_ms = 1", "the profile needs bandwidth_gbps, a number; got None"),
        ("delay_ms = true\nbandwidth_gbps = 1", "the profile needs delay_ms, a number; got True"),
        ("delay_ms = -1\nbandwidth_gbps = 1", "delay_ms must be a number that is not negative, got -1"),
        ("delay_ms = nan\nbandwidth_gbps = 1", "delay_ms must be a number that is not negative, got nan"),
        ("delay_ms = 1\nbandwidth_gbps = inf", "bandwidth_gbps must be a positive number, got inf"),
        ("delay_ms = 1\nbandwidth_gbps = 1\n[link]\nfrom = 0", r"links are written as \[\[link\]\] in double brackets"),
        ("delay_ms = 1\nbandwidth_gbps = 1\nlink = [3]", r"links are written as \[\[link\]\] in double brackets"),
        (PROFILE.replace("to = 1", "to = 0"), r"\[\[link\]\] from 0 to itself"),
        ("delay_ms = 1\nbandwidth_gbps = 0", "bandwidth_gbps must be a positive number, got 0"),
        (
            "delay = 1",
            "unknown key 'delay' in the profile; known keys: bandwidth_gbps, delay_ms, jitter_ms, link",
        ),
        (PROFILE + "jitter = 1", r"unknown key 'jitter' in \[\[link\]\]"),
        (PROFILE.replace("to = 1", "to = -1"), r"\[\[link\]\] needs 'to', a rank \(0, 1, ...\); got -1"),
        (PROFILE + PROFILE[PROFILE.index("[[link]]") :], r"\[\[link\]\] from 0 to 1 is listed twice"),
        ("delay_ms =", "Invalid value"),
        (b"\xff", "invalid start byte"),
    ],
)
def test_profile_refuses_what_it_cannot_mean(load, text, message):
    with pytest.raises(ProfileError, match=message) as raised:
        load(text)
    assert "profile.toml" in str(raised.value)


def test_profile_must_exist(tmp_path):
    with pytest.raises(ProfileError, match=r"nowhere\.toml does not exist"):
        load_network(tmp_path / "nowhere.toml")
