from collections import Counter
from itertools import combinations

import pytest

from dpipe.measure.rounds import (
    ROUNDS_S,
    Timetable,
    partner,
    tournament,
)

SIX = """
0-5 1-4 2-3
0-4 3-5 1-2
0-3 2-4 1-5
0-2 1-3 4-5
0-1 2-5 3-4
"""


def drawn(num_ranks: int) -> str:
    rows = []
    for pairs in tournament(num_ranks):
        rows.append(" ".join(f"{lower}-{higher}" for lower, higher in pairs))
    return "\n" + "\n".join(rows) + "\n"


def test_ranks_move_on_by_a_seat_each_round() -> None:
    assert drawn(6) == SIX


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 8, 63, 64])
def test_every_pair_meets_once_and_nobody_is_in_two_pairs_of_a_round(num_ranks: int) -> None:
    rounds = tournament(num_ranks)
    met = Counter(pair for pairs in rounds for pair in pairs)
    assert met == Counter(combinations(range(num_ranks), 2))
    for pairs in rounds:
        ranks = [rank for pair in pairs for rank in pair]
        assert len(set(ranks)) == len(ranks)
    assert len(rounds) == (num_ranks if num_ranks % 2 else num_ranks - 1)


def test_of_an_odd_number_one_sits_out_each_round() -> None:
    rests = [rank for pairs in tournament(5) for rank in range(5) if partner(pairs, rank) is None]
    assert sorted(rests) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("round_trip_s", [0.0001, 0.02, 0.134, 0.3, 1.0])
def test_rounds_of_64_machines_are_over_in_time(round_trip_s: float) -> None:
    """Whatever their links: what is left of two minutes is for layers, connections, pings, the
    rounds' ends and for sending at once.
    """
    rounds = tournament(64)
    round_trips_s = dict.fromkeys(combinations(range(64), 2), round_trip_s)
    lengths = Timetable(rounds, round_trips_s).lengths_s
    assert sum(lengths) <= ROUNDS_S * 1.0001
    assert min(lengths) > 0.9


def test_round_is_as_long_as_its_longest_link_needs() -> None:
    rounds = [((0, 3), (1, 2)), ((0, 1), (2, 3))]
    round_trips_s = {(0, 1): 0.001, (2, 3): 0.001, (0, 3): 0.001, (1, 2): 0.2}
    long, short = Timetable(rounds, round_trips_s).lengths_s
    assert short < 3.0 < long


def test_round_of_pairs_that_cannot_talk_takes_no_time() -> None:
    assert Timetable([((0, 1),)], {}).lengths_s == [0.0]


def test_directions_take_turns_where_there_is_time() -> None:
    few = Timetable(tournament(8), dict.fromkeys(combinations(range(8), 2), 0.1))
    assert few.in_turns
    assert not few.at_once(0.1)
    assert few.stream_s(1.0, 0.0) == pytest.approx(0.45)
    assert few.stream_s(1.0, 0.1) == pytest.approx(0.35)
    assert few.stream_s(0.1, 0.2) == 0.0


def test_long_links_of_many_machines_are_measured_both_ways_at_once() -> None:
    many = Timetable(tournament(64), dict.fromkeys(combinations(range(64), 2), 0.1))
    assert many.at_once(0.1)
    assert not many.at_once(0.01)
    assert many.stream_s(1.0, 0.1) == pytest.approx(0.7)
