import random
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from dpipe.measure import pings
from dpipe.measure.connections import PeerSockets
from dpipe.measure.notes import NoteKind, Notes
from dpipe.measure.pings import delay_of, ping_all


def test_delay_is_half_of_the_middle_round_trip() -> None:
    assert delay_of([0.020] * 9 + [0.5]).one_way_ms == pytest.approx(10)


def test_jitter_is_that_of_a_profile() -> None:
    """netem draws each delay evenly from within the jitter; a round trip has two of them."""
    draws = random.Random(7)
    round_trips = [draws.uniform(0.015, 0.025) + draws.uniform(0.015, 0.025) for _ in range(4000)]
    delay = delay_of(round_trips)
    assert delay.one_way_ms == pytest.approx(20, rel=0.02)
    assert delay.jitter_ms == pytest.approx(5, rel=0.05)


def test_jitter_of_as_many_pings_as_are_sent_is_near_the_links() -> None:
    """Of 20 it was not: 7 measurements in a thousand found less than half."""
    draws = random.Random(7)
    for _ in range(1000):
        round_trips = [
            draws.uniform(0.015, 0.025) + draws.uniform(0.015, 0.025)
            for _ in range(pings._COLD, pings._PINGS)
        ]
        assert 2.5 < delay_of(round_trips).jitter_ms < 10


def test_jitter_is_at_most_the_delay() -> None:
    delay = delay_of([0.0001] * 5 + [0.1] * 5)
    assert delay.jitter_ms <= delay.one_way_ms


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pings, "_INTERVAL_S", 0.005)
    monkeypatch.setattr(pings, "_ANSWER_S", 0.3)


@pytest.fixture
def pair(short: None) -> Iterator[tuple[PeerSockets, PeerSockets]]:
    with ExitStack() as stack:
        both = [stack.enter_context(end) for end in socket.socketpair()]
        yield tuple(PeerSockets({0: end}, Notes(end)) for end in both)


def test_lower_rank_asks_and_the_higher_one_answers(pair) -> None:
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(ping_all, 0, {1: pair[0]})
        answered = pool.submit(ping_all, 1, {0: pair[1]})
        delays, problems = asked.result(30)
        assert 0 < delays[1].one_way_ms < 1000
        assert problems == {}
        assert answered.result(30) == ({}, {})


def test_peer_that_does_not_answer_is_named(pair) -> None:
    assert ping_all(0, {1: pair[0]}) == ({}, {1: "rank 1 answers no ping"})


def test_peer_that_asks_nothing_is_named(pair) -> None:
    assert ping_all(1, {0: pair[1]}) == ({}, {0: "rank 0 answers no ping"})


@pytest.mark.parametrize("kind", [NoteKind.PING, NoteKind.PONG, NoteKind.DONE, NoteKind.GOT])
def test_answer_that_was_not_asked_for_is_refused(pair, kind: NoteKind) -> None:
    pair[1].notes.send(kind, 99)
    _, problems = ping_all(0, {1: pair[0]})
    assert problems == {1: f"rank 1: it sent {kind.name} where no such note belongs"}


def test_peer_that_is_gone_is_named(pair) -> None:
    pair[1].notes.socket.close()
    _, problems = ping_all(0, {1: pair[0]})
    assert problems[1].startswith("rank 1: ")
