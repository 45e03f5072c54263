from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpipe.errors import ConfigError, ScheduleError
from dpipe.network.link import Host, Link, Network
from dpipe.schedule.action import RECVS, SENDS, Action, Op
from dpipe.schedule.generate import forward_only, generate, gpipe, one_f_one_b, zero_bubble
from dpipe.schedule.links import peer
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.machine import Clock
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from dpipe.timeline.span import Lane, Timeline

BYTES_PER_US = 125  # at 1 Gbit/s


def network(delay_us: float, gbps: float = 1.0) -> Network:
    return Network(default=Link(delay_us / 1e3, gbps))


def spans(timeline: Timeline) -> str:
    """One line per rank and lane, with the start and end of each action."""
    return "\n".join(
        f"{rank} {lane}: "
        + "  ".join(f"{s.action} {s.start_us:g}-{s.end_us:g}" for s in timeline.on(rank, lane))
        for rank in range(timeline.num_ranks)
        for lane in Lane
        if timeline.on(rank, lane)
    )


def lines(text: str) -> str:
    return dedent(text).strip()


def test_simulate_moves_a_micro_batch_there_and_back():
    cost = Cost.uniform(
        2, forward_us=10, backward_us=20, message_bytes=4 * BYTES_PER_US, update_us=5
    )
    assert spans(simulate_alone(Scenario(gpipe(2, 1), cost, network(delay_us=1)))) == lines("""
        0 compute: 0F0 0-10  0B0 50-70
        0 send: 0SEND_F0 10-14
        0 recv: 0RECV_B0 46-50
        0 update: 0STEP 70-75
        0 wait: 0B0 10-50
        1 compute: 1F0 15-25  1B0 25-45
        1 send: 1SEND_B0 45-49
        1 recv: 1RECV_F0 11-15
        1 update: 1STEP 49-54
        1 wait: 1F0 0-15  1VOTE 45-49
    """)


def test_simulate_sends_the_messages_of_a_link_one_after_another():
    cost = Cost.uniform(2, forward_us=1, backward_us=2, message_bytes=10 * BYTES_PER_US)
    timeline = simulate_alone(Scenario(forward_only(2, 3), cost, network(delay_us=5)))
    assert spans(timeline) == lines("""
        0 compute: 0F0 0-1  0F1 1-2  0F2 2-3
        0 send: 0SEND_F0 1-11  0SEND_F1 11-21  0SEND_F2 21-31
        1 compute: 1F0 16-17  1F1 26-27  1F2 36-37
        1 recv: 1RECV_F0 6-16  1RECV_F1 16-26  1RECV_F2 26-36
        1 wait: 1F0 0-16  1F1 17-26  1F2 27-36
    """)


def test_simulate_sends_one_message_after_another_from_a_rank_that_sends_both_ways():
    cost = Cost(
        forward_us=(1, 1, 1),
        backward_us=(1, 1, 1),
        input_us=(1, 1, 1),
        weight_us=(1, 1, 1),
        activation_bytes=(1 * BYTES_PER_US, 40 * BYTES_PER_US),
        gradient_bytes=(10 * BYTES_PER_US, 1 * BYTES_PER_US),
    )
    timeline = simulate_alone(Scenario(one_f_one_b(3, 2), cost, network(delay_us=0)))
    # 1SEND_B0 comes at 47, while 1SEND_F1 has 36 of its 40 to move.
    sends = "  ".join(
        f"{s.action} {s.start_us:g}-{s.end_us:g}" for s in timeline.on(1, Lane.SEND)[:3]
    )
    assert sends == "1SEND_F0 3-43  1SEND_F1 43-83  1SEND_B0 83-93"


