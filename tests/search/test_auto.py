import heapq
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.settled import settled

from dpipe.errors import ScheduleError
from dpipe.network.link import Link, Network
from dpipe.network.profile import load_network
from dpipe.schedule.check import check, peak_in_flight
from dpipe.schedule.exchange import exchange
from dpipe.schedule.generate import generate, interleaved, least_in_flight, zb_v
from dpipe.schedule.links import neighbours
from dpipe.search.auto import first_fit, pipeline_on, search
from dpipe.search.bound import lower_bound_us
from dpipe.search.candidates import published
from dpipe.search.clock import PipelineClock
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period

_SEARCH_HEAPS = 6
REPLICAS = [
    None,
    *(Replicas(exchange(kind, 2, 2)) for kind in ("all-reduce", "sharded", "local-sgd", "central")),
    Replicas(exchange("all-reduce", 2, 2), delayed=True),
    Replicas(exchange("parameter-server", 2, 2), servers=(0, 1, 0, 1)),
]
PROFILES = Path(__file__).parents[2] / "netem" / "profiles"
UNLIKE = Network(default=Link(5, 2), links={(0, 1): Link(30, 0.5), (1, 0): Link(20, 1)})
FAST = Network(default=Link(0.01, 100))
SLOW = Network(default=Link(50, 1))
PUBLISHED = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("zero-bubble", {"memory_limit": 4}),  # ZB-H1: as much memory as 1F1B
    ("zero-bubble", {"in_flight": 7}),  # ZB-H2: about twice as much
    ("zero-bubble", {}),
]


def cost(num_stages: int) -> Cost:
    return Cost.uniform(num_stages, forward_us=10_000, backward_us=20_000, message_bytes=1_000_000)


def step_us(schedule, costs, network, replicas=None, ballots=None):
    return period(Scenario(schedule, costs, network, replicas=replicas, ballots=ballots))


def test_search_that_need_not_be_exact_ends_at_an_order_that_is_close(monkeypatch):
    clocks = []
    monkeypatch.setattr(PipelineClock, "__init__", counting(PipelineClock.__init__, clocks))
    of = (6, 24, cost(6), UNLIKE)
    exact = step_us(search(*of, ballots=UNLIKE), cost(6), UNLIKE, ballots=UNLIKE)
    every = len(clocks)
    clocks.clear()
    close = search(*of, ballots=UNLIKE, memory_limit=24, close=0.05)
    assert step_us(close, cost(6), UNLIKE, ballots=UNLIKE) <= 1.05 * exact
    assert max(peak_in_flight(close)) <= 24
    assert len(clocks) < every / 3


def counting(function, calls):
    """`function`, with a note of each call."""

    def counted(*arguments):
        calls.append(arguments)
        function(*arguments)

    return counted


def test_search_holds_no_more_than_zero_bubble_where_that_is_as_fast():
    published = generate("zero-bubble", 4, 16, in_flight=6)
    found = search(4, 16, cost(4), FAST)
    assert step_us(found, cost(4), FAST) <= step_us(published, cost(4), FAST)
    assert max(peak_in_flight(found)) <= max(peak_in_flight(published))


@pytest.mark.parametrize(("network", "slower"), [(FAST, 1.05), (SLOW, 1.5)], ids=["fast", "slow"])
def test_search_needs_memory_on_a_slow_network(network, slower):
    tight, free = (
        step_us(search(4, 32, cost(4), network, memory_limit=limit), cost(4), network)
        for limit in (6, None)
    )
    assert (tight > slower * free) == (network == SLOW)


def test_search_keeps_the_middle_of_the_pipeline_as_full_as_its_start():
    """With twelve stages, later ranks also need all of their twelve micro-batches."""
    held = peak_in_flight(search(12, 12, cost(12), SLOW, ballots=SLOW))
    assert min(held[:6]) == 12


