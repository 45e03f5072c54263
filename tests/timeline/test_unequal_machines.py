"""A step on machines that are not alike, by hand."""

from dataclasses import replace
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpipe.errors import ScheduleError
from dpipe.machines.machine import Cluster, Machine
from dpipe.machines.seats import network_of, seats_in_order
from dpipe.network.link import SEGMENT_BYTES, Interface, Link, Network
from dpipe.schedule.exchange import direct, silent
from dpipe.schedule.generate import generate, gpipe
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period, simulate, simulate_alone
from dpipe.timeline.span import Lane, Timeline

BYTES_PER_US = 125  # at 1 Gbit/s
COST = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=4 * BYTES_PER_US)
LINK = Link(1e-3, 1)  # a microsecond of delay


def spans(timeline: Timeline, *lanes: Lane) -> list[str]:
    """One line a rank and lane: what ran from when to when."""
    lines = []
    for rank in range(timeline.num_ranks):
        for lane in lanes:
            ran = [f"{s.action} {s.start_us:g}-{s.end_us:g}" for s in timeline.on(rank, lane)]
            lines.append(f"{rank} {lane}: {'  '.join(ran)}")
    return lines


def lines(text: str) -> list[str]:
    return dedent(text).strip().splitlines()


def alone(network: Network, **of) -> Timeline:
    return simulate_alone(Scenario(gpipe(2, 1), of.pop("cost", COST), network, **of))


def test_directions_of_a_link_differ():
    timeline = alone(Network("n", None, {(0, 1): LINK, (1, 0): Link(5e-3, 0.5)}))
    assert spans(timeline, Lane.COMPUTE, Lane.RECV) == lines("""
        0 compute: 0F0 0-10  0B0 58-78
        0 recv: 0RECV_B0 50-58
        1 compute: 1F0 15-25  1B0 25-45
        1 recv: 1RECV_F0 11-15
    """)


def test_message_passes_a_slow_ingress_from_its_first_bit_on():
    """It leaves within 4; the first bit comes at 11, and all of it takes 8."""
    timeline = alone(Network(default=LINK, interfaces=(Interface((1,), ingress_gbps=0.5),)))
    assert spans(timeline, Lane.COMPUTE, Lane.SEND, Lane.RECV) == lines("""
        0 compute: 0F0 0-10  0B0 54-74
        0 send: 0SEND_F0 10-14
        0 recv: 0RECV_B0 50-54
        1 compute: 1F0 19-29  1B0 29-49
        1 send: 1SEND_B0 49-53
        1 recv: 1RECV_F0 11-19
    """)


def test_relayed_message_passes_the_interface_of_rank_0_both_ways():
    """Half a microsecond after rank 1 begins to send, its first bit is at rank 0, which takes it in
    and sends it on within 8, both at once; the last bit is at rank 2 half a microsecond later.
    """
    relay = Interface((0,), egress_gbps=0.5, ingress_gbps=0.5)
    cost = Cost.uniform(3, forward_us=10, backward_us=20, message_bytes=4 * BYTES_PER_US)
    network = Network(default=LINK, interfaces=(relay,))
    relayed = replace(network, relayed=frozenset({(1, 2), (2, 1)}))

    def arrival(network: Network) -> float:
        timeline = simulate_alone(Scenario(gpipe(3, 1), cost, network))
        (span,) = timeline.on(2, Lane.RECV)
        (sent,) = (span for span in timeline.on(1, Lane.SEND) if "SEND_F" in str(span.action))
        return span.end_us - sent.start_us

    assert arrival(network) == 5  # 4 on the way, and the delay
    assert arrival(relayed) == 9


def test_relayed_links_share_the_relay():
    """Two replicas of two stages; a message of each leaves at 10. That of the second is sent on
    when that of the first has left, 14 to 18, and its stage begins at 18.5 instead of 15.
    """
    relay = Interface((0,), egress_gbps=1, ingress_gbps=1)
    network = Network(default=LINK, interfaces=(relay,))
    relayed = replace(network, relayed=frozenset({(2, 3), (3, 2)}))
    begins = []
    for each in (network, relayed):
        timeline = alone(each, replicas=Replicas(silent(2)))
        first, *_ = timeline.on(3, Lane.COMPUTE)
        begins.append(first.start_us)
    assert begins == [15, 18.5]


