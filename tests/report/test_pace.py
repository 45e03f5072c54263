"""Progress of a bench, with a fake clock."""

import pickle
from threading import Thread

import pytest
from torch.distributed import HashStore

from dpipe.report import pace as pacing
from dpipe.report.pace import MIN_ROUNDS, QUICK_S, Pace, agreed_rounds, silent


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pacing, "time", clock)
    return clock


def begun(clock: Clock, **settings: float) -> Pace:
    now_s = clock.now_s
    return Pace("x", 10.0, began_s=now_s, part_began_s=now_s, rounds_began_s=now_s, **settings)


def test_bench_says_how_long_it_takes_and_how_long_is_left(clock, capsys) -> None:
    pace = begun(clock)
    for _ in pace.parts(["a", "b", "c"], str):
        clock.now_s += 4  # processes start
        rounds = pace.rounds(4, 2.0)
        for number in range(rounds):
            clock.now_s += 10
            pace.done(number + 1, rounds)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[:7] == [
        "bench x: about 30 s on two idle cores",
        "bench x: a (1 of 3), about 30 s left",
        "bench x: a (1 of 3), 1 of 4 rounds, about 2 min left",  # 30 s of this, 44 s of each other
        "bench x: a (1 of 3), 2 of 4 rounds, about 2 min left",
        "bench x: a (1 of 3), 3 of 4 rounds, about 98 s left",
        "bench x: a (1 of 3), 4 of 4 rounds, about 88 s left",
        "bench x: b (2 of 3), about 88 s left",
    ]


def test_rounds_are_reported_every_few_seconds_only(clock, capsys) -> None:
    pace = begun(clock)
    pace.rounds(100, 0.1)
    for number in range(100):
        clock.now_s += 0.1
        pace.done(number + 1, 100)
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_all_rounds_are_taken_where_there_is_no_limit(clock) -> None:
    assert begun(clock).rounds(40, 1000.0) == 40


def test_rounds_of_a_part_fit_its_share_of_the_limit(clock) -> None:
    """60 s: four parts of 5 s to start, 9 s of rounds, 1 s to close."""
    pace = begun(clock, limit_s=QUICK_S)
    parts = pace.parts(["a", "b", "c", "d"], str)
    next(parts)
    clock.now_s += 5
    assert pace.rounds(40, 1.0) == 9
    assert pace.rounds(4, 1.0) == 4
    assert pace.rounds(40, 8.0) == MIN_ROUNDS


def test_part_that_would_exceed_the_limit_is_left_out_and_said_to_be(clock, capsys) -> None:
    pace = begun(clock, limit_s=QUICK_S)
    measured = []
    for part in pace.parts(["a", "b", "c", "d"], str):
        measured.append(part)
        clock.now_s += 25
    assert measured == ["a", "b"]
    assert capsys.readouterr().err.splitlines()[-1] == "bench x: left out, for lack of time: c, d"


def test_part_that_is_under_way_is_not_said_to_end_with_the_limit(clock, capsys) -> None:
    pace = begun(clock, limit_s=QUICK_S)
    next(pace.parts(["a", "b"], str))
    clock.now_s += 50
    pace.rounds(40, 20.0)
    clock.now_s += 20
    pace.done(1, MIN_ROUNDS)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "bench x: a (1 of 2), 1 of 3 rounds, about 40 s left"


def test_first_part_is_measured_whatever_it_takes(clock) -> None:
    assert next(begun(clock, limit_s=0.0).parts(["a", "b"], str)) == "a"


def test_processes_of_a_part_take_as_many_rounds(clock) -> None:
    store = HashStore()
    pace = begun(clock, limit_s=QUICK_S)
    rounds: dict[int, int] = {}

    def process(rank: int) -> None:
        own = pickle.loads(pickle.dumps(pace))
        rounds[rank] = agreed_rounds(own, rank, store, 40, 2.0 + rank)

    threads = [Thread(target=process, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert rounds == {0: 29, 1: 29, 2: 29}


def test_silent_pace_writes_nothing_and_limits_nothing(capsys) -> None:
    pace = silent()
    for _ in pace.parts(["a"], str):
        assert pace.rounds(7, 1000.0) == 7
        pace.done(7, 7)
    assert capsys.readouterr() == ("", "")
