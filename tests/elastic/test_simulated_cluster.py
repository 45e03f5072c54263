"""Elastic runs of whole clusters on a virtual clock, under seeded faults (tests/simulated), and
that the simulation finds what it is there to find: a policy that is wrong in one point.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pytest
from simulated.cluster import PARTS, SERVED, SimulatedCluster
from simulated.faults import CUTS, Cut, simulate
from simulated.machine import Machine
from simulated.truth import BrokenPromise

from dpipe.elastic.agents import Agent
from dpipe.elastic.attendance import Attendance
from dpipe.elastic.lineage import Held, Lineage, newest_whole
from dpipe.elastic.rendezvous import Rendezvous

CHUNKS = 4
SEEDS = 1000 // CHUNKS


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_run_survives_everything_and_has_one_truth(chunk: int) -> None:
    for seed in range(chunk * SEEDS, (chunk + 1) * SEEDS):
        simulate(seed)


def test_seed_gives_the_same_run_each_time() -> None:
    for seed in range(20):
        assert simulate(seed).notes == simulate(seed).notes


def test_seeds_reach_what_can_happen() -> None:
    """Else the faults have become too gentle, and the test above proves little."""
    runs = [simulate(seed) for seed in range(200)]
    stories = ["\n".join(run.notes) for run in runs]
    assert sum(len(run.truth.epochs) > 2 for run in runs) > 20
    assert sum(run.truth.num_repeated > 0 for run in runs) > 20
    assert sum(run.truth.num_repeated == 0 and len(run.truth.epochs) > 1 for run in runs) > 20
    for what in ("no sign of life", "its process ended", "leaves within", "coordinator is killed"):
        assert sum(what in story for story in stories) > 10, what


def test_seeds_reach_what_can_happen_to_a_parameter_server() -> None:
    seeds = [seed for seed in range(2000) if CUTS[seed % len(CUTS)].keeps == SERVED]
    stories = ["\n".join(simulate(seed).notes) for seed in seeds]
    for what in (
        "server is killed",
        "server has moved",
        "came back without its state",
        "did not come back",
    ):
        assert sum(what in story for story in stories) > 3, what


@pytest.mark.parametrize("seed", range(100))
def test_second_loss_costs_nothing_once_the_resumed_copies_have_arrived(seed: int) -> None:
    """Any two of the machines, one after the other; between both no copies are due."""
    cluster = SimulatedCluster(seed, num_steps=100)
    cluster.saves = False  # no checkpoint helps
    for _ in range(cluster.world_size + 2):
        cluster.start_machine()
    reach(cluster, lambda: copied(cluster) >= cluster.guard_every)
    cluster.guard_every = 1_000_000
    resumed = copied(cluster)
    for _ in range(2):
        num_epochs = len(cluster.truth.epochs)
        alive = [machine for machine in cluster.machines.values() if machine.is_alive]
        cluster.random.choice(alive).die()
        # A spare may be lost that keeps nothing: then there is no other epoch.
        reach(cluster, lambda least=resumed: copied(cluster) >= least)
        if len(cluster.truth.epochs) > num_epochs:
            assert cluster.journal.epochs[-1].resume_step >= resumed
            resumed = cluster.journal.epochs[-1].resume_step


@dataclass(frozen=True)
class Silence:
    """A rank of a run with a spare of which nothing is heard for some seconds, from step 3 on."""

    cluster: SimulatedCluster
    machine: Machine

    @classmethod
    def of(cls, how: str, seconds: float, seed: int) -> "Silence":
        cluster = SimulatedCluster(seed, num_steps=150, silence_s=40.0)
        cluster.saves = False
        for _ in range(cluster.world_size + 1):
            cluster.start_machine()
        cluster.clock.run(600.0, lambda: cluster.journal.newest_step >= 3)
        seats = cluster.journal.epochs[-1].seats
        machine = cluster.machines[cluster.random.choice(seats)]
        # Anywhere in a step.
        after_s = cluster.random.uniform(0.0, 1.5)
        cluster.clock.after(after_s, _SILENCES[how], cluster, machine, seconds)
        cluster.clock.run(cluster.clock.now + 900.0, lambda: cluster.journal.is_over)
        assert cluster.journal.is_over, "\n".join(cluster.notes)
        cluster.truth.finished(cluster.num_steps)
        return cls(cluster, machine)


def _pause(cluster: SimulatedCluster, machine: Machine, seconds: float) -> None:
    machine.paused_until = cluster.clock.now + seconds


def _cut(cluster: SimulatedCluster, machine: Machine, seconds: float) -> None:
    for way in (cluster.cuts, cluster.deaf):
        way.add(machine.name)
        cluster.clock.after(seconds, way.discard, machine.name)
    # What was sent meanwhile is lost with its connection.
    cluster.clock.after(seconds * cluster.random.random(), cluster.break_connection, machine)


_SILENCES = {"pause": _pause, "cut": _cut}


@pytest.mark.parametrize("how", _SILENCES)
@pytest.mark.parametrize("seconds", [5.0, 20.0])
def test_short_silence_is_waited_out(how: str, seconds: float) -> None:
    """With the default `timeouts.heartbeat` of 40 s: the epoch goes on, and repeats nothing."""
    for seed in range(10):
        silence = Silence.of(how, seconds, seed)
        story = "\n".join(silence.cluster.notes)
        assert len(silence.cluster.truth.epochs) == 1, story
        assert silence.cluster.truth.num_repeated == 0, story


@pytest.mark.parametrize("how", _SILENCES)
def test_long_silence_is_a_loss_and_who_comes_back_is_a_spare(how: str) -> None:
    for seed in range(10):
        silence = Silence.of(how, 60.0, seed)
        story = "\n".join(silence.cluster.notes)
        assert len(silence.cluster.truth.epochs) == 2, story
        assert silence.machine.name not in silence.cluster.journal.epochs[-1].seats, story
        joined = f"{silence.machine.name} ({silence.machine.name}) joined"
        assert story.count(joined) == 2, story


def test_links_full_of_data_lose_nobody_within_an_hour() -> None:
    """Whatever is said waits 4 s behind the data: 5 MB in a queue before 10 Mbit/s."""
    cluster = SimulatedCluster(0, num_steps=100_000, silence_s=40.0, whole_s=4.0)
    for _ in range(cluster.world_size + 1):
        cluster.start_machine()
    cluster.clock.run(3600.0, lambda: False)
    assert cluster.journal.newest_step > 300
    assert len(cluster.truth.epochs) == 1
    assert not [note for note in cluster.notes if "lost" in note]


def copied(cluster: SimulatedCluster) -> int:
    """The newest step of the epoch under way that the guards of all its ranks have, too."""
    works = [machine.work for machine in cluster.machines.values() if machine.work is not None]
    newest = [work for work in works if work.epoch.number == cluster.truth.epochs[-1]]
    if len(newest) < cluster.world_size:
        return -1
    return min(work.whole for work in newest)


def reach(cluster: SimulatedCluster, is_there: Callable[[], bool]) -> None:
    """Let things happen, at least for as long as a loss takes to be noticed."""
    until_s = cluster.clock.now + 2 * cluster.silence_s
    cluster.clock.run(until_s, lambda: False)
    cluster.clock.run(until_s + 60, is_there)
    assert is_there(), "\n".join(cluster.notes)


@pytest.mark.parametrize("seed", range(20))
def test_run_goes_on_with_a_parameter_server_elsewhere(seed: int) -> None:
    """Whoever waits for the old one is told of the new one, which has nothing of the run."""
    cluster = SimulatedCluster(seed, num_steps=40, world_size=2, replicas=2, keeps=SERVED)
    served = cluster.served
    assert served is not None
    for _ in range(2):
        cluster.start_machine()
    cluster.clock.run(60.0, lambda: cluster.journal.newest_step >= 7)
    served.kill()
    cluster.clock.after(1.0, served.move)
    cluster.clock.run(200.0, lambda: cluster.journal.is_over)
    story = "\n".join(cluster.notes)
    assert cluster.journal.is_over, story
    assert len(cluster.truth.epochs) == 2, story
    assert cluster.truth.num_repeated <= 2 * cluster.guard_every, story
    cluster.truth.finished(cluster.num_steps)


def takes_one_replica_for_all(copies: Iterable[Held], num_pieces: int) -> int | None:
    own = [
        {step: {piece // 2 for piece in held if piece % 2 == 0} for step, held in each.items()}
        for each in copies
    ]
    return newest_whole(own, num_pieces // 2)


def test_simulation_finds_a_policy_that_takes_one_replica_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    number = CUTS.index(Cut(stages=2, replicas=2, keeps=PARTS))
    monkeypatch.setattr("dpipe.elastic.rendezvous.newest_whole", takes_one_replica_for_all)
    with pytest.raises(BrokenPromise):
        simulate_all(Rendezvous, range(number, 1000, len(CUTS)))


def simulate_all(rendezvous: type[Rendezvous], seeds: Iterable[int] = range(1000)) -> None:
    for seed in seeds:
        simulate(seed, rendezvous)


class AwaitsNobody(Rendezvous):
    """Begins the next epoch before it knows what all hold."""

    def _end(self, reason: str, now: float) -> None:
        super()._end(reason, now)
        self._awaited.clear()
        self._asked.clear()


class ForgetsEpochs(Rendezvous):
    """Counts epochs from the start again after a restart of the coordinator."""

    def __init__(self, settings, cluster, past, now) -> None:
        super().__init__(settings, cluster, past, now)
        self._lineage = Lineage()


class CountsDroppedSteps(Rendezvous):
    """Counts what an epoch reports that others have dropped since."""

    def committed(self, agent_id: str, epoch: int, step: int, now: float) -> None:
        super().committed(agent_id, self.epoch, step, now)


class NeverLosesAnybody(Rendezvous):
    """Waits for the silent for ever."""

    def tick(self, now: float) -> None:
        for agent in self.agents.values():
            agent.heard_at = now
        super().tick(now)


class LeavesTheLostAlone(Rendezvous):
    """Does not hang up, so that whoever was only slow never joins again."""

    def _lose(self, agent_id: str, why: str, now: float) -> None:
        self._cluster.hang_up = lambda agent: None
        super()._lose(agent_id, why, now)


@pytest.mark.parametrize(
    "mutant",
    [
        AwaitsNobody,
        ForgetsEpochs,
        CountsDroppedSteps,
        NeverLosesAnybody,
        LeavesTheLostAlone,
    ],
)
def test_simulation_finds_a_wrong_policy(mutant: type[Rendezvous]) -> None:
    with pytest.raises(BrokenPromise):
        simulate_all(mutant)


def drops_nothing(self: Lineage, epoch: int) -> float:
    return math.inf


def works_on(self: Attendance) -> None:
    pass


def is_anywhere(agent: Agent, group_size: int) -> str:
    return ""


@pytest.mark.parametrize(
    ("place", "mutant"),
    [
        ("dpipe.elastic.lineage.Lineage.newest_valid", drops_nothing),
        ("dpipe.elastic.attendance.Attendance._stop_work", works_on),
        ("dpipe.elastic.seating._machine", is_anywhere),
    ],
)
def test_simulation_finds_a_wrong_part(
    place: str, mutant: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(place, mutant)
    with pytest.raises(BrokenPromise):
        simulate_all(Rendezvous)