def test_simulate_gives_a_slow_link_its_own_rate_and_the_rest_to_the_fast_one():
    cost = replace(
        Cost.uniform(3, forward_us=1, backward_us=1, message_bytes=91 * BYTES_PER_US),
        gradient_bytes=(91 * BYTES_PER_US, 1 * BYTES_PER_US),
    )
    uneven = Network(default=Link(0, 1.0), links={(1, 0): Link(0, 0.1)})
    # 1SEND_F1 has moved 4 of its 91 when 1SEND_B0 comes and takes 0.1 of the egress; 0.9 are left
    # for it.
    sends = {
        str(s.action): s.duration_us
        for s in simulate_alone(Scenario(one_f_one_b(3, 2), cost, uneven)).on(1, Lane.SEND)
    }
    assert sends["1SEND_B0"] == pytest.approx(910)
    assert sends["1SEND_F1"] == pytest.approx(4 + (91 - 4) / 0.9)


def test_simulate_runs_weight_gradients_where_it_would_wait():
    cost = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=0)
    assert spans(
        simulate_alone(Scenario(lower(zero_bubble(2, 2), step=False), cost, network(delay_us=5)))
    ) == lines("""
        0 compute: 0F0 0-10  0F1 10-20  0I0 40-50  0W0 50-60  0I1 60-70  0W1 70-80
        0 send: 0SEND_F0 10-10  0SEND_F1 20-20
        0 recv: 0RECV_B0 40-40  0RECV_B1 60-60
        0 wait: 0I0 20-40
        1 compute: 1F0 15-25  1I0 25-35  1F1 35-45  1I1 45-55  1W0 55-65  1W1 65-75
        1 send: 1SEND_B0 35-35  1SEND_B1 55-55
        1 recv: 1RECV_F0 15-15  1RECV_F1 25-25
        1 wait: 1F0 0-15
    """)


def test_simulate_exchanges_a_tied_gradient_before_the_step():
    cost = replace(Cost.uniform(2, 10, 20, message_bytes=0), tied_bytes=7 * BYTES_PER_US)
    timeline = simulate_alone(Scenario(lower(gpipe(2, 1), tied=True), cost, network(delay_us=0)))
    moved = {str(s.action): (s.start_us, s.end_us) for s in timeline.spans if s.num_bytes}
    assert moved == {
        "1SEND_TIED": (40, 47),
        "0RECV_TIED": (40, 47),
        "0SEND_TIED": (60, 67),
        "1RECV_TIED": (60, 67),
    }
    assert timeline.duration_us == 67


@pytest.mark.parametrize(
    ("delay_ms", "gbps", "seconds"),
    [(0.1, 10, 15.16), (1, 5, 15.48), (5, 2, 16.52), (10, 1, 22.46), (50, 1, 23.34)],
)
def test_simulate_agrees_with_the_published_gpipe_times(delay_ms, gbps, seconds):
    cost = Cost.uniform(12, forward_us=66_000, backward_us=132_000, message_bytes=16 * 2**20)
    timeline = simulate_alone(Scenario(gpipe(12, 64), cost, network(delay_ms * 1e3, gbps)))
    assert timeline.duration_us / 1e6 == pytest.approx(seconds, rel=0.005)


times = st.integers(0, 50)
networks = st.builds(network, delay_us=times, gbps=st.sampled_from([0.1, 1.0, 8.0]))


@st.composite
def costs(draw: st.DrawFn, num_stages: int) -> Cost:
    def each(values: st.SearchStrategy[int], count: int = num_stages) -> tuple[int, ...]:
        return tuple(draw(st.lists(values, min_size=count, max_size=count)))

    messages = st.integers(0, 50_000)
    stages, hops = (
        [each(times) for _ in range(4)],
        [each(messages, num_stages - 1) for _ in range(2)],
    )
    return Cost(*stages, *hops, update_us=each(times), tied_bytes=draw(messages))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Schedule, Cost, Network]:
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved", "zero-bubble", "zb-v"]))
    per_rank = 2 if name == "zb-v" else 1
    if name in ("gpipe", "interleaved"):
        per_rank = draw(st.integers(1, 3))
    stages = draw(st.integers(1, 4)) * per_rank
    schedule = lower(
        generate(name, stages, draw(st.integers(1, 8)), stages_per_rank=per_rank),
        tied=draw(st.booleans()),
    )
    return schedule, draw(costs(stages)), draw(networks)