@pytest.mark.some_cases(9)
@pytest.mark.parametrize("votes", [False, True], ids=["overlap", "vote"])
@pytest.mark.parametrize("replicas", REPLICAS)
@pytest.mark.parametrize("network", [FAST, SLOW], ids=["fast", "slow"])
def test_search_is_never_slower_than_a_published_schedule(network, replicas, votes):
    costs = replace(cost(4), reduce_bytes=(3_000_000,) * 4)
    ballots = network if votes else None
    found = search(4, 6, costs, network, replicas=replicas, ballots=ballots)
    found_us = step_us(found, costs, network, replicas, ballots)
    for name, parameters in PUBLISHED:
        published = generate(name, 4, 6, **parameters)
        # It compares whole microseconds.
        assert found_us <= step_us(published, costs, network, replicas, ballots) + 0.5


@pytest.mark.some_cases(17)
@pytest.mark.parametrize("votes", [False, True], ids=["overlap", "vote"])
@pytest.mark.parametrize("network", [FAST, SLOW, UNLIKE], ids=["fast", "slow", "unlike"])
@pytest.mark.parametrize(
    "shape", [(2, 1, 5), (4, 1, 3), (5, 1, 12), (8, 2, 6), (6, 2, 3), (6, 3, 4)]
)
@pytest.mark.parametrize("share", [1, 0.5], ids=["all memory", "half"])
def test_search_is_never_slower_than_a_generator_with_its_own_parameters(
    shape, network, votes, share
):
    """1F1B, interleaved, ZB-H1, ZB-H2, ZB-V: where they fit."""
    stages, per_rank, microbatches = shape
    costs = Cost.uniform(stages, forward_us=9_000, backward_us=20_000, message_bytes=1_000_000)
    costs = replace(costs, forward_us=(14_000, *costs.forward_us[1:]))
    ballots = network if votes else None
    least = least_in_flight(stages // per_rank, per_rank, microbatches)
    limit = max(least, round(share * per_rank * microbatches))
    settings = {"memory_limit": limit, "stages_per_rank": per_rank, "ballots": ballots}
    found = search(stages, microbatches, costs, network, **settings)
    found_us = step_us(found, costs, network, ballots=ballots)
    for schedule in published(stages, microbatches, per_rank):
        if max(peak_in_flight(schedule)) <= limit:
            assert found_us <= step_us(schedule, costs, network, ballots=ballots) + 0.5


def test_search_takes_the_placement_of_zb_v_where_that_is_faster():
    found = search(8, 12, cost(8), FAST, memory_limit=8, stages_per_rank=2, ballots=FAST)
    in_turn = interleaved(4, 2, 12)
    assert found.rank_of_stage == zb_v(8, 12).rank_of_stage
    assert max(peak_in_flight(found)) <= 8 < max(peak_in_flight(in_turn))


def test_search_knows_published_schedules_that_are_deeper_than_a_step_has_micro_batches():
    """ZB-H2 with fewer micro-batches than its warm-up is long: middle ranks do all forwards."""
    costs = cost(12)
    found_us = step_us(search(12, 12, costs, FAST, ballots=FAST), costs, FAST, ballots=FAST)
    zb_h2 = generate("zero-bubble", 12, 12, in_flight=23)
    assert found_us <= step_us(zb_h2, costs, FAST, ballots=FAST) + 0.5


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("profile", ["regional", "two-sites"])
def test_search_is_near_the_bound_where_one_link_is_slower_than_a_micro_batch_of_work(profile):
    """There a weight gradient that begins just before a message comes holds up all that follow."""
    network = load_network(PROFILES / f"{profile}.toml")
    costs = Cost.uniform(12, forward_us=66_000, backward_us=132_000, message_bytes=16 << 20)
    found = search(12, 16, costs, network, ballots=network)
    bound_us = lower_bound_us(pipeline_on(network, costs, 16, 12, ballots=network))
    assert step_us(found, costs, network, ballots=network) <= 1.05 * bound_us


@pytest.mark.slow
@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.integers(1, 30), min_size=4, max_size=4),
    st.integers(1, 8),
    st.sampled_from([FAST, SLOW]),
)
def test_several_stages_a_rank_beat_the_interleaved_schedule(forward_ms, microbatches, network):
    """Interleaved schedules have whole backward passes; the search splits them."""
    forward = tuple(1e3 * ms for ms in forward_ms)
    costs = replace(cost(4), forward_us=forward)
    found = search(4, microbatches, costs, network, stages_per_rank=2)
    check(found)
    for name in ("gpipe", "interleaved"):
        published = generate(name, 4, microbatches, stages_per_rank=2)
        assert step_us(found, costs, network) <= step_us(published, costs, network) + 0.5


