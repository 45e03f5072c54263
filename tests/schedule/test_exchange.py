from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpipe.errors import ScheduleError
from dpipe.schedule.exchange import Exchange, Message, Role, chain, direct, draw, parameter_server

KINDS = {
    "direct": direct,
    "sharded": lambda replicas, parts: direct(replicas, parts, sharded=True),
    "parameter-server": parameter_server,
    "chain": chain,
}
exchanges = st.builds(
    lambda kind, replicas, parts: KINDS[kind](replicas, parts),
    st.sampled_from(sorted(KINDS)),
    st.integers(2, 5),
    st.integers(1, 20),
)


def lines(text: str) -> str:
    return dedent(text).strip()


def test_direct_exchange_goes_through_the_owners():
    assert draw(direct(3)) == lines("""
        0 | reduce 0 of 1 -> 1   reduce 0 of 2 -> 2   gather 0 of 0 -> 1   gather 0 of 0 -> 2
        1 | reduce 0 of 2 -> 2   reduce 0 of 0 -> 0   gather 0 of 1 -> 2   gather 0 of 1 -> 0
        2 | reduce 0 of 0 -> 0   reduce 0 of 1 -> 1   gather 0 of 2 -> 0   gather 0 of 2 -> 1
    """)


def test_direct_exchange_gathers_while_later_parts_are_reduced():
    roles = [(message.role[0], message.part) for message in direct(2, 10).programs[0]]
    assert roles[8:12] == [("r", 8), ("g", 0), ("r", 9), ("g", 1)]


def test_sharded_exchange_gathers_after_everything_is_reduced():
    roles = [message.role for message in direct(2, 10, sharded=True).programs[0]]
    assert roles == [Role.REDUCE] * 10 + [Role.GATHER] * 10


def test_parameter_server_gives_a_part_back_while_others_come():
    assert draw(parameter_server(3)) == lines("""
        0 | reduce 0 of 3 -> 3
        1 | reduce 0 of 3 -> 3
        2 | reduce 0 of 3 -> 3
        3 | gather 0 of 3 -> 0   gather 0 of 3 -> 1   gather 0 of 3 -> 2
    """)


def test_chain_passes_on_to_replica_0_and_back():
    assert draw(chain(3)) == lines("""
        0 | gather 0 of 0 -> 1
        1 | reduce 0 of 0 -> 0   gather 0 of 0 -> 2
        2 | reduce 0 of 0 -> 1
    """)
    assert Message(Role.GATHER, 0, 0, 0, 1) in chain(3).requires(Message(Role.GATHER, 0, 0, 1, 2))


def test_barrier_lets_an_owner_wait_for_every_part():
    pull = Message(Role.GATHER, 0, 2, 2, 0)
    assert {m.part for m in parameter_server(2, 3).requires(pull)} == {0}
    assert {m.part for m in parameter_server(2, 3, barrier=True).requires(pull)} == {0, 1, 2}


def test_stale_server_answers_a_replica_without_waiting_for_the_others():
    pull = Message(Role.GATHER, 1, 2, 2, 0)
    assert parameter_server(2, 3, stale=True).requires(pull) == (Message(Role.REDUCE, 1, 2, 0, 2),)


@given(exchanges)
def test_every_exchange_reaches_its_end(exchange: Exchange):
    assert run(exchange)[0] == exchange.arrivals


@given(exchanges)
def test_every_replica_ends_with_the_sum_of_all(exchange: Exchange):
    """Each value carries the set of replicas whose gradients it includes."""
    everyone = set(range(exchange.num_replicas))
    _, held = run(exchange)
    for replica in everyone:
        for owner in exchange.owners:
            for part in range(exchange.num_parts):
                assert held[replica][owner, part] == everyone


@given(exchanges, st.integers(0, 1000))
def test_pieces_cover_the_gradient_once(exchange: Exchange, length: int):
    pieces = {
        m.owner * exchange.num_parts + m.part: exchange.piece(m, length)
        for p in exchange.programs
        for m in p
    }
    ends = [edge for _, piece in sorted(pieces.items()) for edge in (piece.start, piece.stop)]
    assert ends == sorted(ends)
    assert ends[0] == 0
    assert ends[-1] == length
    assert ends[1:-1:2] == ends[2::2]


@pytest.mark.parametrize(
    ("exchange", "most"),
    [
        (direct(4, 3), 1.5),
        (direct(4, 3, sharded=True), 1.5),
        (chain(4, 3), 2.0),
        (parameter_server(4, 3), 4.0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_busiest_end_sends_so_many_gradients(exchange: Exchange, most: float):
    sent = [
        sum(exchange.num_bytes(m, 1200) for m in program) / 1200 for program in exchange.programs
    ]
    assert max(sent) == most


def test_only_a_direct_exchange_is_the_same_for_all_replicas():
    assert [name for name, kind in KINDS.items() if kind(3, 4).symmetric] == ["direct", "sharded"]


@pytest.mark.parametrize(
    ("replicas", "parts", "message"), [(1, 1, "num_replicas .* 2"), (2, 0, "num_parts .* 1")]
)
@pytest.mark.parametrize("kind", KINDS)
def test_exchange_refuses_invalid_sizes(kind: str, replicas: int, parts: int, message: str):
    with pytest.raises(ScheduleError, match=f"{message} for an exchange, got"):
        KINDS[kind](replicas, parts)


def run(
    exchange: Exchange,
) -> tuple[tuple[tuple[Message, ...], ...], list[dict[tuple[int, int], set[int]]]]:
    """Send all messages, each end in its order; returns what arrived where, and whose gradients
    each end has of each part.
    """
    ends = range(len(exchange.programs))
    queues = [list(program) for program in exchange.programs]
    arrived: list[set[Message]] = [set() for _ in ends]
    held = [
        {
            (o, p): {end} & set(range(exchange.num_replicas))
            for o in exchange.owners
            for p in range(exchange.num_parts)
        }
        for end in ends
    ]
    moving = True
    while moving:
        moving = False
        for end in ends:
            while queues[end] and arrived[end].issuperset(exchange.requires(queues[end][0])):
                message, moving = queues[end].pop(0), True
                arrived[message.target].add(message)
                held[message.target][message.owner, message.part] |= held[end][
                    message.owner, message.part
                ]
    return tuple(
        tuple(m for m in all_ if m in got)
        for all_, got in zip(exchange.arrivals, arrived, strict=True)
    ), held
