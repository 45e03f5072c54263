import math
from pathlib import Path

import pytest

from dpipe.errors import ProfileError
from dpipe.network.egress import Egress
from dpipe.network.link import LOOPBACK, PAYLOAD_SHARE, Interface, Link, Network
from dpipe.network.profile import load_network

PROFILES = Path(__file__).parents[2] / "netem/profiles"

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


PAIRS = """
    name = "triangle"
    window_bytes = 1e6
    link = [
        {from = 0, to = 1, delay_ms = 50, bandwidth_gbps = 1},
        {from = 1, to = 2, delay_ms = 20, bandwidth_gbps = 1, window_bytes = 4e6},
    ]
"""


def test_profile_may_list_every_pair_and_no_default(load):
    network = load(PAIRS)
    network.check(2)
    assert network.default is None
    assert (network.link(1, 0), network.egress_gbps(1)) == (Link(50, 1, window_bytes=1e6), 1)


def test_missing_pairs_are_named(load):
    with pytest.raises(
        ProfileError, match="'triangle' has no link from rank 0 to 2, 2 to 0; list every pair"
    ):
        load(PAIRS).check(3)
    with pytest.raises(ProfileError, match=r"from rank 0 to 2, 0 to 3, 1 to 3, .* and 2 more"):
        load(PAIRS).check(4)
    with pytest.raises(ProfileError, match="'triangle' has no link from rank 0 to 2"):
        load(PAIRS).link(0, 2)


def test_network_with_a_default_has_every_pair():
    Network().check(1000)


def test_connection_carries_a_window_a_round_trip(load):
    network = load(PAIRS)
    assert network.rate_gbps(0, 1) == pytest.approx(0.08)  # 1 MB in 100 ms
    assert network.rate_gbps(1, 2) == pytest.approx(0.8)  # its own window: 4 MB in 40 ms


def test_connections_multiply_the_window_up_to_the_bandwidth(load):
    network = load(PAIRS)
    assert network.over(5).rate_gbps(0, 1) == pytest.approx(0.4)
    assert network.over(50).rate_gbps(0, 1) == 1


def test_window_is_no_limit_without_delay_or_if_not_given():
    assert Link(0, 1, window_bytes=1).rate_gbps() == Link(50, 1).rate_gbps() == 1


def sent(egress):
    while egress.due_us is not None:
        message = egress.complete()
        yield f"{message.item} to {message.target} {message.start_us:g}-{message.end_us:g}"


def test_egress_sends_the_messages_of_a_link_one_after_another():
    egress = Egress(Network(default=Link(50, 1)), 0)
    for item in "ab":
        egress.offer(0, 1, item, 125 * 10, 0)
    assert list(sent(egress)) == ["a to 1 0-10", "b to 1 10-20"]


def test_egress_serves_the_links_of_a_network_in_order_of_arrival():
    """Like the lab's links: a whole message is in the queue before the next one."""
    egress = Egress(Network(default=Link(50, 1)), 0)
    egress.offer(0, 1, "a", 125 * 20, 0)
    egress.offer(0, 2, "b", 125 * 10, 10)
    egress.offer(0, 1, "c", 125 * 10, 11)
    egress.offer(0, 2, "d", 125 * 10, 12)
    assert list(sent(egress)) == ["a to 1 0-20", "b to 2 20-30", "c to 1 30-40", "d to 2 40-50"]


def test_egress_is_shared_fairly_by_links_that_are_shaped_apart():
    egress = Egress(Network(default=None, links={(0, 1): Link(50, 1), (0, 2): Link(40, 1)}), 0)
    egress.offer(0, 1, "a", 125 * 20, 0)
    egress.offer(0, 2, "b", 125 * 10, 10)
    # From 10 on each gets half: both have 10 us of sending left.
    assert list(sent(egress)) == ["a to 1 0-30", "b to 2 10-30"]


def test_egress_gives_what_a_slow_link_leaves_to_the_others():
    egress = Egress(Network(default=Link(0, 1), links={(0, 2): Link(0, 0.25)}), 0)
    egress.offer(0, 1, "fast", 125 * 30, 0)
    egress.offer(0, 2, "slow", 125 * 30, 0)
    assert list(sent(egress)) == ["fast to 1 0-40", "slow to 2 0-120"]