def test_replicas_of_two_machines_share_both_interfaces():
    """Ranks 0 and 2 are on one machine, 1 and 3 on the other. What leaves at 10 from both goes one
    after another.
    """
    network = Network(default=LINK, interfaces=(Interface((0, 2)), Interface((1, 3))))
    timeline = alone(network, replicas=Replicas(silent(2)))
    assert spans(timeline, Lane.SEND, Lane.COMPUTE) == lines("""
        0 send: 0SEND_F0 10-14
        0 compute: 0F0 0-10  0B0 50-70
        1 send: 1SEND_B0 45-49
        1 compute: 1F0 15-25  1B0 25-45
        2 send: 0SEND_F0 14-18
        2 compute: 0F0 0-10  0B0 54-74
        3 send: 1SEND_B0 49-53
        3 compute: 1F0 19-29  1B0 29-49
    """)


def test_senders_of_two_machines_share_an_ingress():
    """What leaves 0 and 2 at 10 comes to one machine at 11, and takes twice as long."""
    network = Network(default=LINK, interfaces=(Interface((1, 3), ingress_gbps=1),))
    timeline = alone(network, replicas=Replicas(silent(2)))
    assert spans(timeline, Lane.RECV)[1::2] == ["1 recv: 1RECV_F0 11-19", "3 recv: 1RECV_F0 11-19"]


def test_stages_of_one_machine_pass_no_interface():
    interfaces = (Interface((0, 1), 0.001, 0.001),)
    links = {(0, 1): LINK, (1, 0): LINK}
    with_interface = alone(Network("n", None, links, interfaces=interfaces))
    assert with_interface == alone(Network("n", None, links))


def test_replicas_compute_at_the_speed_of_their_machines():
    slow = replace(COST, forward_us=(30, 10), backward_us=(60, 20))
    timeline = alone(Network(default=LINK), replicas=Replicas(silent(2)), costs=(COST, slow))
    assert spans(timeline, Lane.COMPUTE) == lines("""
        0 compute: 0F0 0-10  0B0 50-70
        1 compute: 1F0 15-25  1B0 25-45
        2 compute: 0F0 0-30  0B0 70-130
        3 compute: 1F0 35-45  1B0 45-65
    """)


def test_replicas_that_are_cut_differently_send_what_their_own_cut_does():
    large = replace(COST, activation_bytes=(16 * BYTES_PER_US,))
    timeline = alone(Network(default=LINK), replicas=Replicas(silent(2)), costs=(COST, large))
    assert spans(timeline, Lane.SEND) == lines("""
        0 send: 0SEND_F0 10-14
        1 send: 1SEND_B0 45-49
        2 send: 0SEND_F0 10-26
        3 send: 1SEND_B0 57-61
    """)
    assert [span.num_bytes for span in timeline.on(2, Lane.SEND)] == [16 * BYTES_PER_US]


def test_slowest_replica_sets_the_pace_of_all():
    slow = replace(COST, forward_us=(30, 10), backward_us=(60, 20))
    of = gpipe(2, 1), COST, Network(default=LINK)
    pair = Replicas(direct(2))
    ballots = Network(default=LINK)
    times = [
        simulate(*of, replicas=pair, ballots=ballots, costs=costs).step_us
        for costs in [(), (COST, COST), (COST, slow), (slow, slow)]
    ]
    assert times[0] == times[1] < times[2] <= times[3]


def test_message_of_a_lossy_link_is_later_on_average():
    """One packet in a hundred is sent again; a window of 17.7 kB bounds nothing in that time."""
    cost = Cost.uniform(2, 10, 20, message_bytes=SEGMENT_BYTES)
    lossy = Link(1e-3, 1, loss_percent=1)
    sent_us = SEGMENT_BYTES / BYTES_PER_US
    timeline = alone(Network(default=lossy), cost=cost)
    arrival_us = timeline.on(1, Lane.RECV)[0].end_us
    # A quarter more than a round trip, whose way there the message's own bytes fill.
    again_us = 1.25 * (2 + 2)
    assert arrival_us == pytest.approx(10 + sent_us + 1 + 0.01 * again_us)


