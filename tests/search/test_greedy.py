from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.greedy import greedy

from dpipe.network.link import Link, Network
from dpipe.schedule.check import check, peak_in_flight
from dpipe.schedule.generate import zero_bubble
from dpipe.schedule.text import draw
from dpipe.search.clock import INPUT, Pipeline
from dpipe.search.greedy import Greedy, Rule
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from dpipe.wire.format import wire_bytes

SLOT = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=0)


def hop_of(delay_us: float) -> Network:
    return Network(default=Link(delay_us / 1e3, 1))


def step_us(schedule, network, cost=SLOT):
    return simulate_alone(Scenario(schedule, cost, network)).duration_us


def test_greedy_fills_the_wait_for_a_message_with_weight_gradients():
    schedule = greedy(2, 4, SLOT, hop_of(10))
    rows = [line.rstrip() for line in draw(schedule).splitlines()]
    assert rows == [
        "rank 0 | 0F0 0F1  .  0I0 0F2 0W0 0I1 0F3 0W1 0I2 0W2  .  0I3 0W3",
        "rank 1 |  .  1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2 1F3 1I3 1W3  .",
    ]
    assert step_us(schedule, hop_of(10)) == 160
    assert step_us(zero_bubble(2, 4), hop_of(10)) == 170


def test_greedy_with_more_in_flight_hides_a_longer_hop():
    shallow, deep = (
        step_us(greedy(2, 8, SLOT, hop_of(40), in_flight=n), hop_of(40)) for n in (2, 8)
    )
    assert deep < shallow


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 4), st.integers(1, 8), st.integers(1, 8), st.integers(0, 50), st.booleans())
def test_more_in_flight_changes_nothing_where_no_stage_was_held_back(
    stages, microbatches, in_flight, delay_us, forward_first
):
    cost = Cost.uniform(stages, forward_us=10, backward_us=20, message_bytes=1000)
    pipeline = Pipeline(cost, hop_of(delay_us), microbatches, stages, (0.0,) * stages)
    rule = Rule((in_flight,) * stages, (microbatches,) * stages, forward_first)
    deeper = replace(rule, depths=tuple(range(in_flight, in_flight + stages)))
    assert deeper.deepens(rule)
    assert stages == 1 or not rule.deepens(deeper)
    assert not replace(deeper, forward_first=not forward_first).deepens(rule)
    plain = Greedy(pipeline, rule)
    programs = plain.run().programs
    assert plain.held_back or Greedy(pipeline, deeper).run().programs == programs


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 4), st.integers(1, 8), st.integers(1, 10), st.integers(1, 10), st.integers(0, 50)
)
def test_greedy_passes_check_and_keeps_the_memory_limit(
    stages, microbatches, in_flight, limit, delay_us
):
    cost = Cost.uniform(stages, forward_us=10, backward_us=20, message_bytes=1000)
    schedule = greedy(stages, microbatches, cost, hop_of(delay_us), in_flight, limit)
    check(schedule)
    assert max(peak_in_flight(schedule)) <= limit


@pytest.mark.parametrize(
    ("delay_ms", "gbps", "fp32_s", "bf16_s"),
    [
        (0.1, 10, 13.55, 13.48),
        (1, 5, 13.71, 13.56),
        (5, 2, 14.20, 13.83),
        (10, 1, 21.4, 14.25),
        (50, 1, 22.2, 14.69),
    ],
)
def test_greedy_reaches_what_compute_and_egress_allow(delay_ms, gbps, fp32_s, bf16_s):
    """The bounds of the published networks, computed from compute, ramp and shared egress alone."""
    network = Network(default=Link(delay_ms, gbps))
    for wire, seconds in (("none", fp32_s), ("bf16", bf16_s)):
        cost = Cost.uniform(12, 66_000, 132_000, message_bytes=wire_bytes(wire, 4 * 2**20))
        assert step_us(greedy(12, 64, cost, network, in_flight=40), network, cost) / 1e6 <= seconds


def test_greedy_puts_off_weight_gradients_that_would_hold_up_a_message():
    """The link brings an input every 25, and a forward and an input gradient take 20."""
    cost = replace(SLOT, activation_bytes=(3_125,))
    network = Network(default=Link(0, 1))
    pipeline = Pipeline(cost, network, 4, 2, (0.0, 0.0))
    rule = Rule((4, 4), (4, 4))
    at_once, put_off = (
        Greedy(pipeline, replace(rule, put_off=number)).run() for number in ((), (0, 4))
    )
    kinds = ["".join("FIW"[step[0]] for step in times.programs[1]) for times in (at_once, put_off)]
    assert kinds == ["FIWFIFIWFIWW", "FIFIFIFIWWWW"]
    last_sent_us = [times.start_us[INPUT, 1, 3] for times in (at_once, put_off)]
    assert last_sent_us == [125, 120]


def test_greedy_follows_uneven_stages():
    slow_end = replace(SLOT, forward_us=(10, 30), input_us=(10, 30), weight_us=(10, 30))
    schedule = greedy(2, 4, slow_end, hop_of(10))
    check(schedule)
    assert step_us(schedule, hop_of(10), slow_end) <= step_us(
        zero_bubble(2, 4), hop_of(10), slow_end
    )
