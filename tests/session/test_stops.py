"""Silence is counted while this process runs."""

import time

import pytest

from dpipe.session.stops import Stops

INTERVAL_S, SILENCE_S = 0.5, 40.0


@pytest.fixture
def begun_at(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(time, "monotonic", lambda: 100.0)
    return 100.0


@pytest.fixture
def stops(begun_at: float) -> Stops:
    return Stops(INTERVAL_S, SILENCE_S)


def run(stops: Stops, begun_at: float, until: float) -> None:
    """Tick as often as is asked for."""
    now = begun_at
    while now < until:
        now += INTERVAL_S
        stops.tick(now)


def test_silence_of_a_process_that_runs_is_all_the_time(stops: Stops, begun_at: float) -> None:
    run(stops, begun_at, begun_at + 50)
    assert stops.silent_s(begun_at + 10, begun_at + 50) == 40


def test_stop_is_not_counted_nor_as_long_again(stops: Stops, begun_at: float) -> None:
    """The other end has sent ever less often meanwhile."""
    stops.tick(begun_at + 7)
    assert stops.silent_s(begun_at, begun_at + 7) == -7
    run(stops, begun_at + 7, begun_at + 30)
    assert stops.silent_s(begun_at, begun_at + 30) == 30 - 2 * 7


def test_long_stop_is_followed_by_one_silence_at_most(stops: Stops, begun_at: float) -> None:
    stops.tick(begun_at + 3600)
    assert stops.silent_s(begun_at, begun_at + 3600 + SILENCE_S) == 0


def test_only_what_came_after_the_last_sign_is_excused(stops: Stops, begun_at: float) -> None:
    """The thread that reads may wake before the one that ticks."""
    stops.tick(begun_at + 3600)
    woke_at = begun_at + 3599.5
    assert stops.silent_s(woke_at, woke_at + 41) == 40
    assert stops.silent_s(begun_at + 3601, begun_at + 3641) == 40


def test_end_that_is_late_all_the_time_still_finds_the_other_lost(
    stops: Stops, begun_at: float
) -> None:
    """Of a process that was late once in a heartbeat the other end could be silent for ever."""
    now = begun_at
    for _ in range(10):
        run(stops, now, now + 8)
        now += 10
        stops.tick(now)
    assert stops.silent_s(begun_at, now) > SILENCE_S
