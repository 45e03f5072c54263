"""What a standby decides and a holder may answer, by the time of a clock that the tests set."""

from dpipe.terms.policy import Choice, Tenure, TermLease, TermTimes, TermWatch
from dpipe.terms.records import HolderBeat

PATIENCE_S = 10.0


def beat(count: int, **changes: str) -> HolderBeat:
    return HolderBeat(count=count, address="10.0.0.1:7000", **changes)


def test_count_that_rises_is_waited_for_however_slowly() -> None:
    watch = TermWatch(PATIENCE_S)
    for count in range(20):
        assert watch.seen(1, beat(count), now=9.0 * count) is Choice.WAIT


def test_count_that_stands_still_is_waited_for_as_long_as_patience_lasts() -> None:
    watch = TermWatch(PATIENCE_S)
    assert watch.seen(1, beat(5), now=100.0) is Choice.WAIT
    assert watch.seen(1, beat(5), now=110.0) is Choice.WAIT
    assert watch.seen(1, beat(5), now=110.1) is Choice.CLAIM


def test_holder_without_a_beat_is_waited_for_as_long() -> None:
    watch = TermWatch(PATIENCE_S)
    assert watch.seen(1, None, now=0.0) is Choice.WAIT
    assert watch.seen(1, None, now=10.1) is Choice.CLAIM


def test_somebody_elses_term_is_waited_for_anew() -> None:
    watch = TermWatch(PATIENCE_S)
    watch.seen(1, beat(5), now=0.0)
    assert watch.seen(2, None, now=10.1) is Choice.WAIT
    assert watch.seen(2, beat(5), now=20.0) is Choice.WAIT


def test_url_that_could_not_be_read_says_nothing_of_the_holder() -> None:
    watch = TermWatch(PATIENCE_S)
    watch.seen(1, beat(5), now=0.0)
    watch.saw_nothing()
    assert watch.seen(1, beat(5), now=60.0) is Choice.WAIT
    assert watch.seen(1, beat(5), now=70.1) is Choice.CLAIM


def test_standby_that_was_stopped_for_long_waits_where_the_count_has_risen() -> None:
    watch = TermWatch(PATIENCE_S)
    watch.seen(1, beat(5), now=0.0)
    assert watch.seen(1, beat(500), now=600.0) is Choice.WAIT


def test_holder_that_has_left_is_followed_at_once() -> None:
    assert TermWatch(PATIENCE_S).seen(1, beat(5, state="left"), now=0.0) is Choice.CLAIM


def test_run_that_is_over_is_not_taken_over() -> None:
    watch = TermWatch(PATIENCE_S)
    watch.seen(1, beat(5), now=0.0)
    assert watch.seen(1, beat(5, state="over", failure="it failed"), now=60.0) is Choice.OVER


def test_holder_answers_for_the_lease_behind_each_beat() -> None:
    lease = TermLease(10.0)
    assert lease.tenure(0.0) is Tenure.DOUBTS, "before its first beat"
    lease.confirmed(began_at=1.0)
    assert lease.tenure(10.9) is Tenure.HOLDS
    assert lease.tenure(11.0) is Tenure.DOUBTS
    lease.confirmed(began_at=20.0)
    assert lease.tenure(21.0) is Tenure.HOLDS


def test_beat_that_was_slow_confirms_from_its_beginning() -> None:
    lease = TermLease(10.0)
    lease.confirmed(began_at=5.0)
    lease.confirmed(began_at=1.0)
    assert lease.tenure(14.9) is Tenure.HOLDS


def test_term_is_lost_for_good() -> None:
    lease = TermLease(10.0)
    lease.confirmed(began_at=1.0)
    lease.superseded()
    lease.confirmed(began_at=2.0)
    assert lease.tenure(2.0) is Tenure.LOST


def test_lease_ends_before_a_rank_is_lost_that_was_answered_last() -> None:
    """A rank stops two thirds of a silence after what was answered: `elastic.attendance`."""
    times = TermTimes.of(40.0)
    assert times.lease_s + 2 / 3 * 40.0 < 40.0
    assert times.patience_s >= 8 * times.beat_s
    assert times.lease_s >= 8 * times.beat_s
