"""Ranks and messages that share the cores of a machine, in numbers worked out by hand."""

from dataclasses import replace
from functools import partial
from textwrap import dedent

import pytest

from dpipe.network.link import Host, Link, Network
from dpipe.schedule.generate import forward_only, gpipe
from dpipe.timeline.cost import Cost
from dpipe.timeline.machine import Clock, Cores
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate, simulate_alone
from dpipe.timeline.span import Lane, Timeline

NEAR = Network(default=Link(0.0, 1.0))
BYTES_PER_US = 125  # of NEAR


def spans(timeline: Timeline, *lanes: Lane) -> str:
    """One line a rank and lane: what ran from when to when."""
    return "\n".join(
        f"{rank} {lane}: "
        + "  ".join(f"{s.action} {s.start_us:g}-{s.end_us:g}" for s in timeline.on(rank, lane))
        for rank in range(timeline.num_ranks)
        for lane in lanes
    )


def lines(text: str) -> str:
    return dedent(text).strip()


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 2), (8, 8)])
def test_ranks_share_cores_by_their_threads(cores: int, threads: int) -> None:
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    host = Host((0, 1), cores, threads)
    timeline = simulate_alone(Scenario(forward_only(2, 2), cost, NEAR, [host]))
    assert spans(timeline, Lane.COMPUTE) == lines("""
        0 compute: 0F0 0-10  0F1 10-30
        1 compute: 1F0 10-30  1F1 30-40
    """)


def computed(cores: float, tasks: dict[str, tuple[float, float]]) -> dict[str, float]:
    """When each thread is done that begins at a time, with so much to do, microseconds."""
    clock = Clock()
    shared = Cores(clock, Host((0,), cores))
    done = {}

    def end(name: str) -> None:
        done[name] = clock.now_us

    for name, (begins_us, takes_us) in tasks.items():
        clock.at(begins_us, partial(shared.run, name, takes_us, partial(end, name)))
    clock.run()
    return done


def test_thread_that_waits_stays_on_its_core_until_the_next_tick() -> None:
    """As in the picture of `Cores`; half a tick is 2 ms."""
    done = computed(2, {"A": (0, 10_000), "B": (0, 3_000), "C": (1_000, 10_000)})
    # C begins beside A. Until 5,000 each has done 2,000 of its own, and A 1,000 before.
    assert done == {"B": 3_000, "A": 5_000 + 7_000, "C": 5_000 + 8_000}


def test_thread_that_begins_goes_to_a_core_that_has_nothing_to_do() -> None:
    done = computed(2, {"A": (0, 100), "B": (200, 1_000), "C": (200, 500), "D": (800, 400)})
    assert done == {"A": 100, "B": 1_200, "C": 700, "D": 1_200}


def test_thread_that_begins_again_on_busy_cores_goes_to_where_it_was() -> None:
    tasks = {"A": (0, 100), "B": (0, 1_000), "C": (200, 1_000)}
    clock = Clock()
    shared = Cores(clock, Host((0,), 2))
    done: list[float] = []
    for name, (begins_us, takes_us) in tasks.items():
        clock.at(begins_us, partial(shared.run, name, takes_us, lambda: None))
    clock.at(400, partial(shared.run, "A", 100, lambda: done.append(clock.now_us)))
    clock.run()
    assert done == [600]  # beside C, which has taken the core where it was


def test_part_of_a_core_is_as_much_of_each() -> None:
    assert computed(1.5, {"A": (0, 300), "B": (400, 300), "C": (400, 300)}) == {
        "A": 300,
        "B": 800,
        "C": 800,
    }


def test_threads_of_a_rank_begin_where_there_is_a_core() -> None:
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    host = Host((0, 1), cores=3, threads=2, message_us=3)
    timeline = simulate_alone(Scenario(forward_only(2, 2), cost, NEAR, [host]))
    # The message of 0F0 takes from 10 to 16 at its two ends, and 0F1 the two other cores. Then both
    # threads of 1F0 begin on the one that is free.
    assert timeline.on(0, Lane.COMPUTE)[1].end_us == 20
    first = timeline.on(1, Lane.COMPUTE)[0]
    assert (first.start_us, first.end_us) == (16, 36)


def test_group_exchanges_one_thread_at_a_time() -> None:
    """Two groups of two on two cores. 0F0 alone: 5 us of both cores, 4 us of one, 5 of both. Then
    1F0 begins, at the same thing as 0F1: until 24 four threads share the cores. Each group
    exchanges on a core of its own, until 28; then both threads of 1F0 are on that one.
    """
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    group = replace(cost, exchange_forward_us=(4.0, 4.0), exchanges=(1, 1))
    two = Host((0, 1), cores=2, threads=2)
    timeline = simulate_alone(Scenario(forward_only(2, 2), group, NEAR, [two]))
    assert spans(timeline, Lane.COMPUTE) == lines("""
        0 compute: 0F0 0-14  0F1 14-43
        1 compute: 1F0 14-43  1F1 43-57
    """)
    # A core each for all: an exchange takes no longer than it does alone.
    four = replace(two, cores=4)
    timeline = simulate_alone(Scenario(forward_only(2, 2), group, NEAR, [four]))
    assert [span.end_us for span in timeline.on(1, Lane.COMPUTE)] == [28, 42]


