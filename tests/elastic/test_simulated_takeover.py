"""Coordinators that take over from each other, under seeded faults: never two truths; and that the
simulation (tests/simulated/heads.py) finds what it is there to find.
"""

from collections.abc import Callable

import pytest
from simulated.head import Journal
from simulated.heads import HeldHead, TermAt, TwoHeads, Url, simulate_heads
from simulated.truth import BrokenPromise

from dpipe.terms.policy import Tenure, TermLease

CHUNKS = 4
SEEDS = 1000 // CHUNKS


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_run_outlives_its_coordinators_and_has_one_truth(chunk: int) -> None:
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        simulate_heads(seed)


def test_seed_gives_the_same_takeovers_each_time() -> None:
    for seed in range(20):
        assert simulate_heads(seed).notes == simulate_heads(seed).notes


@pytest.mark.slow
def test_seeds_reach_what_can_happen_to_coordinators() -> None:
    runs = [simulate_heads(seed) for seed in range(200)]
    stories = ["\n".join(run.notes) for run in runs]
    assert sum(run.url.newest > 2 for run in runs) > 20
    assert sum(run.url.newest == 1 for run in runs) > 20
    for what in ("is killed", "has lost it", "is paused", "cut head off"):
        assert sum(what in story for story in stories) > 20, what


def cut_head_off_for_long(seed: int) -> None:
    """The coordinator reaches its machines, and not the URL, while as many others join."""
    cluster = TwoHeads(seed, num_steps=40)
    for _ in range(cluster.world_size):
        cluster.start_machine()
    cluster.clock.run(60.0, lambda: cluster.journal.newest_step >= 2)
    (head,) = cluster.alive()
    head.is_cut_off = True
    for _ in range(cluster.world_size):
        cluster.clock.after(cluster.random.uniform(2.0, 4.0), cluster.start_machine)
    cluster.clock.after(30.0, setattr, head, "is_cut_off", False)
    cluster.clock.run(400.0, lambda: cluster.journal.is_over)
    assert cluster.journal.is_over, "\n".join(cluster.notes)
    assert cluster.url.newest == 2
    cluster.truth.finished(cluster.num_steps)


@pytest.mark.slow
def test_coordinator_that_is_cut_off_from_the_url_answers_nobody() -> None:
    for seed in range(50):
        cut_head_off_for_long(seed)


def test_simulation_finds_a_coordinator_that_answers_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TermLease, "tenure", holds_for_ever)
    with pytest.raises(BrokenPromise, match="beside"):
        cut_head_off_for_long(seed=0)


class TellsWithoutLooking(HeldHead):
    """Tells machines of an epoch, whoever has taken over since it was decided."""

    def is_superseded(self) -> bool:
        return False


def holds_for_ever(self: TermLease, now: float) -> Tenure:
    return Tenure.LOST if self._is_lost else Tenure.HOLDS


def is_everybodys(self: Url, number: int) -> bool:
    if self.newest < number:
        self.terms.append(TermAt())
    return True


def is_of_the_first(self: Url) -> Journal:
    return Journal()


def test_simulation_finds_a_coordinator_that_does_not_look() -> None:
    with pytest.raises(BrokenPromise):
        simulate_all(TellsWithoutLooking)


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        ("simulated.heads.Url.claim", is_everybodys),
        ("simulated.heads.Url.journal", is_of_the_first),
    ],
)
def test_simulation_finds_a_term_that_is_wrong(
    place: str, mutant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, mutant)
    with pytest.raises(BrokenPromise):
        simulate_all(HeldHead)


def simulate_all(head: type[HeldHead]) -> None:
    for seed in range(1000):
        simulate_heads(seed, head)
