from dataclasses import replace
from itertools import pairwise
from textwrap import dedent

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.greedy import greedy

from dpipe.errors import ScheduleError
from dpipe.network.link import Host, Link, Network
from dpipe.schedule.exchange import Exchange, chain, direct, parameter_server
from dpipe.schedule.generate import generate, gpipe, one_f_one_b
from dpipe.schedule.lower import lower
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Part, Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from dpipe.timeline.span import Lane, Timeline

BYTES_PER_US = 125  # at 1 Gbit/s


def network(delay_us: float = 0.0, gbps: float = 1.0) -> Network:
    return Network(default=Link(delay_us / 1e3, gbps))


def cost(num_stages: int, reduce_us: int, message_us: int = 0) -> Cost:
    """A gradient takes `reduce_us` to leave a rank as a whole, a message between stages
    `message_us`.
    """
    one = Cost.uniform(num_stages, 10, 20, message_bytes=message_us * BYTES_PER_US, update_us=1)
    return replace(one, reduce_bytes=(reduce_us * BYTES_PER_US,) * num_stages)


def reduced(timeline: Timeline, rank: int) -> str:
    return "  ".join(
        f"{s.action.stage} to {s.peer} {s.start_us:g}-{s.end_us:g}"
        for s in timeline.on(rank, Lane.REDUCE)
    )


def steps(timeline: Timeline) -> list[float]:
    return [timeline.on(rank, Lane.UPDATE)[-1].start_us for rank in range(timeline.num_ranks)]


def lines(text: str) -> list[str]:
    return dedent(text).strip().splitlines()


def test_replicas_exchange_halves_and_step():
    timeline = simulate_alone(
        Scenario(gpipe(1, 1), cost(1, 40), network(delay_us=5), replicas=Replicas(direct(2)))
    )
    # 10 + 20 of compute; half a gradient to the other, which has it 5 later; half of the average
    # back.
    assert [reduced(timeline, rank) for rank in range(2)] == lines("""
        0 to 1 30-50  0 to 1 55-75
        0 to 0 30-50  0 to 0 55-75
    """)
    assert steps(timeline) == [80, 80]


def test_parts_follow_each_other_so_that_a_delay_is_waited_for_once():
    whole, parts = (
        simulate_alone(
            Scenario(gpipe(1, 1), cost(1, 40), network(delay_us=5), replicas=Replicas(direct(2, n)))
        ).duration_us
        for n in (1, 20)
    )
    assert (whole, parts) == (81, 76)


def test_later_stages_exchange_while_earlier_ones_compute():
    timeline = simulate_alone(
        Scenario(gpipe(3, 2), cost(3, 60), network(), replicas=Replicas(direct(2)))
    )
    assert [timeline.on(rank, Lane.REDUCE)[0].start_us for rank in range(3)] == [120, 100, 80]


def test_stages_of_a_rank_exchange_one_after_another():
    timeline = simulate_alone(
        Scenario(
            gpipe(2, 1, stages_per_rank=2), cost(2, 40), network(), replicas=Replicas(direct(2))
        )
    )
    assert reduced(timeline, 0) == "1 to 1 40-60  1 to 1 60-80  0 to 1 80-100  0 to 1 100-120"
    # both step at the end of the program
    assert [s.start_us for s in timeline.on(0, Lane.UPDATE)] == [120, 121]


def test_exchange_lets_the_messages_of_the_pipeline_leave_first():
    timeline = simulate_alone(
        Scenario(
            one_f_one_b(2, 1), cost(2, 40, message_us=7), network(), replicas=Replicas(direct(2))
        )
    )
    send = timeline.on(1, Lane.SEND)[0]
    assert send.duration_us == 7
    assert timeline.on(1, Lane.REDUCE)[0].start_us == send.end_us


def test_message_of_the_pipeline_waits_for_the_part_of_an_exchange_that_came_before_it():
    late = replace(lower(gpipe(4, 2, stages_per_rank=2), reduce=True))
    timeline = simulate_alone(
        Scenario(late, cost(4, 400, message_us=10), network(), replicas=Replicas(direct(2)))
    )
    parts, messages = timeline.on(1, Lane.REDUCE), timeline.on(1, Lane.SEND)
    assert any(message.start_us == part.end_us for message in messages for part in parts)
    leaving = sorted([*parts, *messages], key=lambda span: span.start_us)
    assert all(before.end_us <= after.start_us for before, after in pairwise(leaving))


def test_sharded_parameters_are_gathered_after_the_step():
    timeline = simulate_alone(
        Scenario(gpipe(1, 1), cost(1, 40), network(), replicas=Replicas(direct(2, sharded=True)))
    )
    assert steps(timeline) == [50, 50]
    assert reduced(timeline, 0) == "0 to 1 30-50  0 to 1 51-71"
    assert timeline.duration_us == 71