def test_exchange_leaves_a_core_to_the_other_group() -> None:
    """1F0 takes 18 us of both cores: 9 while 0F1 computes, in 18 us, 4 of which 0F1 exchanges."""
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    exchanging = replace(
        cost, forward_us=(10.0, 18.0), exchange_forward_us=(4.0, 0.0), exchanges=(1, 0)
    )
    two = Host((0, 1), cores=2, threads=2)
    timeline = simulate_alone(Scenario(forward_only(2, 2), exchanging, NEAR, [two]))
    # Four threads for 10 us; the exchange beside one of 1F0 for 8; four threads for 10.
    assert timeline.on(0, Lane.COMPUTE)[1].end_us == 14 + 10 + 8 + 10
    # 5 + 4 + 5 us of one thread of 1F0 are done by then.
    assert timeline.on(1, Lane.COMPUTE)[0].end_us == 14 + 28 + 4


def test_rank_pinned_to_a_core_shares_it_with_its_messages_alone() -> None:
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    hosts = [Host((0,), 1, message_us=3), Host((1,), 1, message_us=3)]
    timeline = simulate_alone(Scenario(forward_only(2, 2), cost, NEAR, hosts))
    # 0F0 takes until 10. Half of the core then goes to its message: 3 us of work take 6, and so
    # much of 0F1 is done as well. Rank 1 is idle, and has the message 3 us later.
    assert spans(timeline, Lane.COMPUTE) == lines("""
        0 compute: 0F0 0-10  0F1 10-23
        1 compute: 1F0 19-32  1F1 32-42
    """)


def test_rank_with_half_a_core_takes_twice_as_long() -> None:
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=0)
    hosts = [Host((0,), 1), Host((1,), 0.5)]
    timeline = simulate_alone(Scenario(forward_only(2, 1), cost, NEAR, hosts))
    assert spans(timeline, Lane.COMPUTE) == lines("""
        0 compute: 0F0 0-10
        1 compute: 1F0 10-30
    """)


def test_message_is_handled_at_both_ends_and_its_bytes_at_once_with_the_wire() -> None:
    cost = Cost.uniform(2, forward_us=10, backward_us=0, message_bytes=1000 * BYTES_PER_US)
    timeline = simulate_alone(
        Scenario(forward_only(2, 1), cost, NEAR, [Host((0, 1), 9, message_us=3, us_per_mb=8000)])
    )
    # 1000 us on the wire, 1000 us of work at either end meanwhile.
    assert timeline.on(1, Lane.COMPUTE)[0].start_us == pytest.approx(10 + 3 + 1000 + 3)


def test_python_goes_ahead_of_each_computation() -> None:
    cost = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=0, update_us=5)
    slow = replace(cost, python_us=(1.0, 2.0))
    timeline = simulate_alone(Scenario(gpipe(2, 1), slow, NEAR))
    assert spans(timeline, Lane.COMPUTE, Lane.UPDATE) == lines("""
        0 compute: 0F0 0-11  0B0 45-66
        0 update: 0STEP 66-71
        1 compute: 1F0 11-23  1B0 23-45
        1 update: 1STEP 45-50
    """)


def test_rank_prepares_a_step_before_it_computes() -> None:
    cost = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=0, update_us=5)
    timeline = simulate_alone(Scenario(gpipe(2, 1), replace(cost, between_us=(4.0, 30.0)), NEAR))
    assert spans(timeline, Lane.BETWEEN, Lane.COMPUTE) == lines("""
        0 between: 0VOTE 0-4
        0 compute: 0F0 4-14  0B0 60-80
        1 between: 1VOTE 0-30
        1 compute: 1F0 30-40  1B0 40-60
    """)


def test_step_time_has_what_a_rank_does_between_steps() -> None:
    """Rank 0's 4 us: rank 1 does its own while it waits."""
    cost = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=0, update_us=5)
    busy = replace(cost, between_us=(4.0, 9.0))
    assert simulate(gpipe(2, 1), cost, NEAR, ballots=NEAR).step_us == pytest.approx(65)
    assert simulate(gpipe(2, 1), busy, NEAR, ballots=NEAR).step_us == pytest.approx(69)


def test_ballots_are_messages_to_and_from_the_coordinator() -> None:
    """Two ballots of 3 us at either end; the coordinator handles them one after the other, and then
    two verdicts.
    """
    cost = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=0, update_us=5)
    host = Host((0, 1), cores=9, message_us=3)
    timeline = simulate_alone(Scenario(gpipe(2, 1), cost, NEAR, [host], ballots=NEAR))
    voted_us = timeline.on(0, Lane.COMPUTE)[-1].end_us
    stepped_us = [timeline.on(rank, Lane.UPDATE)[-1].start_us for rank in range(2)]
    # Rank 0 is last: its ballot 3 us to write and 3 to read, then a verdict for each, read in 3.
    assert stepped_us == pytest.approx([voted_us + 6 + 3 + 6, voted_us + 6 + 6 + 3])
