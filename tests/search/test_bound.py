from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpipe.network.link import Link, Network
from dpipe.schedule.generate import generate
from dpipe.search.bound import lower_bound_us
from dpipe.search.clock import Pipeline, Replay, programs_of
from dpipe.search.greedy import Greedy, Rule
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period

SLOT = Cost.uniform(3, forward_us=10, backward_us=20, message_bytes=0)
AT_ONCE = Network(default=Link(0, 1))


def pipeline(cost=SLOT, network=AT_ONCE, microbatches=4, **changes) -> Pipeline:
    ranks = cost.num_stages
    return replace(Pipeline(cost, network, microbatches, ranks, (0.0,) * ranks), **changes)


def test_bound_is_ramp_and_work_where_hops_cost_nothing():
    """Rank 2 begins behind two forwards, and has four times F, I and W to do."""
    assert lower_bound_us(pipeline()) == 20 + 4 * 30


def test_bound_of_steps_that_overlap_is_a_rank_s_work():
    assert lower_bound_us(pipeline(microbatches=16, steps_overlap=True)) == 16 * 30


def test_bound_of_steps_that_overlap_has_the_way_there_and_back():
    """Rank 0 has its forward, waits for two stages both ways, and has I and W of what is last."""
    assert lower_bound_us(pipeline(microbatches=1, steps_overlap=True)) == 10 + 20 + 20 + 20


def test_bound_has_a_narrow_egress():
    """A message takes 80: all of rank 1's are on its way one after another."""
    narrow = replace(SLOT, activation_bytes=(10_000,) * 2, gradient_bytes=(10_000,) * 2)
    bound_us = lower_bound_us(pipeline(narrow, microbatches=8))
    assert bound_us >= 16 * 80 + 10 + 80 + 10


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.integers(1, 30), min_size=3, max_size=3),
    st.integers(1, 6),
    st.integers(0, 40),
    st.integers(0, 9_000),
    st.booleans(),
)
def test_no_order_is_below_the_bound(forward, microbatches, delay_us, size, overlap):
    cost = replace(
        SLOT, forward_us=tuple(forward), activation_bytes=(size,) * 2, gradient_bytes=(size,) * 2
    )
    network = Network(default=Link(delay_us / 1e3, 1))
    small = pipeline(cost, network, microbatches, steps_overlap=overlap)
    bound_us = lower_bound_us(small) * (1 - 1e-9)
    rule = Rule((microbatches,) * 3, (microbatches,) * 3)
    orders = [Greedy(small, rule).run()]
    for name in ("gpipe", "1f1b", "zero-bubble"):
        schedule = generate(name, 3, microbatches)
        orders.append(Replay(small, programs_of(schedule)).run())
        ballots = None if overlap else AT_ONCE
        assert period(Scenario(schedule, cost, network, ballots=ballots)) >= bound_us
    assert min(times.score_us for times in orders) >= bound_us


@pytest.mark.parametrize(("whole_us", "bound_us"), [(15, 100 + 10 + 15), (20, 20 + 4 * 30)])
def test_bound_knows_that_a_whole_backward_pass_may_take_less(whole_us, bound_us):
    """Then the last gradient's way back counts."""
    cheaper = replace(SLOT, backward_us=(whole_us,) * 3)
    assert lower_bound_us(pipeline(cheaper)) == bound_us