def test_step_of_a_lossy_network_is_the_middle_one_of_several_that_are_drawn():
    """A step waits for the latest of its messages: the mean lateness of each says too little."""
    cost = Cost.uniform(4, 10_000, 20_000, message_bytes=SEGMENT_BYTES)
    network = Network(default=Link(20, 1, loss_percent=10))
    drawn = simulate(gpipe(4, 8), cost, network).step_us
    mean = period(Scenario(gpipe(4, 8), cost, network))
    without = simulate(gpipe(4, 8), cost, Network(default=Link(20, 1))).step_us
    assert without < mean < drawn < without + 24 * 50_000
    assert simulate(gpipe(4, 8), cost, network).step_us == drawn


def test_costs_of_replicas_must_fit():
    with pytest.raises(ScheduleError, match="there are 2 replicas, but the costs of 1"):
        alone(Network(), replicas=Replicas(silent(2)), costs=(COST,))
    with pytest.raises(ScheduleError, match="there are 1 replicas, but the costs of 2"):
        alone(Network(), costs=(COST, COST))
    three = Cost.uniform(3, 1, 1, 1)
    with pytest.raises(ScheduleError, match="has 2 stages, the cost of replica 1 3"):
        alone(Network(), replicas=Replicas(silent(2)), costs=(COST, three))


@pytest.mark.parametrize(
    ("interfaces", "alike"),
    [
        ((), True),
        ((Interface((0, 1)), Interface((2, 3))), True),
        ((Interface((0,), 0.5), Interface((2,), 0.5)), True),
        ((Interface((0,), 0.5),), False),
        ((Interface((0, 1)),), False),
        ((Interface((0, 2)), Interface((1, 3))), False),
        ((Interface((1,), ingress_gbps=1), Interface((3,), ingress_gbps=1)), False),
        ((Interface((3,), ingress_gbps=1),), False),
    ],
)
def test_one_replica_stands_for_all_only_where_their_interfaces_are_alike(interfaces, alike):
    network = Network(default=LINK, interfaces=interfaces)
    assert Replicas(direct(2)).alike(network, per_replica=2) is alike


EQUAL = Cluster(tuple(Machine(name) for name in "abcd"), default_link=Link(3, 1))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("replicas", [None, Replicas(direct(2, 3))])
def test_equal_machines_are_a_network_of_one_link_to_the_last_bit(name, replicas):
    num_stages = 4 if replicas is None else 2
    cost = Cost.uniform(num_stages, 1e4, 2e4, 3_000_000, update_us=7)
    cost = replace(cost, reduce_bytes=(5_000_000,) * num_stages)
    schedule = generate(name, num_stages, 6)
    timelines = [
        simulate(schedule, cost, network, replicas=replicas)
        for network in (
            network_of(EQUAL, seats_in_order(EQUAL)),
            Network(default=EQUAL.default_link),
        )
    ]
    assert timelines[0] == timelines[1]


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 6), st.sampled_from([0.25, 1.0, 8.0]))
def test_ingress_never_makes_a_step_shorter(stages, microbatches, gbps):
    cost = Cost.uniform(stages, 100, 200, message_bytes=50 * BYTES_PER_US)
    schedule = generate("1f1b", stages, microbatches)
    free = Network(default=LINK)
    bound = replace(free, interfaces=tuple(Interface((r,), None, gbps) for r in range(stages)))
    took_us = simulate_alone(Scenario(schedule, cost, bound)).duration_us
    free_us = simulate_alone(Scenario(schedule, cost, free)).duration_us
    if gbps >= 2 * LINK.bandwidth_gbps:  # two neighbours at most
        assert took_us == pytest.approx(free_us)
    else:
        assert took_us >= free_us - 1e-6