def critical_path_us(schedule: Schedule, cost: Cost, net: Network) -> float:
    """The longest chain of dependence: what the step would take if ranks and links had no other
    work.
    """

    @cache
    def done_us(action: Action) -> float:
        return took_us(action) + max(map(done_us, schedule.requires(action)), default=0.0)

    def took_us(action: Action) -> float:
        rank = schedule.rank_of_stage[action.stage]
        if action.op in SENDS:
            link = net.link(rank, peer(schedule, action))
            return cost.num_bytes(action) * 8 / (link.bandwidth_gbps * 1e3)
        if action.op in RECVS:
            return net.link(peer(schedule, action), rank).delay_us
        return cost.duration_us(action)

    return max(map(done_us, schedule.index))


@settings(deadline=None)
@given(cases())
def test_simulate_never_ends_before_the_critical_path(case):
    assert simulate_alone(Scenario(*case)).duration_us >= critical_path_us(*case) - 1e-6


@settings(deadline=None)
@given(cases())
def test_simulate_does_everything_once_and_one_thing_at_a_time(case):
    schedule, timeline = case[0], simulate_alone(Scenario(*case))
    # Nobody is kept by the gradients that are complete, nor by a vote that nobody waits for.
    shown = [a for a in schedule.index if a.op not in (Op.COMPLETE, Op.VOTE)]
    assert sorted(str(s.action) for s in timeline.spans if s.lane != Lane.WAIT) == sorted(
        map(str, shown)
    )
    for rank in range(schedule.num_ranks):
        busy = sorted(
            (s.start_us, s.end_us)
            for lane in (Lane.COMPUTE, Lane.UPDATE, Lane.WAIT)
            for s in timeline.on(rank, lane)
        )
        assert all(end <= start for (_, end), (start, _) in pairwise(busy))


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 8), times, times, st.data())
def test_more_delay_never_makes_gpipe_faster(stages, microbatches, delay_us, more_us, data):
    schedule, cost = gpipe(stages, microbatches), data.draw(costs(stages))
    near = simulate_alone(Scenario(schedule, cost, network(delay_us))).duration_us
    assert (
        simulate_alone(Scenario(schedule, cost, network(delay_us + more_us))).duration_us
        >= near - 1e-6
    )


def test_simulate_works_in_proportion_to_what_happens(monkeypatch):
    done, plain_at, plain_requires = Counter(), Clock.at, Schedule.requires
    monkeypatch.setattr(Clock, "at", lambda *args: (done.update(["events"]), plain_at(*args)))
    monkeypatch.setattr(
        Schedule, "requires", lambda *args: (done.update(["asked"]), plain_requires(*args))[1]
    )
    for num_microbatches in (8, 64):
        schedule = lower(generate("zero-bubble", 6, num_microbatches))
        done.clear()
        simulate_alone(Scenario(schedule, Cost.uniform(6, 100.0, 200.0, 10_000), network(1000)))
        assert done["asked"] < len(schedule.index)
        assert done["events"] < 1.5 * len(schedule.index)


def test_simulate_shares_the_cores_of_a_host():
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    timeline = simulate_alone(
        Scenario(forward_only(2, 2), cost, network(delay_us=0), [Host((0, 1), cores=1)])
    )
    # while both compute, each is half as fast
    computed = tuple(s for s in timeline.spans if s.lane == Lane.COMPUTE)
    assert spans(Timeline(2, computed)) == lines("""
        0 compute: 0F0 0-10  0F1 10-30
        1 compute: 1F0 10-30  1F1 30-40
    """)


def test_simulate_gives_every_rank_a_core_where_there_are_enough():
    cost = Cost.uniform(3, forward_us=10, backward_us=20, message_bytes=100)
    alone = simulate_alone(Scenario(gpipe(3, 4), cost, network(delay_us=1)))
    hosted = simulate_alone(
        Scenario(gpipe(3, 4), cost, network(delay_us=1), [Host((0, 1, 2), cores=3)])
    )
    assert hosted.duration_us == pytest.approx(alone.duration_us)