def test_search_leaves_a_backward_pass_whole_where_its_halves_take_longer():
    dear = replace(cost(4), input_us=(20_000,) * 4, weight_us=(20_000,) * 4)
    assert not search(4, 8, dear, FAST).splits


@pytest.mark.slow
def test_search_counts_what_it_tries_so_that_its_time_is_bounded(monkeypatch):
    runs = []
    plain = PipelineClock.run

    def counted(self):
        runs.append(1)
        return plain(self)

    monkeypatch.setattr(PipelineClock, "run", counted)
    search(12, 64, cost(12), SLOW)
    assert len(runs) < 60


def heap_s() -> float:
    """Processor time of as much work on small objects in Python on any machine."""
    began_s = time.process_time()
    queue: list[tuple[int, int]] = []
    seen = {}
    for number in range(200_000):
        item = (number * 7919 % 100_003, number)
        heapq.heappush(queue, item)
        seen[item] = [number]
    while queue:
        seen.pop(heapq.heappop(queue))
    return time.process_time() - began_s


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["regional", "two-sites"])  # those that take longest
def test_search_of_twelve_stages_and_64_micro_batches_takes_seconds_of_a_core(profile):
    """2.3 s where the heap takes 0.65 s; a slower machine, or a shared one, is slower in both."""
    network = load_network(PROFILES / f"{profile}.toml")
    costs = Cost.uniform(12, forward_us=66_000, backward_us=132_000, message_bytes=16 << 20)

    def look() -> float:
        before_s = heap_s()
        began_s = time.process_time()
        search(12, 64, costs, network)
        return (time.process_time() - began_s) / (before_s + heap_s()) * 2

    assert settled(look, lambda heaps: heaps < _SEARCH_HEAPS) < _SEARCH_HEAPS


def test_search_is_deterministic():
    assert search(4, 12, cost(4), SLOW, memory_limit=6) == search(
        4, 12, cost(4), SLOW, memory_limit=6
    )


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
    # A run opens its links by the one before it knows the other.
    for tied in (False, True):
        assumed, found = (replace(each, tied=tied) for each in (assumed, found))
        for rank in range(ranks):
            assert neighbours(found, rank) <= neighbours(assumed, rank)


def held_bytes(schedule):
    """The first ranks hold more besides activations."""
    return [10 * held + 20 // (rank + 1) for rank, held in enumerate(peak_in_flight(schedule))]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("most_bytes", [50, 75, 100, 1000])
def test_search_keeps_a_limit_in_bytes_and_uses_it_rank_by_rank(most_bytes):
    found = search(4, 12, cost(4), SLOW, held_bytes=held_bytes, most_bytes=most_bytes)
    assert max(held_bytes(found)) <= most_bytes
    same_for_all = search(4, 12, cost(4), SLOW, memory_limit=(most_bytes - 20) // 10)
    assert step_us(found, cost(4), SLOW) <= step_us(same_for_all, cost(4), SLOW)


def test_search_takes_the_leanest_schedule_where_none_fits():
    found = search(4, 12, cost(4), SLOW, held_bytes=held_bytes, most_bytes=10)
    assert max(peak_in_flight(found)) == 1


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


def test_search_refuses_invalid_sizes():
    with pytest.raises(ScheduleError, match="5 stages cannot be dealt out by 2 a rank"):
        search(5, 8, cost(5), FAST, stages_per_rank=2)
