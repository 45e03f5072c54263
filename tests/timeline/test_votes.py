"""A simulated step in which no rank may step before all ballots are counted."""

from dataclasses import replace
from textwrap import dedent

from dpipe.network.link import Link, Network
from dpipe.schedule.exchange import direct
from dpipe.schedule.generate import gpipe, interleaved
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone
from dpipe.timeline.simulation import Simulation
from dpipe.timeline.span import Lane, Timeline

COST = Cost.uniform(2, forward_us=10, backward_us=20, message_bytes=500, update_us=5)


def network(delay_us: float) -> Network:
    return Network(default=Link(delay_us / 1e3, 1.0))


def spans(timeline: Timeline, *lanes: Lane) -> str:
    """One line per rank and lane, with the start and end of each action."""
    return "\n".join(
        f"{rank} {lane}: "
        + "  ".join(f"{s.action} {s.start_us:g}-{s.end_us:g}" for s in timeline.on(rank, lane))
        for rank in range(timeline.num_ranks)
        for lane in lanes
    )


def steps_us(timeline: Timeline) -> list[float]:
    return [timeline.on(rank, Lane.UPDATE)[-1].start_us for rank in range(timeline.num_ranks)]


def lines(text: str) -> str:
    return dedent(text).strip()


def test_rank_steps_once_the_last_ballot_has_come_and_the_verdict_is_back() -> None:
    timeline = simulate_alone(Scenario(gpipe(2, 1), COST, network(1), ballots=network(3)))
    # Rank 1 votes when its message has left. Its ballot has come at 52; rank 0, where the
    # coordinator is, casts the last one at 70.
    assert spans(timeline, Lane.UPDATE, Lane.WAIT) == lines("""
        0 update: 0STEP 70-75
        0 wait: 0B0 10-50
        1 update: 1STEP 73-78
        1 wait: 1F0 0-15  1VOTE 45-49  1VOTE 49-73
    """)


def test_rank_that_needs_no_verdict_does_not_wait_for_it() -> None:
    assert steps_us(simulate_alone(Scenario(gpipe(2, 1), COST, network(1)))) == [70, 49]


def test_ballot_is_cast_when_the_gradient_is_measured() -> None:
    timeline = simulate_alone(
        Scenario(gpipe(2, 1), replace(COST, vote_us=(2.0, 4.0)), network(1), ballots=network(3))
    )
    assert spans(timeline, Lane.UPDATE, Lane.WAIT) == lines("""
        0 update: 0VOTE 70-72  0STEP 72-77
        0 wait: 0B0 10-50
        1 update: 1VOTE 49-53  1STEP 75-80
        1 wait: 1F0 0-15  1VOTE 45-49  1VOTE 53-75
    """)


def test_rank_of_several_stages_votes_once() -> None:
    cost = Cost.uniform(4, 10, 20, message_bytes=0, update_us=5)
    timeline = simulate_alone(Scenario(interleaved(2, 2, 2), cost, network(0), ballots=network(3)))
    votes = [s for s in timeline.spans if s.action.op == "VOTE"]
    assert {s.rank for s in votes} <= {0, 1}
    assert len(votes) == len({s.rank for s in votes})
    assert [len(timeline.on(rank, Lane.UPDATE)) for rank in (0, 1)] == [2, 2]


def test_replicas_have_one_vote_and_one_coordinator() -> None:
    one = Cost.uniform(1, 10, 20, message_bytes=0, update_us=1)
    cost = replace(one, reduce_bytes=(5000,))
    replicas = Replicas(direct(2))
    assert steps_us(simulate_alone(Scenario(gpipe(1, 1), cost, network(5), replicas=replicas))) == [
        80,
        80,
    ]
    timeline = simulate_alone(
        Scenario(gpipe(1, 1), cost, network(5), replicas=replicas, ballots=network(5))
    )
    assert steps_us(timeline) == [85, 90]


def test_replicas_differ_only_if_they_vote() -> None:
    def mirrored(ballots: Network | None) -> bool:
        replicas = Replicas(direct(2))
        return Simulation(Scenario(gpipe(2, 1), COST, network(1), (), replicas, ballots)).mirrored

    assert (mirrored(None), mirrored(network(1))) == (True, False)
