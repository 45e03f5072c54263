"""The fast clock agrees with the simulator."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpipe.network.link import Interface, Link, Network
from dpipe.schedule.generate import generate
from dpipe.search.clock import Pipeline, Replay, programs_of, schedule_of
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone

LINK = st.builds(Link, st.integers(0, 30), st.sampled_from([0.5, 1.0, 4.0]))
NETWORKS = st.builds(
    Network,
    default=LINK,
    links=st.dictionaries(st.sampled_from([(0, 1), (1, 0), (1, 2), (2, 1), (2, 0)]), LINK),
    interfaces=st.sampled_from(
        [(), (Interface((0, 2)),), (Interface((1, 2), 0.7),), (Interface((0, 1, 2)),)]
    ),
)


@settings(deadline=None, max_examples=80)
@given(
    NETWORKS,
    st.sampled_from(
        [("gpipe", 1), ("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2), ("zb-v", 2)]
    ),
    st.integers(1, 5),
    st.integers(0, 2_000_000),
)
def test_clock_takes_as_long_as_the_simulation(network, generator, microbatches, size):
    name, per_rank = generator
    cost = Cost.uniform(3 * per_rank, 5_000, 11_000, message_bytes=size)
    schedule = generate(name, 3 * per_rank, microbatches, stages_per_rank=per_rank)
    tails_us = (0.0,) * 3
    placement = schedule.rank_of_stage
    pipeline = Pipeline(cost, network, microbatches, 3, tails_us, placement=placement)
    times = Replay(pipeline, programs_of(schedule)).run()
    simulated_us = simulate_alone(Scenario(schedule, cost, network)).duration_us
    assert times.score_us == pytest.approx(simulated_us, rel=1e-9)
    assert schedule_of(pipeline, times.programs, schedule.name) == schedule


def test_clock_says_where_an_order_comes_to_a_halt():
    cost = Cost.uniform(2, 10, 20, message_bytes=0)
    pipeline = Pipeline(cost, Network(), 1, 2, (0.0, 0.0))
    (forward, *backward), last = programs_of(generate("zero-bubble", 2, 1))
    assert Replay(pipeline, ((*backward, forward), last)).run().score_us == float("inf")