@pytest.mark.parametrize(
    ("cores", "computes", "second_begins"),
    [(2, False, 18), (1, False, 18), (2, True, 18), (1, True, 26)],
)
def test_simulate_lets_messages_take_the_cores_at_both_ends(cores, computes, second_begins):
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    host = Host((0, 1), cores, message_us=4, computes=computes)
    timeline = simulate_alone(Scenario(forward_only(2, 2), cost, network(delay_us=0), [host]))
    # The receiver's end is behind the sender's. On one core rank 0 goes on to compute beside both.
    assert timeline.on(1, Lane.COMPUTE)[0].start_us == pytest.approx(second_begins)


def test_simulate_moves_a_message_no_sooner_than_its_bytes():
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=1_000_000)
    busy = Host((0, 1), cores=2, us_per_mb=5, computes=False)
    alone, hosted = (
        simulate_alone(Scenario(forward_only(2, 2), cost, network(delay_us=3), hosts))
        for hosts in ([], [busy])
    )
    assert hosted == alone


def test_simulate_works_on_a_link_s_messages_one_after_the_other():
    cost = Cost.uniform(2, forward_us=1, backward_us=0, message_bytes=0)
    host = Host((0, 1), cores=8, message_us=100, computes=False)
    timeline = simulate_alone(Scenario(forward_only(2, 3), cost, network(delay_us=0), [host]))
    assert [s.start_us for s in timeline.on(1, Lane.COMPUTE)] == pytest.approx([201, 301, 401])


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), times, st.data())
def test_simulate_never_does_more_than_the_cores_can(stages, microbatches, cores, message_us, data):
    cost = data.draw(costs(stages))
    host = Host(tuple(range(stages)), cores, message_us=message_us)
    timeline = simulate_alone(Scenario(gpipe(stages, microbatches), cost, network(0), [host]))
    work = microbatches * (sum(cost.forward_us) + sum(cost.backward_us)) + sum(cost.update_us)
    work += 2 * microbatches * (stages - 1) * 2 * message_us  # there and back, at both ends
    assert timeline.duration_us >= work / cores * (1 - 1e-9) - 1e-6


def test_simulate_refuses_a_cost_for_other_stages():
    with pytest.raises(ScheduleError, match="the schedule has 3 stages, the cost 2"):
        simulate_alone(Scenario(gpipe(3, 1), Cost.uniform(2, 1, 2, 0), network(0)))


def test_simulate_says_where_a_schedule_is_stuck():
    stuck = lower(gpipe(2, 1))
    backwards = replace(stuck, programs=(tuple(reversed(stuck.programs[0])), stuck.programs[1]))
    with pytest.raises(
        ScheduleError, match="no progress: rank 0 stops at 0STEP, which waits for 0VOTE"
    ):
        simulate_alone(Scenario(backwards, Cost.uniform(2, 1, 2, 0), network(0)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backward_us": (1.0,)}, "backward_us must have 2 values for 2 stages"),
        ({"update_us": (1.0,)}, "update_us must have 2 values for 2 stages"),
        ({"activation_bytes": (1, 1)}, "activation_bytes must have 1 values for 2 stages"),
        ({"gather_bytes": (1,)}, "gather_bytes must have 2 values for 2 stages"),
    ],
)
def test_cost_refuses_lengths_that_do_not_fit(change, message):
    with pytest.raises(ConfigError, match=message):
        replace(Cost.uniform(2, 1, 2, 0), **change)


def test_cost_gives_each_action_its_bytes():
    cost = Cost((1, 1, 1), (2, 2, 2), (1, 1, 1), (1, 1, 1), (10, 20), (30, 40), tied_bytes=5)
    lowered = lower(gpipe(3, 1), tied=True)
    moved = {str(action): cost.num_bytes(action) for action in sorted(lowered.index, key=str)}
    assert {action: count for action, count in moved.items() if count} == {
        "0RECV_B0": 30, "0RECV_TIED": 5, "0SEND_F0": 10, "0SEND_TIED": 5,
        "1RECV_B0": 40, "1RECV_F0": 10, "1SEND_B0": 30, "1SEND_F0": 20,
        "2RECV_F0": 20, "2RECV_TIED": 5, "2SEND_B0": 40, "2SEND_TIED": 5,
    }  # fmt: skip
