"""What ranks of one machine share: its egress and its ingress; and what loss does to a link."""

import math
from dataclasses import replace

import pytest

from dpipe.network.egress import Egress, Ingress, Inside
from dpipe.network.link import SEGMENT_BYTES, Interface, Link, Network
from dpipe.network.profile import load_network

BYTES_PER_US = 125  # at 1 Gbit/s


def through(rate) -> list[str]:
    lines = []
    while rate.due_us is not None:
        sent = rate.complete()
        took = f"{sent.start_us:g}-{sent.end_us:g}"
        lines.append(f"{sent.item}: {sent.source} to {sent.target} {took}")
    return lines


def test_ranks_of_a_machine_send_one_message_after_another():
    network = Network(default=Link(50, 1), interfaces=(Interface((0, 2)),))
    egress = Egress(network, 2)
    egress.offer(0, 1, "a", 20 * BYTES_PER_US, 0)
    egress.offer(2, 3, "b", 10 * BYTES_PER_US, 10)
    assert through(egress) == ["a: 0 to 1 0-20", "b: 2 to 3 20-30"]


def test_ranks_of_a_machine_share_its_link_to_another():
    """The interface has 2 Gbit/s, the link of either pair of ranks 0.5: it is one link."""
    links = {(0, 1): Link(50, 0.5), (2, 3): Link(50, 0.5), (0, 4): Link(50, 1)}
    interfaces = (Interface((0, 2), 2), Interface((1, 3)))
    egress = Egress(Network("n", None, links, interfaces=interfaces), 0)
    egress.offer(0, 1, "a", 10 * BYTES_PER_US, 0)
    egress.offer(2, 3, "b", 10 * BYTES_PER_US, 0)
    egress.offer(0, 4, "c", 10 * BYTES_PER_US, 0)
    assert through(egress) == ["c: 0 to 4 0-10", "a: 0 to 1 0-20", "b: 2 to 3 20-40"]


def test_interface_may_be_faster_than_any_of_its_links():
    """Else the two would leave one after another, at the link's rate."""
    egress = Egress(Network(default=Link(50, 1), interfaces=(Interface((0,), 2),)), 0)
    egress.offer(0, 1, "a", 10 * BYTES_PER_US, 0)
    egress.offer(0, 2, "b", 10 * BYTES_PER_US, 0)
    assert through(egress) == ["a: 0 to 1 0-10", "b: 0 to 2 0-10"]


def test_interface_may_be_slower_than_its_links():
    egress = Egress(Network(default=Link(50, 1), interfaces=(Interface((0,), 0.5),)), 0)
    egress.offer(0, 1, "a", 10 * BYTES_PER_US, 0)
    assert through(egress) == ["a: 0 to 1 0-20"]


def test_ranks_of_a_machine_talk_at_the_rate_of_their_own_link():
    network = Network("n", None, {(0, 1): Link(0.1, 8)}, interfaces=(Interface((0, 1), 1),))
    inside = Inside(network, 0, 1)
    inside.offer(0, 1, "a", 80 * BYTES_PER_US, 0)
    inside.offer(0, 1, "b", 80 * BYTES_PER_US, 0)
    assert through(inside) == ["a: 0 to 1 0-10", "b: 0 to 1 10-20"]


def test_ingress_is_shared_equally_by_those_who_send():
    network = Network(default=Link(50, 1), interfaces=(Interface((0,), ingress_gbps=1),))
    ingress = Ingress(network, 0)
    ingress.offer(1, 0, "a", 10 * BYTES_PER_US, 0)
    ingress.offer(2, 0, "b", 10 * BYTES_PER_US, 5)
    # Alone until 5, then half each: b has 5 left when a is through.
    assert through(ingress) == ["a: 1 to 0 0-15", "b: 2 to 0 5-20"]


def test_ingress_gives_what_a_slow_sender_leaves_to_the_others():
    links = {(1, 0): Link(50, 1), (2, 0): Link(50, 0.25)}
    network = Network("n", None, links, interfaces=(Interface((0,), ingress_gbps=1),))
    ingress = Ingress(network, 0)
    ingress.offer(1, 0, "fast", 30 * BYTES_PER_US, 0)
    ingress.offer(2, 0, "slow", 30 * BYTES_PER_US, 0)
    assert through(ingress) == ["fast: 1 to 0 0-40", "slow: 2 to 0 0-120"]


def test_ingress_shares_by_machine_not_by_rank():
    interfaces = (Interface((0,), ingress_gbps=1), Interface((1, 2)))
    ingress = Ingress(Network(default=Link(50, 1), interfaces=interfaces), 0)
    for source, item in ((1, "a"), (2, "b"), (3, "c")):
        ingress.offer(source, 0, item, 10 * BYTES_PER_US, 0)
    # Half is for a and then b, which come from one machine.
    assert through(ingress) == ["a: 1 to 0 0-20", "c: 3 to 0 0-20", "b: 2 to 0 20-30"]


def test_message_begins_when_its_first_bit_moves():
    begun: list[str] = []
    egress = Egress(Network(default=Link(50, 1)), 0, begun.append)
    egress.offer(0, 1, "a", 10 * BYTES_PER_US, 0)
    egress.offer(0, 2, "b", 10 * BYTES_PER_US, 0)
    assert begun == ["a"]
    egress.complete()
    assert begun == ["a", "b"]


