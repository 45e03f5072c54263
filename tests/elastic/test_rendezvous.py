"""Single decisions of the coordinator's policy, on a cluster that only notes what it is told."""

from collections.abc import Mapping
from typing import Any

import pytest

from dpipe.elastic.agents import Enlistment, Epoch, EpochOutcome, EpochReport
from dpipe.elastic.rendezvous import Past, Phase, Rendezvous, Settings

LAYERS = 4


class Noting:
    """The agents: what they are told, by kind."""

    def __init__(self, *, pays: bool = True) -> None:
        self.epochs: list[Epoch] = []
        self.told: list[tuple[Any, ...]] = []
        self.failure: str | None = None
        self.notes: list[str] = []
        self._pays = pays

    def begin(self, epoch: Epoch) -> None:
        self.epochs.append(epoch)

    def stop(self, agent: str, epoch: int, *, after_step: bool) -> None:
        self.told.append(("stop", agent, epoch, after_step))

    def retire(self, agent: str, epoch: int, before: int) -> None:
        self.told.append(("retire", agent, epoch, before))

    def finish(self, reason: str | None) -> None:
        self.failure = reason

    def checkpoint(self) -> int | None:
        return None

    def fewer(self, num_agents: int) -> int | None:
        return num_agents or None

    def pays(self, ranks: int, more: int, steps_left: int) -> bool:
        return self._pays

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close_epoch(self, reason: str) -> None: ...
    def ask(self, agent: str) -> None: ...
    def release(self, agent: str) -> None: ...
    def hang_up(self, agent: str) -> None: ...
    def keep_step(self, step: int) -> None: ...


def made(
    cluster: Noting, world_size: int = 2, past: Past | None = None, **changes: int
) -> Rendezvous:
    settings = Settings(
        num_pieces=LAYERS, world_size=world_size, num_steps=100, gather_s=10.0, **changes
    )
    return Rendezvous(settings, cluster, past)


def enlist(rendezvous: Rendezvous, name: str, now: float = 0.0, epoch: int = 0) -> str | None:
    return rendezvous.enlist(Enlistment(name, name, "host", f"{name}:1", epoch=epoch), now)


def held(step: int, *layers: int) -> Mapping[int, frozenset[int]]:
    return {step: frozenset(layers)}


def alone(*, pays: bool) -> tuple[Rendezvous, Noting]:
    """A run of two ranks that has begun with one, which has made a step; then another came."""
    cluster = Noting(pays=pays)
    rendezvous = made(cluster)
    enlist(rendezvous, "a")
    rendezvous.tick(10.1)
    assert [epoch.seats for epoch in cluster.epochs] == [("a",)]
    enlist(rendezvous, "b", 11.0)
    assert cluster.told == [], "not before it has made a step"
    rendezvous.committed("a", 1, 1, 12.0)
    return rendezvous, cluster


def test_run_grows_back_at_the_end_of_a_step_where_it_pays() -> None:
    rendezvous, cluster = alone(pays=True)
    assert cluster.told == [("stop", "a", 1, True)]
    left = EpochReport(1, EpochOutcome.LEFT)
    rendezvous.ended("a", left, held(2, *range(LAYERS)), 13.0)
    rendezvous.holds("b", 1, {}, 13.0)
    assert [epoch.seats for epoch in cluster.epochs] == [("a",), ("a", "b")]
    assert cluster.epochs[1].resume_step == 2
    assert cluster.epochs[1].sources == dict.fromkeys(range(LAYERS), ("a:1",))


def test_run_stays_as_it_is_where_another_rank_does_not_pay() -> None:
    rendezvous, cluster = alone(pays=False)
    rendezvous.committed("a", 1, 2, 13.0)
    assert cluster.told == []
    assert rendezvous.phase is Phase.RUNNING


def test_journal_older_than_the_run_is_refused() -> None:
    cluster = Noting()
    rendezvous = made(cluster, past=Past(((1, 0), (2, 7)), ("a", "b"), 9))
    assert enlist(rendezvous, "c", epoch=2) is None
    refusal = enlist(rendezvous, "a", epoch=3)
    assert refusal is not None
    assert "was in epoch 3 of this run, and the journal ends with epoch 2" in refusal
    assert set(rendezvous.agents) == {"c"}


def fail(rendezvous: Rendezvous, now: float) -> float:
    """The epoch under way fails on `a`; then the next one begins, if there is one. Returns when."""
    epoch = rendezvous.epoch
    report = EpochReport(epoch, EpochOutcome.FAILED, "the loss is not finite")
    rendezvous.ended("a", report, {}, now)
    while rendezvous.epoch == epoch and rendezvous.phase is not Phase.OVER:
        now += 1.0
        rendezvous.beat("a", now)
        rendezvous.tick(now)
    return now


def test_run_that_fails_three_times_at_one_step_has_failed() -> None:
    cluster = Noting()
    rendezvous = made(cluster, world_size=1)
    enlist(rendezvous, "a")
    now = 0.0
    for _ in range(2):
        now = fail(rendezvous, now)
        assert rendezvous.phase is Phase.RUNNING
    fail(rendezvous, now)
    assert rendezvous.phase is Phase.OVER
    assert cluster.failure == "it failed 3 times at step 0"


