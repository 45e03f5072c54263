"""What befalls a simulated cluster, by seed, and the run from its first machine to its end."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dpipe.elastic.rendezvous import Rendezvous
from simulated.cluster import PARTS, SERVED, WHOLE, SimulatedCluster
from simulated.machine import Machine
from simulated.truth import BrokenPromise

_FAULTS_S = 25.0  # after which nothing new befalls it
_HEALED_S = 400.0  # within which the run must be over


def simulate(seed: int, rendezvous: Callable[..., Rendezvous] = Rendezvous) -> SimulatedCluster:
    """A run under the faults of `seed`. Raises `BrokenPromise` with what happened."""
    cluster = _new(seed, rendezvous)
    try:
        _run(cluster)
    except BrokenPromise as broken:
        story = "\n".join(cluster.notes[-40:])
        raise BrokenPromise(f"seed {seed}: {broken}\n{story}") from None
    return cluster


def _new(seed: int, rendezvous: Callable[..., Rendezvous]) -> SimulatedCluster:
    return SimulatedCluster(seed, rendezvous=rendezvous, **sizes_of(seed))


@dataclass(frozen=True)
class Cut:
    """How a job is cut into ranks, and what replicas keep."""

    stages: int
    replicas: int = 1
    group_size: int = 1
    keeps: str = WHOLE


CUTS = (
    Cut(stages=4),
    Cut(stages=2, group_size=2),
    Cut(stages=3),
    Cut(stages=2, replicas=2, keeps=PARTS),
    Cut(stages=2),
    Cut(stages=1, replicas=2, keeps=SERVED),
    Cut(stages=2, replicas=2),
    Cut(stages=1),
    Cut(stages=1, replicas=3, keeps=PARTS),
    Cut(stages=1, group_size=2),
    Cut(stages=1, replicas=2, group_size=2, keeps=PARTS),
    Cut(stages=2, replicas=2, keeps=SERVED),
)


def sizes_of(seed: int) -> dict[str, Any]:
    # Not of the cluster's own random numbers: a change there does not change its size.
    cut = CUTS[seed % len(CUTS)]
    world_size = cut.stages * cut.replicas * cut.group_size
    may_shrink = seed // len(CUTS) % 2
    return {
        "world_size": world_size,
        "group_size": cut.group_size,
        "replicas": cut.replicas,
        "keeps": cut.keeps,
        "fewest": 1 if may_shrink else world_size,
    }


def _run(cluster: SimulatedCluster) -> None:
    chance = cluster.random
    num_machines = cluster.world_size + chance.randrange(0, 3)
    for _ in range(num_machines):
        cluster.clock.after(chance.uniform(0.0, 2.0), cluster.start_machine)
    for _ in range(chance.randrange(1, 6)):
        fault = chance.choice(faults_of(cluster))
        cluster.clock.after(chance.uniform(0.0, _FAULTS_S), befall, cluster, fault)
    cluster.clock.after(_FAULTS_S, _heal, cluster)
    cluster.clock.run(_FAULTS_S + _HEALED_S, lambda: _is_over(cluster))
    check_end(cluster)


def check_end(cluster: SimulatedCluster) -> None:
    """Raises `BrokenPromise` unless the run is over, and all that it has made is one truth."""
    if not cluster.journal.is_over:
        raise BrokenPromise(f"the run is not over after {cluster.clock.now:.0f} s")
    if cluster.journal.failure is not None:
        raise BrokenPromise(f"the run has failed: {cluster.journal.failure}")
    cluster.truth.finished(cluster.num_steps)


def _is_over(cluster: SimulatedCluster) -> bool:
    return cluster.journal.is_over


def befall(cluster: SimulatedCluster, fault: Callable[..., None]) -> None:
    if not cluster.journal.is_over:
        cluster.note(f"-- {fault.__name__.strip('_').replace('_', ' ')}")
        fault(cluster)


def _heal(cluster: SimulatedCluster) -> None:
    """From here on nothing is broken, and there are machines enough."""
    cluster.cuts.clear()
    cluster.deaf.clear()
    cluster.start_head()
    if cluster.served is not None and not cluster.served.is_up:
        cluster.served.move()
    staying = [
        machine
        for machine in cluster.machines.values()
        if machine.is_alive and not machine.attendance.is_leaving
    ]
    missing = max(1, cluster.world_size + 1 - len(staying))
    # Those that stay may be scattered.
    if cluster.group_size > 1:
        missing = cluster.world_size
    for _ in range(missing):
        cluster.start_machine("healed" if cluster.group_size > 1 else None)


def _any(cluster: SimulatedCluster) -> Machine | None:
    alive = [machine for machine in cluster.machines.values() if machine.is_alive]
    return cluster.random.choice(alive) if alive else None


def _kill(cluster: SimulatedCluster) -> None:
    machine = _any(cluster)
    if machine is not None:
        machine.die()


def _kill_two_neighbours(cluster: SimulatedCluster) -> None:
    seats = cluster.journal.epochs[-1].seats if cluster.journal.epochs else ()
    if len(seats) < 2:
        return
    rank = cluster.random.randrange(len(seats) - 1)
    for name in seats[rank : rank + 2]:
        if cluster.machines[name].is_alive:
            cluster.machines[name].die()


def _kill_all_beside(cluster: SimulatedCluster) -> None:
    """A machine is gone, with all its processes."""
    machine = _any(cluster)
    if machine is not None:
        for other in list(cluster.machines.values()):
            if other.is_alive and other.place == machine.place:
                other.die()


def _kill_and_replace(cluster: SimulatedCluster) -> None:
    _kill(cluster)
    cluster.clock.after(cluster.random.uniform(0.0, 3.0), cluster.start_machine)


def _power_cut(cluster: SimulatedCluster) -> None:
    """A machine is gone, and no host answers for it."""
    machine = _any(cluster)
    if machine is not None:
        cluster.cuts.add(machine.name)
        cluster.deaf.add(machine.name)
        machine.is_alive = False
        machine.work = None
        connection = machine.connection
        cluster.clock.after(cluster.silence_s, cluster.break_connection, machine)
        assert connection is None or connection is machine.connection


def _pause(cluster: SimulatedCluster) -> None:
    machine = _any(cluster)
    if machine is not None:
        pause_s = cluster.random.choice((1.0, 3.0, 8.0))
        machine.paused_until = max(machine.paused_until, cluster.clock.now + pause_s)


def _cut(cluster: SimulatedCluster) -> None:
    """For a while nothing goes one way, or both, between some machines and the coordinator."""
    seconds = cluster.random.choice((1.0, 3.0, 8.0, 16.0))
    alive = [machine for machine in cluster.machines.values() if machine.is_alive]
    group = cluster.random.sample(alive, cluster.random.randrange(len(alive) + 1))
    ways = cluster.random.choice(((cluster.cuts,), (cluster.deaf,), (cluster.cuts, cluster.deaf)))
    for machine in group:
        for way in ways:
            way.add(machine.name)
            cluster.clock.after(seconds, way.discard, machine.name)
        # What was sent meanwhile is lost: the connection breaks.
        cluster.clock.after(cluster.random.uniform(0.5, seconds), cluster.break_connection, machine)


def _break(cluster: SimulatedCluster) -> None:
    machine = _any(cluster)
    if machine is not None:
        cluster.break_connection(machine)


def _restart_coordinator(cluster: SimulatedCluster) -> None:
    cluster.kill_head()
    cluster.clock.after(cluster.random.choice((0.1, 1.0, 5.0, 10.0)), cluster.start_head)


def _join(cluster: SimulatedCluster) -> None:
    cluster.start_machine()


def _leave(cluster: SimulatedCluster) -> None:
    machine = _any(cluster)
    if machine is not None:
        within_s = cluster.random.choice((0.5, 3.0, 10.0))
        machine.run(machine.attendance.leave, within_s, cluster.clock.now)


FAULTS = (
    _kill,
    _kill_two_neighbours,
    _kill_and_replace,
    _power_cut,
    _pause,
    _cut,
    _break,
    _restart_coordinator,
    _join,
    _leave,
)


def _restart_server(cluster: SimulatedCluster) -> None:
    """Killed, and started again where it was, with its folder or without."""
    served = cluster.served
    assert served is not None
    if served.is_up:
        served.kill()
        away_s = cluster.random.choice((0.5, 2.0, 12.0))
        cluster.clock.after(away_s, _start_server, cluster, cluster.random.random() < 0.5)


def _start_server(cluster: SimulatedCluster, has_folder: bool) -> None:
    served = cluster.served
    assert served is not None
    if not served.is_up:
        served.start(has_folder=has_folder)


def _move_server(cluster: SimulatedCluster) -> None:
    """Started elsewhere, while it is there or after it was killed."""
    served = cluster.served
    assert served is not None
    if served.is_up and cluster.random.random() < 0.5:
        served.kill()
    cluster.clock.after(cluster.random.choice((0.0, 1.0, 5.0)), served.move)


# Often: most runs have no server.
SERVER_FAULTS = (_restart_server, _restart_server, _restart_server, _move_server, _move_server)


def faults_of(cluster: SimulatedCluster) -> tuple[Callable[..., None], ...]:
    faults = FAULTS
    if cluster.group_size > 1:
        faults = (*faults, _kill_all_beside)
    if cluster.served is not None:
        faults = (*faults, *SERVER_FAULTS)
    return faults