def test_gathered_bytes_may_differ_from_reduced_ones():
    both = replace(cost(1, 40), gather_bytes=(80 * BYTES_PER_US,))
    timeline = simulate_alone(Scenario(gpipe(1, 1), both, network(), replicas=Replicas(direct(2))))
    assert reduced(timeline, 0) == "0 to 1 30-50  0 to 1 50-90"


def test_server_within_a_rank_sends_nothing_to_itself():
    replicas = Replicas(parameter_server(2), servers=(0,))
    timeline = simulate_alone(Scenario(gpipe(1, 1), cost(1, 40), network(), replicas=replicas))
    assert [reduced(timeline, rank) for rank in range(2)] == ["0 to 1 70-110", "0 to 0 30-70"]
    assert timeline.num_ranks == 2


def test_server_apart_answers_one_replica_after_the_other():
    replicas = Replicas(parameter_server(2), servers=(2,))
    timeline = simulate_alone(Scenario(gpipe(1, 1), cost(1, 40), network(), replicas=replicas))
    assert reduced(timeline, 2) == "0 to 0 70-110  0 to 1 110-150"
    assert timeline.num_ranks == 2


def test_stale_server_lets_nobody_wait_for_a_slow_replica():
    """
    rank 0   [30-70 push]  [40-80 pull, part by part]
    rank 1   [30-230 push, over a link of a fifth of the rate        ]
    """
    slow = Network(default=Link(0, 1.0), links={(1, 2): Link(0, 0.2), (2, 1): Link(0, 1.0)})
    waits, stale = (
        simulate_alone(
            Scenario(
                gpipe(1, 1),
                cost(1, 40),
                slow,
                replicas=Replicas(parameter_server(2, 4, stale=late), servers=(2,)),
            )
        )
        for late in (False, True)
    )
    assert steps(stale)[0] == 80
    assert min(steps(waits)) >= steps(stale)[1] >= 230


def test_one_server_of_all_stages_is_slower_than_one_a_stage():
    one, each = (
        simulate_alone(
            Scenario(
                gpipe(2, 1),
                cost(2, 40),
                network(),
                replicas=Replicas(parameter_server(2, 4), servers),
            )
        ).duration_us
        for servers in ((4, 4), (4, 5))
    )
    assert one > each


def test_published_arrangement_adds_a_reduce_and_a_broadcast_after_the_pipeline():
    alone = simulate_alone(
        Scenario(lower(gpipe(3, 4), reduce=True), cost(3, 400, message_us=5), network(delay_us=2))
    )
    timeline = simulate_alone(
        Scenario(
            gpipe(3, 4),
            cost(3, 400, message_us=5),
            network(delay_us=2),
            replicas=Replicas(chain(4, 100)),
        )
    )
    fill = 2 * (2 * 4 + 3 * 2)  # parts of 4 us over two more replicas, delays of 2 us to each
    assert timeline.duration_us == pytest.approx(alone.duration_us + 2 * 400 + fill)


def test_delay_hides_the_exchange_behind_the_step_but_for_a_part_that_a_message_waits_for():
    now, delayed = (
        simulate_alone(
            Scenario(
                gpipe(2, 8), cost(2, 60), network(), replicas=Replicas(direct(2), delayed=late)
            )
        )
        for late in (False, True)
    )
    alone = simulate_alone(Scenario(gpipe(2, 8), cost(2, 60), network()))
    part_us = 30
    assert alone.duration_us <= delayed.duration_us <= alone.duration_us + part_us < now.duration_us


def test_delayed_exchange_that_takes_longer_than_the_step_is_waited_for():
    timeline = simulate_alone(
        Scenario(gpipe(1, 1), cost(1, 400), network(), replicas=Replicas(direct(2), delayed=True))
    )
    assert reduced(timeline, 0).startswith("0 to 1 0-")
    assert steps(timeline) == [400, 400]


def test_uneven_links_are_simulated_replica_by_replica():
    far = Network(default=Link(0, 1.0), links={(0, 1): Link(0, 0.5), (1, 0): Link(0, 1.0)})
    timeline = simulate_alone(Scenario(gpipe(1, 1), cost(1, 40), far, replicas=Replicas(direct(2))))
    assert not Replicas(direct(2)).alike(far, 1)
    assert [reduced(timeline, rank) for rank in range(2)] == lines("""
        0 to 1 30-70  0 to 1 70-110
        0 to 0 30-50  0 to 0 70-90
    """)


def test_links_that_are_listed_but_alike_need_one_replica_only():
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    assert Replicas(direct(2)).alike(
        Network(default=None, links=dict.fromkeys(pairs, Link(1, 1))), 2
    )


def test_replicas_that_share_cores_are_slowed_down_together():
    hosted = simulate_alone(
        Scenario(
            gpipe(1, 1),
            cost(1, 0),
            network(),
            hosts=[Host((0, 1), cores=1)],
            replicas=Replicas(direct(2)),
        )
    )
    assert hosted.on(0, Lane.COMPUTE)[-1].end_us == 60


