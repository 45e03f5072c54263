from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpipe.errors import ScheduleError
from dpipe.network.link import Link, Network
from dpipe.schedule.check import check, peak_in_flight
from dpipe.schedule.exchange import exchange
from dpipe.schedule.generate import generate, least_in_flight
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.search import first_fit, search
from dpipe.timeline.simulate import Steady, period
from dpipe.timeline.simulation import Simulation

REPLICAS = [
    None,
    *(Replicas(exchange(kind, 2, 2)) for kind in ("all-reduce", "sharded", "local-sgd", "central")),
    Replicas(exchange("all-reduce", 2, 2), delayed=True),
    Replicas(exchange("parameter-server", 2, 2), servers=(0, 1, 0)),
]
FAST, SLOW = Network(default=Link(0.01, 100)), Network(default=Link(50, 1))


def cost(num_stages: int) -> Cost:
    return Cost.uniform(num_stages, forward_us=10_000, backward_us=20_000, message_bytes=1_000_000)


def test_search_picks_zero_bubble_on_a_fast_network():
    found = search(4, 16, cost(4), FAST, ballots=Network(default=Link(0, 100)))
    assert found.name.startswith("auto: zero-bubble in_flight=")


def test_search_runs_deeper_on_a_slow_network():
    fast, slow = (search(4, 32, cost(4), network) for network in (FAST, SLOW))
    assert max(peak_in_flight(slow)) > max(peak_in_flight(fast))


def test_search_lets_weight_gradients_wait_for_a_slow_network():
    assert search(4, 16, cost(4), SLOW).name.startswith("auto: greedy in_flight=")


@settings(deadline=None, max_examples=10)
@given(
    st.lists(st.integers(1, 30), min_size=3, max_size=3),
    st.integers(1, 6),
    st.sampled_from([FAST, SLOW]),
    st.sampled_from(REPLICAS),
)
def test_search_finds_what_it_would_if_it_gave_no_candidate_up(
    forward_ms, microbatches, network, replicas
):
    forward = tuple(1e3 * ms for ms in forward_ms)
    costs = replace(
        cost(len(forward)), forward_us=forward, reduce_bytes=(3_000_000,) * len(forward)
    )
    found = search(len(forward), microbatches, costs, network, replicas=replicas)
    with pytest.MonkeyPatch.context() as patient:
        patient.delattr(Steady, "compute")
        assert search(len(forward), microbatches, costs, network, replicas=replicas) == found


@pytest.mark.parametrize("network", [FAST, SLOW], ids=["fast", "slow"])
def test_search_soon_gives_up_what_falls_behind(network, monkeypatch):
    computed = Counter()
    plain = Simulation.compute

    def counting(self, rank, action):
        computed[self] += isinstance(self, Steady)
        plain(self, rank, action)

    monkeypatch.setattr(Simulation, "compute", counting)
    search(4, 16, cost(4), network)
    raced = [count for race, count in computed.items() if isinstance(race, Steady)]
    assert sum(raced) < 0.5 * len(raced) * max(raced)


def test_search_is_deterministic():
    assert search(4, 12, cost(4), SLOW, memory_limit=6) == search(
        4, 12, cost(4), SLOW, memory_limit=6
    )


@pytest.mark.parametrize("network", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble"])
def test_search_is_never_slower_than_a_schedule_by_name(name, network):
    found = period(search(4, 12, cost(4), network), cost(4), network)
    by_name = period(generate(name, 4, 12), cost(4), network)
    assert found <= by_name + 0.5  # it compares whole microseconds


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 10), st.integers(0, 20))
def test_search_keeps_the_memory_limit(ranks, per_rank, microbatches, more):
    limit = least_in_flight(ranks, per_rank, microbatches) + more
    stages = ranks * per_rank
    found = search(
        stages, microbatches, cost(stages), SLOW, memory_limit=limit, stages_per_rank=per_rank
    )
    assumed = first_fit(stages, microbatches, memory_limit=limit, stages_per_rank=per_rank)
    for schedule in (found, assumed):
        check(schedule)
        assert max(peak_in_flight(schedule)) <= limit
    assert assumed.rank_of_stage == found.rank_of_stage


@pytest.mark.parametrize(
    ("stages", "per_rank", "limit", "message"),
    [
        (4, 1, 0, "holds at most 0 activations a rank; raise the memory limit to 1$"),
        (8, 2, 4, "raise the memory limit to 5, or put fewer stages on a rank"),
    ],
)
def test_search_says_what_would_fit(stages, per_rank, limit, message):
    with pytest.raises(ScheduleError, match=message):
        search(stages, 8, cost(stages), FAST, memory_limit=limit, stages_per_rank=per_rank)
    with pytest.raises(ScheduleError, match=message):
        first_fit(stages, 8, memory_limit=limit, stages_per_rank=per_rank)


def test_search_refuses_sizes_that_make_no_sense():
    with pytest.raises(ScheduleError, match="5 stages cannot be dealt out by 2 a rank"):
        search(5, 8, cost(5), FAST, stages_per_rank=2)