def test_failures_at_other_steps_do_not_add_up() -> None:
    cluster = Noting()
    rendezvous = made(cluster, world_size=1)
    enlist(rendezvous, "a")
    now = 0.0
    for step in range(1, 6):
        rendezvous.committed("a", rendezvous.epoch, step, now)
        rendezvous.ended(
            "a",
            EpochReport(rendezvous.epoch, EpochOutcome.FAILED),
            held(step, *range(LAYERS)),
            now,
        )
        now += 1.0
        rendezvous.tick(now)
        assert rendezvous.phase is Phase.RUNNING, step
    assert cluster.failure is None


@pytest.mark.parametrize(
    ("epoch", "steps", "told"),
    [
        (1, (5, 5, 10, 5), [5, 10]),  # each rank says it
        (0, (5,), []),  # of an epoch before, whose steps may have been dropped
    ],
)
def test_spares_hear_which_copies_nobody_needs(
    epoch: int, steps: tuple[int, ...], told: list[int]
) -> None:
    cluster = Noting()
    rendezvous = made(cluster)
    for name in ("a", "b", "spare"):
        enlist(rendezvous, name)
    for step in steps:
        rendezvous.agreed("a", epoch, step, 1.0)
    assert cluster.told == [("retire", "spare", 1, step) for step in told]


def test_spare_keeps_what_it_has_said_once_an_epoch_ends() -> None:
    cluster = Noting()
    rendezvous = made(cluster)
    for name in ("a", "b", "spare"):
        enlist(rendezvous, name)
    rendezvous.ended("a", EpochReport(1, EpochOutcome.ABORTED), {}, 1.0)
    rendezvous.agreed("b", 1, 5, 1.0)
    assert not [words for words in cluster.told if words[0] == "retire"]


def test_spare_that_keeps_copies_is_replaced_where_it_is_lost() -> None:
    """Seen: copies went nowhere for 280 steps, and a rank that was lost then took them with it."""
    cluster = Noting()
    rendezvous = made(cluster)
    for name in ("a", "b"):
        enlist(rendezvous, name)
    enlist(rendezvous, "d", 1.0)
    whole = held(1, *range(LAYERS))
    for name in ("a", "b"):
        rendezvous.ended(name, EpochReport(1, EpochOutcome.ABORTED), whole, 2.0)
    rendezvous.holds("d", 1, {}, 3.0)
    rendezvous.tick(5.0)
    assert cluster.epochs[-1].guards == (("d:1",), ("d:1",))
    cluster.told.clear()
    rendezvous.gone("d", "its process has ended", 6.0)
    assert cluster.told == [("stop", "a", 2, True), ("stop", "b", 2, True)]
    whole = held(2, *range(LAYERS))
    for name in ("a", "b"):
        rendezvous.ended(name, EpochReport(2, EpochOutcome.LEFT), whole, 7.0)
    rendezvous.tick(12.0)
    assert cluster.epochs[-1].guards == (("b:1",), ("a:1",))
    assert cluster.epochs[-1].resume_step == 2


def test_coordinator_that_rests_begins_no_epoch() -> None:
    cluster = Noting()
    rendezvous = made(cluster)
    for name in ("a", "b"):
        enlist(rendezvous, name)
    rendezvous.rest(10.0, 1.0)
    assert cluster.told == [("stop", "a", 1, True), ("stop", "b", 1, True)]
    assert not rendezvous.is_at_rest
    for name in ("a", "b"):
        rendezvous.ended(name, EpochReport(1, EpochOutcome.LEFT), held(3, 0, 1, 2, 3), 2.0)
    rendezvous.tick(3.0)
    assert rendezvous.is_at_rest
    assert len(cluster.epochs) == 1


def test_what_an_epoch_begins_with_may_change() -> None:
    """The step under way is ended, but not for long: it may wait for what is gone."""
    cluster = Noting()
    rendezvous = made(cluster, silence_s=40.0)
    for name in ("a", "b"):
        enlist(rendezvous, name)
    rendezvous.renew("a parameter server has moved", 1.0)
    assert cluster.told == [("stop", "a", 1, True), ("stop", "b", 1, True)]
    rendezvous.tick(10.9)
    assert rendezvous.phase is Phase.RUNNING
    rendezvous.tick(11.1)
    assert rendezvous.phase is Phase.ENDING
    assert cluster.told[2:] == [("stop", "a", 1, False), ("stop", "b", 1, False)]
    rendezvous.renew("a parameter server has moved", 11.2)
    assert len(cluster.told) == 4, "the next epoch begins with it anyhow"


def test_processes_that_are_scattered_over_machines_are_named() -> None:
    """There are as many as ranks, and ranks that hold their layers together must be on one."""
    cluster = Noting()
    rendezvous = made(cluster, group_size=2)
    for name, machine in (("a", "one"), ("b", "two")):
        rendezvous.enlist(Enlistment(name, name, machine, f"{name}:1", machine=machine), 0.0)
    rendezvous.tick(1.0)
    waiting = [note for note in cluster.notes if "on one machine each" in note]
    assert waiting == [
        "2 processes have joined, and ranks wait: those that hold their layers together need 2 "
        "processes on one machine each; start more where there are too few"
    ]
    rendezvous.enlist(Enlistment("c", "c", "two", "c:1", machine="two"), 2.0)
    assert [epoch.seats for epoch in cluster.epochs] == [("b", "c")]