def test_every_replica_sends_what_its_exchange_says():
    exchange = direct(4, 3)
    timeline = simulate_alone(
        Scenario(gpipe(2, 2), cost(2, 48), network(), replicas=Replicas(exchange))
    )
    assert timeline.num_ranks == 8
    for rank in range(8):
        moved = sum(span.num_bytes for span in timeline.on(rank, Lane.REDUCE))
        assert moved == 2 * 3 * 48 * BYTES_PER_US // 4
        assert {span.peer for span in timeline.on(rank, Lane.REDUCE)} == {
            r for r in range(8) if (r - rank) % 2 == 0
        } - {rank}


kinds = st.sampled_from([direct, lambda replicas, parts: direct(replicas, parts, sharded=True)])


@settings(deadline=None, max_examples=40)
@given(
    kinds,
    st.integers(2, 4),
    st.integers(1, 12),
    st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved", "zb-v", "greedy"]),
    st.integers(1, 3),
    st.integers(1, 5),
    st.tuples(st.integers(0, 30), st.sampled_from([0.1, 1.0, 8.0])),
    st.booleans(),
)
def test_one_replica_stands_for_all_where_they_are_alike(
    kind, replicas, parts, name, stages, microbatches, link, delayed
):
    """The same spans, to a thousandth of a microsecond, as when every replica is simulated."""
    per_rank = 2 if name in ("interleaved", "zb-v") else 1
    net, sizes = (
        network(*link),
        cost(stages * per_rank, reduce_us=96, message_us=12),
    )
    if name == "greedy":
        schedule = greedy(stages, microbatches, sizes, net)
    else:
        schedule = generate(name, stages * per_rank, microbatches, stages_per_rank=per_rank)
    agree = Replicas(kind(replicas, parts), delayed=delayed)
    one = simulate_alone(Scenario(schedule, sizes, net, replicas=agree))
    every = simulate_alone(
        Scenario(schedule, sizes, net, replicas=_Unlike(agree.exchange, delayed=delayed))
    )
    assert _rows(one) == _rows(every)


class _Unlike(Replicas):
    def alike(self, network: Network, per_replica: int) -> bool:
        return False


def _rows(timeline: Timeline) -> list[tuple[object, ...]]:
    return sorted(
        (
            s.rank,
            s.lane,
            str(s.action),
            -1 if s.peer is None else s.peer,
            round(s.start_us, 3),
            round(s.end_us, 3),
        )
        for s in timeline.spans
    )


@pytest.mark.parametrize(
    ("exchange", "servers", "message"),
    [
        (parameter_server(2), (), "'parameter-server' needs servers, got ranks ()"),
        (direct(2), (0,), "'all-reduce' has no servers, got ranks (0,)"),
    ],
)
def test_replicas_refuse_servers_that_do_not_fit(
    exchange: Exchange, servers: tuple[int, ...], message: str
):
    with pytest.raises(ScheduleError) as error:
        Replicas(exchange, servers)
    assert message in str(error.value)


def test_parts_that_are_the_stages_take_as_long_as_the_stages() -> None:
    """Without anything that is alike: the links of one replica are slower."""
    given_cost = cost(3, 4_000, message_us=100)
    links = {(rank, other): Link(0.0, 0.5) for rank in range(3) for other in range(3, 6)}
    slow_back = Network(default=Link(0.0, 1.0), links=links)
    schedule = lower(one_f_one_b(3, 4), reduce=True)
    stages = Replicas(direct(2, 2))
    sizes = zip(given_cost.reduce_bytes, given_cost.reduce_bytes, strict=True)
    each = [Part((stage, stage), *both) for stage, both in enumerate(sizes)]
    parts = replace(stages, parts=tuple(each))
    of_stages = simulate_alone(Scenario(schedule, given_cost, slow_back, replicas=stages))
    of_parts = simulate_alone(Scenario(schedule, given_cost, slow_back, replicas=parts))
    assert of_parts == of_stages


def test_parts_go_between_whoever_holds_them() -> None:
    given_cost = cost(2, 4_000)
    held = [(0, 0), (0, 1), (1, 1)]
    parts = tuple(Part(stages, 250, 250) for stages in held)
    replicas = Replicas(direct(2, 1), parts=parts)
    schedule = lower(one_f_one_b(2, 2), reduce=True)
    timeline = simulate_alone(Scenario(schedule, given_cost, network(), replicas=replicas))
    moved = {(span.rank, span.peer) for span in timeline.spans if span.lane is Lane.REDUCE}
    assert moved == {(0, 2), (2, 0), (0, 3), (3, 0), (1, 3), (3, 1)}


def test_part_of_other_replicas_is_refused() -> None:
    with pytest.raises(ScheduleError, match="held by stages .* is of 3 replicas"):
        Replicas(direct(3, 1), parts=(Part((0, 1), 1, 1),))