def test_egress_leaves_capacity_that_a_window_does_not_use():
    egress = Egress(Network(default=Link(10, 1, window_bytes=0.5e6)), 0)  # 0.2 Gbit/s a connection
    for target in (1, 2, 3):
        egress.offer(0, target, target, 125 * 10, 0)
    assert [line.split()[-1] for line in sent(egress)] == ["0-50"] * 3


def test_network_without_a_profile_is_loopback():
    assert Network().link(0, 1) == LOOPBACK


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("delay_ms = 1", "the profile needs bandwidth_gbps, a number; got None"),
        ("delay_ms = true\nbandwidth_gbps = 1", "the profile needs delay_ms, a number; got True"),
        (
            "delay_ms = -1\nbandwidth_gbps = 1",
            "delay_ms must be a number that is not negative, got -1",
        ),
        (
            "delay_ms = nan\nbandwidth_gbps = 1",
            "delay_ms must be a number that is not negative, got nan",
        ),
        (
            "delay_ms = 1e300\nbandwidth_gbps = 1",
            r"delay_ms must be at most 3600000, an hour, got 1e\+300",
        ),
        ("delay_ms = 1\nbandwidth_gbps = inf", "bandwidth_gbps must be a positive number, got inf"),
        (
            "delay_ms = 1\nbandwidth_gbps = 1\n[link]\nfrom = 0",
            r"links are written as \[\[link\]\] in double brackets",
        ),
        (
            "delay_ms = 1\nbandwidth_gbps = 1\nlink = [3]",
            r"links are written as \[\[link\]\] in double brackets",
        ),
        (PROFILE.replace("to = 1", "to = 0"), r"\[\[link\]\] from 0 to itself"),
        ("delay_ms = 1\nbandwidth_gbps = 0", "bandwidth_gbps must be a positive number, got 0"),
        (
            "delay = 1",
            "unknown key 'delay' in the profile; known keys: bandwidth_gbps, delay_ms, jitter_ms, "
            ".*, window_bytes",
        ),
        (
            "delay_ms = 1\nbandwidth_gbps = 1\nwindow_bytes = 0",
            "window_bytes must be a positive number, got 0",
        ),
        (
            'delay_ms = 1\nbandwidth_gbps = 1\nwindow_bytes = "big"',
            "the profile needs window_bytes, a number; got 'big'",
        ),
        (
            "delay_ms = 1\nbandwidth_gbps = 1\nreorder_percent = 100",
            "reorder_percent must be at least 0 and below 100, got 100",
        ),
        ("bandwidth_gbps = 1\nlink = []", "the profile needs delay_ms, a number; got None"),
        (PROFILE + "jitter = 1", r"unknown key 'jitter' in \[\[link\]\]"),
        (
            PROFILE.replace("to = 1", "to = -1"),
            r"\[\[link\]\] needs 'to', a rank \(0, 1, ...\); got -1",
        ),
        (
            PROFILE + PROFILE[PROFILE.index("[[link]]") :],
            r"\[\[link\]\] from 0 to 1 is listed twice",
        ),
        ("delay_ms =", "Invalid value"),
        (b"\xff", "invalid start byte"),
    ],
)
def test_invalid_profile_is_refused(load, text, message):
    with pytest.raises(ProfileError, match=message) as raised:
        load(text)
    assert "profile.toml" in str(raised.value)


def test_profile_must_exist(tmp_path):
    with pytest.raises(ProfileError, match=r"nowhere\.toml does not exist"):
        load_network(tmp_path / "nowhere.toml")


def test_profile_that_is_a_folder_is_named(tmp_path):
    with pytest.raises(
        ProfileError, match=f"network profile {tmp_path} cannot be read: Is a directory"
    ):
        load_network(tmp_path)


def test_profile_may_begin_with_a_byte_order_mark(load):
    assert load(b"\xef\xbb\xbf" + PROFILE.encode()).name == "two sites"