def test_reno_bounds_the_rate_of_a_lossy_link():
    """1 % at 100 ms there and back: sqrt(1.5 / 0.01) = 12.25 packets; CUBIC's window is 5.9."""
    link = Link(50, 1, loss_percent=1)
    assert link.loss_window_bytes == pytest.approx(12.2474 * SEGMENT_BYTES, rel=1e-4)
    assert link.rate_gbps() == pytest.approx(12.2474 * SEGMENT_BYTES * 8 / 0.1 / 1e9, rel=1e-4)
    assert link.rate_gbps(4) == 4 * link.rate_gbps()


def test_cubic_bounds_the_rate_of_a_long_link_that_loses_little():
    """0.001 % at 100 ms: 1.054 x (0.1 / 0.00001) ^ 0.75 = 1,054 packets; Reno's are 387."""
    link = Link(50, 1, loss_percent=0.001)
    assert link.loss_window_bytes == pytest.approx(1054 * SEGMENT_BYTES)
    assert link.rate_gbps() == pytest.approx(0.1221, rel=1e-3)
    assert link.rate_gbps(16) == 1
    assert link.connections == 9  # 12.5 MB in a round trip, 1.5 MB a window


def test_link_without_loss_or_delay_is_bound_by_nothing_else():
    assert Link(50, 1).loss_window_bytes == math.inf
    assert Link(50, 1).recovery(10**9, 1).chance == 0
    assert Link(0, 1, loss_percent=1).rate_gbps() == 1


def test_lost_packet_is_sent_again_behind_what_is_queued():
    """A quarter later than a round trip; a long message has filled a queue with another one."""
    link = Link(50, 1, loss_percent=1)
    one = link.recovery(SEGMENT_BYTES, 1)
    assert one.chance == pytest.approx(0.01)
    assert one.late_us == pytest.approx(125_000)
    assert one.mean_us == pytest.approx(0.01 * one.late_us)
    assert link.recovery(2 * SEGMENT_BYTES, 1).chance == pytest.approx(0.0199)
    # Of a long message only what is in flight at its end: two round trips, 17,266 packets.
    long = Link(50, 1, loss_percent=1e-3).recovery(10**9, 1)
    assert long.late_us == pytest.approx(250_000)
    assert long.chance == pytest.approx(1 - 0.99999**17_266)


def test_message_is_late_by_the_mean_or_as_it_is_drawn():
    network = Network(default=Link(50, 1, loss_percent=1))
    recovery = network.link(0, 1).recovery(30_000, network.rate_gbps(0, 1))
    assert network.delay_us(0, 1, 30_000) == pytest.approx(50_000 + recovery.mean_us)
    drawn = network.drawn(7)
    delays = [drawn.delay_us(0, 1, 30_000) for _ in range(1_000)]
    assert set(delays) == {50_000, 50_000 + recovery.late_us}
    assert sum(delays) / 1_000 == pytest.approx(50_000 + recovery.mean_us, rel=0.05)
    again = network.drawn(7)
    assert [again.delay_us(0, 1, 30_000) for _ in range(1_000)] == delays


@pytest.mark.parametrize(
    ("name", "will_do"),
    [
        ("home", True),
        ("mobile", False),  # loses ten times as many, and some overtake others
        ("continental", False),  # holds more than a window is sure to
        ("25ms-0.1gbps", False),  # loses nothing: BBR would be slower
    ],
)
def test_one_connection_will_do_where_losses_are_few_and_the_path_is_short(
    name: str, will_do: bool
) -> None:
    network = load_network(f"netem/profiles/{name}.toml")
    assert replace(network, outruns_loss=True).one_will_do is will_do
    assert not network.one_will_do


def test_windows_that_outrun_losses_need_few_connections():
    link = Link(40, 0.3, loss_percent=0.01)
    network = Network(default=link)
    outrunning = replace(network, outruns_loss=True)
    assert network.over_enough().connections == 14
    assert outrunning.over_enough().connections == 4
    assert network.over(1).rate_gbps(0, 1) < 0.03
    assert outrunning.over(1).rate_gbps(0, 1) == 0.3
    # Without loss as many as the path needs, as ever.
    clean = Network(default=Link(40, 3.0), outruns_loss=True)
    assert clean.over_enough().connections == Link(40, 3.0).connections == 15


@pytest.mark.parametrize(
    ("network", "uplink_gbps"),
    [
        (Network(default=Link(25, 0.03)), 0.03),
        (Network(default=None, links={(1, 0): Link(25, 0.03), (1, 2): Link(9, 0.03)}), 0.03),
        (Network(default=None, links={(1, 0): Link(25, 0.03), (1, 2): Link(9, 0.04)}), None),
        (Network(default=None, links={(1, 0): Link(9, 0.03), (1, 2): Link(9, 0.0294)}), 0.03),
        (
            Network(
                default=None,
                links={(1, 0): Link(25, 0.03), (1, 2): Link(9, 0.04)},
                interfaces=(Interface((1,), egress_gbps=0.03),),
            ),
            0.03,
        ),
        (Network(default=Link(25, 0.03), interfaces=(Interface((0, 1), egress_gbps=0.03),)), None),
        (Network(default=Link(25, 0.03), interfaces=(Interface((1,), egress_gbps=1.0),)), None),
        (Network(default=None, links={(0, 1): Link(25, 0.03)}), None),
    ],
    ids=[
        "alike",
        "delays differ",
        "rates differ",
        "measured",
        "egress is less",
        "two ranks",
        "more",
        "none",
    ],
)
def test_links_share_an_uplink_that_each_of_them_fills(
    network: Network, uplink_gbps: float | None
) -> None:
    assert network.uplink_gbps(1) == uplink_gbps