@pytest.mark.parametrize(
    ("link", "connections"),
    [
        (Link(0.1, 8), 1),
        (Link(10, 1), 2),  # 2.5 MB under way
        (Link(50, 1), 6),  # 12.5 MB
        (
            Link(50, 1, window_bytes=9_700_000),
            6,
        ),  # what a window may reach is not what can be counted on
        (Link(10, 1, window_bytes=500_000), 5),
        (Link(100, 10), 16),
        (Link(100, 1e300), 16),
    ],
)
def test_connections_of_a_link_hold_what_is_under_way(link: Link, connections: int) -> None:
    assert link.connections == connections


def test_connections_of_a_network_fill_its_most_demanding_link() -> None:
    links = {(0, 1): Link(50, 1), (1, 0): Link(10, 1)}
    assert Network("n", Link(1, 1), links).over_enough().connections == 6
    assert Network("n", None, {}).over_enough().connections == 1


def test_payload_excludes_the_headers_of_full_frames() -> None:
    seen = Network("n", Link(5, 1), {(0, 1): Link(50, 2, window_bytes=1e6)}).for_payload()
    assert seen.link(1, 0) == Link(5, 1448 / 1514)
    assert seen.link(0, 1) == Link(50, 2 * 1448 / 1514, window_bytes=1e6)


def test_machine_of_several_ranks_shares_its_rate() -> None:
    """Machines 0 and 1 of two ranks each are the ranks 0 1 and 2 3."""
    network = Network("a", Link(1, 8), {(0, 1): Link(5, 4)}).shared_by(2)
    assert network.link(1, 3) == network.link(0, 2) == Link(5, 2)
    assert network.link(2, 0) == Link(1, 4)


def test_interface_is_as_fast_as_its_fastest_link_unless_it_says_otherwise():
    links = {(0, 1): Link(1, 1), (2, 1): Link(1, 3), (0, 2): Link(0, 8), (2, 0): Link(0, 8)}
    network = Network("n", None, links, interfaces=(Interface((0, 2)),))
    assert network.egress_gbps(0) == network.egress_gbps(2) == 3
    assert network.ingress_gbps(0) == math.inf
    assert network.interface(1) == Interface((1,))
    stated = Network("n", None, links, interfaces=(Interface((0, 2), 2, 0.5),))
    assert (stated.egress_gbps(0), stated.ingress_gbps(2)) == (2, 0.5)
    payload = stated.for_payload()
    assert payload.egress_gbps(0) == 2 * PAYLOAD_SHARE
    assert payload.ingress_gbps(0) == 0.5 * PAYLOAD_SHARE


@pytest.mark.parametrize("key", ["egress_gbps", "ingress_gbps"])
def test_interface_carries_something(key):
    with pytest.raises(ProfileError, match=f"{key} must be a positive number, got 0"):
        Interface((0,), **{key: 0})


def test_interfaces_are_not_shared_out():
    network = Network(interfaces=(Interface((0, 1)),))
    with pytest.raises(ProfileError, match="interfaces of their own rate; it cannot be shared out"):
        network.shared_by(2)


@pytest.mark.parametrize("loss_percent", [0.01, 1, 20, 99])
@pytest.mark.parametrize("delay_ms", [0, 1, 50])
def test_rate_of_messages_contains_the_loss(loss_percent: float, delay_ms: float) -> None:
    """It was measured in spite of the loss, which must not come off it once more."""
    link = Link(delay_ms, 2, loss_percent=loss_percent).with_rate_of_messages()
    assert link.rate_gbps(link.connections) == pytest.approx(2)
    assert 0 < link.loss_percent <= loss_percent


def test_loss_that_lets_a_link_be_full_stays() -> None:
    link = Link(15, 0.1, loss_percent=0.01)
    assert link.with_rate_of_messages() == link
    assert Link(15, 10).with_rate_of_messages() == Link(15, 10)


def test_jitter_delays_a_message_by_the_latest_of_its_packets() -> None:
    link = Link(50, 1, jitter_ms=10)
    assert link.late_us(1000) == 0  # one packet is late as often as it is early
    assert link.late_us(9 * 1448) == pytest.approx(8000)
    network = Network(default=link)
    assert network.delay_us(0, 1, 9 * 1448) == pytest.approx(58_000)


@pytest.mark.parametrize("name", ["home", "mobile", "continental"])
def test_profile_of_a_lossy_network_says_what_it_loses(name: str) -> None:
    link = load_network(PROFILES / f"{name}.toml").default
    assert link is not None
    assert link.loss_percent > 0
