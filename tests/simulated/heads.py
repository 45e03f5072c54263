"""Coordinators that take over from each other, by `dpipe.terms.policy`, at a simulated URL.

    seed ──▶ faults ──▶ HeldHead of term 1   HeldHead of term 2 ...   StandbyHead
                            └── beat, journal ──▶ Url ◀── look, claim ──┘
                                                   ▲
                        machines that are not answered look there

Any number of heads may run at once, each paused, cut off from the URL, or slow. A head does one
thing after another: while it is paused, unsure of its term, or waits for the URL, what comes is
queued.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dpipe.elastic.agents import Epoch
from dpipe.elastic.rendezvous import Rendezvous
from dpipe.errors import TermLost
from dpipe.terms.policy import Choice, Tenure, TermLease, TermTimes, TermWatch
from dpipe.terms.records import HolderBeat
from simulated.cluster import PARTS, SERVED, SimulatedCluster
from simulated.faults import befall, check_end, faults_of, sizes_of
from simulated.head import EpochServer, Head, Journal
from simulated.machine import Machine, Work
from simulated.truth import BrokenPromise

_ANSWER_S = 0.2  # of the URL, at most, where it answers
_AGAIN_S = 0.05
_FAULTS_S = 25.0
_HEALED_S = 400.0


@dataclass
class TermAt:
    """A term as it is at the URL."""

    holder: "HeldHead | None" = None
    beat: HolderBeat | None = None
    journal: Journal | None = None


@dataclass
class Url:
    terms: list[TermAt] = field(default_factory=list)

    @property
    def newest(self) -> int:
        return len(self.terms)

    def claim(self, number: int) -> bool:
        if self.newest >= number:
            return False
        self.terms.append(TermAt())
        return True

    def journal(self) -> Journal:
        """The newest that is there."""
        kept = [term.journal for term in self.terms if term.journal is not None]
        return copied(kept[-1]) if kept else Journal()


def copied(journal: Journal) -> Journal:
    copy = Journal()
    copy.epochs = list(journal.epochs)
    copy.newest_step = journal.newest_step
    copy.is_over = journal.is_over
    copy.failure = journal.failure
    return copy


class Process:
    """What may be paused, and cut off from the URL."""

    def __init__(self, cluster: "TwoHeads") -> None:
        self.heads = cluster
        self.is_alive = True
        self.is_cut_off = False
        self.paused_until = 0.0

    def later(self, event: Callable[..., None], *args: Any, seconds: float | None = None) -> None:
        if seconds is None:
            seconds = _ANSWER_S * self.heads.random.random()
        self.heads.clock.after(seconds, self._run, event, args)

    def _run(self, event: Callable[..., None], args: tuple[Any, ...]) -> None:
        pause_s = self.paused_until - self.heads.clock.now
        if self.is_alive and pause_s > 0:
            self.heads.clock.after(pause_s, self._run, event, args)
        elif self.is_alive:
            event(*args)


@dataclass(frozen=True, eq=False)
class Connection:
    head: "HeldHead"


class View:
    """The cluster, as one head sees it: it reaches machines by its own connections alone."""

    def __init__(self, cluster: "TwoHeads", head: "HeldHead") -> None:
        self._cluster = cluster
        self._head = head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cluster, name)

    def to_machine(self, machine: Machine, kind: str, *args: Any, **options: Any) -> None:
        # By the connection on which it has enlisted: another one is still to be heard of.
        if machine.connection is self._head.known.get(machine.name):
            self._cluster.to_machine(machine, kind, *args, **options)

    def hang_up(self, machine: Machine, connection: object) -> None:
        if isinstance(connection, Connection) and connection.head is self._head:
            self._cluster.hang_up(machine, connection)

    def check_begin(self, epoch: Epoch) -> None:
        """Done already, as the epoch was decided: by the time it is told, others may be gone."""


class HeldHead(Process, Head):
    """A coordinator in its term."""

    def __init__(self, cluster: "TwoHeads", number: int, journal: Journal) -> None:
        Process.__init__(self, cluster)
        self.number = number
        self.lease = TermLease(cluster.times.lease_s)
        self._queue: deque[tuple[Callable[..., None], tuple[Any, ...]]] = deque()
        self.known: dict[str, Connection] = {}  # by machine, on which it enlisted
        self._is_blocked = False
        self._is_draining = False
        self._count = 0
        Head.__init__(self, View(cluster, self), journal)  # type: ignore[arg-type]
        cluster.url.terms[number - 1].holder = self
        self._beat()
        self.tick()

    # One thing after another

    def do(self, event: Callable[..., None], *args: Any) -> None:
        """Once this process runs, is sure of its term, and waits for nothing else."""
        self._queue.append((event, args))
        self._drain()

    def _drain(self) -> None:
        try:
            while self._queue and self._may_act():
                event, args = self._queue.popleft()
                event(*args)
        except TermLost:
            self.end()
        if self._queue and self.is_alive and not self._is_draining:
            self._is_draining = True
            self.later(self._drain_again, seconds=_AGAIN_S)

    def _drain_again(self) -> None:
        self._is_draining = False
        self._drain()

    def _may_act(self) -> bool:
        now = self.heads.clock.now
        is_awake = self.is_alive and now >= self.paused_until and not self._is_blocked
        return is_awake and self.lease.tenure(now) is Tenure.HOLDS

    def end(self) -> None:
        """The process is gone: killed, or the term is lost."""
        if self.is_alive:
            self.is_alive = False
            self._queue.clear()
            self.heads.head_ended(self)

    def listen(
        self, machine: Machine, connection: Connection, kind: str, args: tuple[Any, ...]
    ) -> None:
        if machine.connection is not connection:
            return
        if kind == "enlist":
            self.known[machine.name] = connection
        self.hear(machine, kind, args)

    # The term

    def _beat(self) -> None:
        began_at = self.heads.clock.now
        self.later(self._write, began_at)
        self.later(self._beat, seconds=max(_ANSWER_S, self.heads.times.beat_s))

    def _write(self, began_at: float) -> None:
        if self.is_cut_off:
            return
        self._count += 1
        at = self.heads.url.terms[self.number - 1]
        at.beat = HolderBeat(count=self._count, address=str(self.number))
        at.journal = copied(self.journal)
        self.later(self._look, began_at)

    def _look(self, began_at: float) -> None:
        if self.is_cut_off:
            return
        if self.heads.url.newest > self.number:
            self._lose()
        else:
            self.lease.confirmed(began_at)
            self._drain()

    def _lose(self) -> None:
        self.heads.note(f"the coordinator of term {self.number} has lost it")
        self.lease.superseded()
        self.end()

    # What `Rendezvous` acts through, where the term has a part in it

    def tick(self) -> None:
        self.do(self.rendezvous.tick, self.heads.clock.now)
        self.later(self.tick, seconds=self.heads.silence_s / 6)

    def _is_gone(self, machine: Machine) -> None:
        self.do(Head._is_gone, self, machine)

    def begin(self, epoch: Epoch) -> None:
        self.heads.beginning = self
        self.heads.check_begin(epoch)
        self.journal.epochs.append(epoch)
        self.journal.newest_step = epoch.resume_step
        self._is_blocked = True
        self.later(self._publish, epoch)

    def _publish(self, epoch: Epoch) -> None:
        if self.is_cut_off:
            self.later(self._publish, epoch)
            return
        self.heads.url.terms[self.number - 1].journal = copied(self.journal)
        self.later(self._tell, epoch)

    def _tell(self, epoch: Epoch) -> None:
        if self.is_cut_off:
            self.later(self._tell, epoch)
        elif self.is_superseded():
            self._lose()
        else:
            self._is_blocked = False
            # `Head` keeps it as well.
            self.journal.epochs.pop()
            self.heads.has_told(self, epoch)
            Head.begin(self, epoch)
            assert self.server is not None
            self.heads.head_of[self.server] = self
            self._drain()

    def is_superseded(self) -> bool:
        return self.heads.url.newest > self.number

    def finish(self, reason: str | None) -> None:
        if self.is_superseded():
            raise TermLost("another has taken over")
        Head.finish(self, reason)
        self.heads.url.terms[self.number - 1].journal = copied(self.journal)


class StandbyHead(Process):
    def __init__(self, cluster: "TwoHeads") -> None:
        super().__init__(cluster)
        self._watch = TermWatch(cluster.times.patience_s)
        self._ask()

    def _ask(self) -> None:
        self.later(self._look, self.heads.clock.now)

    def _look(self, began_at: float) -> None:
        number = self.heads.url.newest
        choice = Choice.WAIT
        if self.is_cut_off or number == 0:
            self._watch.saw_nothing()
        else:
            choice = self._watch.seen(number, self.heads.url.terms[-1].beat, began_at)
        if choice is Choice.CLAIM:
            self.later(self._claim, number + 1)
        else:
            self.later(self._ask, seconds=self.heads.times.beat_s)

    def _claim(self, number: int) -> None:
        if not self.is_cut_off and self.heads.url.claim(number):
            self.heads.note(f"a standby takes over, as term {number}")
            self.later(self._fetch, number)
        else:
            self._ask()

    def _fetch(self, number: int) -> None:
        if self.is_cut_off:
            self.later(self._fetch, number)
            return
        self.is_alive = False
        self.heads.start_term(number)


class TwoHeads(SimulatedCluster):
    """A coordinator, and standbys that take over."""

    def __init__(self, seed: int, *, head: type[HeldHead] = HeldHead, **options: Any) -> None:
        self.url = Url()
        self.running: list[HeldHead] = []  # once started, ended or not
        self.standbys: list[StandbyHead] = []
        self.head_of: dict[EpochServer, HeldHead] = {}
        self.beginning: HeldHead | None = None
        self._head_type = head
        self._terms: dict[str, int] = {}  # by machine, in which it was told its coordinator
        super().__init__(seed, **options)
        self.times = TermTimes.of(self.silence_s)
        self.url.claim(1)
        self.start_term(1)
        self.start_standby()

    # In the place of the one head and its journal

    @property
    def head(self) -> HeldHead | None:  # type: ignore[override]
        return self.beginning

    @head.setter
    def head(self, head: None) -> None:
        pass

    @property
    def journal(self) -> Journal:  # type: ignore[override]
        newest = max(self.running, key=lambda head: head.number, default=None)
        return Journal() if newest is None else newest.journal

    @journal.setter
    def journal(self, journal: Journal) -> None:
        pass

    def start_head(self) -> None:
        pass

    def start_term(self, number: int) -> None:
        journal = self.url.journal()
        if not journal.is_over:
            self.running.append(self._head_type(self, number, journal))

    def start_standby(self) -> None:
        self.standbys.append(StandbyHead(self))

    def alive(self) -> list[HeldHead]:
        return [head for head in self.running if head.is_alive]

    def waiting(self) -> list[StandbyHead]:
        return [standby for standby in self.standbys if standby.is_alive]

    def head_ended(self, head: HeldHead) -> None:
        if head.server is not None:
            self.close(head.server)
        for machine in list(head.connections.values()):
            connection = machine.connection
            if isinstance(connection, Connection) and connection.head is head:
                machine.after(0.5 * self.random.random(), self.hang_up, machine, connection)

    def has_told(self, head: HeldHead, epoch: Epoch) -> None:
        self.note(f"term {head.number} begins epoch {epoch.number} at {epoch.resume_step}")

    # Machines, each with a connection to one of the heads

    def start_machine(self, place: str | None = None) -> Machine:
        machine = super().start_machine(place)
        self._search(machine)
        return machine

    def _search(self, machine: Machine) -> None:
        if machine.attendance.unanswered_s(self.clock.now) > self.silence_s / 4:
            self._find(machine)
        machine.after(0.25, self._search, machine)

    def _find(self, machine: Machine) -> None:
        number = self.url.newest
        if number <= self._terms.get(machine.name, 0) or self.url.terms[-1].beat is None:
            return
        self._terms[machine.name] = number
        connection = machine.connection
        if isinstance(connection, Connection):
            self.clock.after(0.01, connection.head.do, connection.head.lost_connection, machine)
            self.hang_up(machine, connection)

    def dial(self, machine: Machine) -> None:
        if machine.connection is not None or machine.attendance.is_out:
            return
        number = self._terms.setdefault(machine.name, self.url.newest)
        head = self.url.terms[number - 1].holder
        is_there = head is not None and head.is_alive and self.clock.now >= head.paused_until
        if head is None or not is_there or self.is_cut(machine):
            machine.after(0.5, self.dial, machine)
            return
        if head.connections.get(machine.name) is machine:
            head.do(head.lost_connection, machine)
        machine.connection = Connection(head)
        machine.attendance.connected(self.clock.now)

    def has_died(self, machine: Machine) -> None:
        super().has_died(machine)
        for head in self.alive():
            self.clock.after(0.01, head.do, head.lost_connection, machine)

    def break_connection(self, machine: Machine) -> None:
        connection = machine.connection
        if isinstance(connection, Connection):
            machine.after(0.0, self.hang_up, machine, connection)
            delay_s = 0.1 * self.random.random()
            self.clock.after(delay_s, connection.head.do, self._drop, connection.head, machine)

    def to_head(self, machine: Machine, kind: str, *args: Any) -> None:
        connection = machine.connection
        if machine.name not in self.cuts and isinstance(connection, Connection):
            told = (machine, connection, kind, args)
            self.clock.after(self.whole_s, connection.head.do, connection.head.listen, *told)

    def _serve(self, work: Work, kind: str, args: tuple[Any, ...], sent_at: float) -> None:
        server = self._server_of(work)
        serve = super()._serve
        if server is None or not server.is_open:
            serve(work, kind, args, sent_at)
        else:
            self.head_of[server].do(serve, work, kind, args, sent_at)


# What befalls heads


def _kill_head(cluster: TwoHeads) -> None:
    for head in cluster.alive():
        cluster.note(f"the coordinator of term {head.number} is killed")
        head.end()
    cluster.clock.after(cluster.random.uniform(0.0, 5.0), cluster.start_standby)


def _pause_head(cluster: TwoHeads) -> None:
    for head in cluster.alive():
        head.paused_until = cluster.clock.now + cluster.random.choice((0.5, 2.0, 4.5, 9.0, 15.0))
        cluster.note(f"term {head.number} is paused until {head.paused_until:.1f}")


def _cut_head_off(cluster: TwoHeads) -> None:
    """From the URL; machines reach it still."""
    for head in cluster.alive():
        _cut_off(cluster, head)


def _disturb_standby(cluster: TwoHeads) -> None:
    for standby in cluster.waiting():
        if cluster.random.random() < 0.5:
            standby.paused_until = cluster.clock.now + cluster.random.choice((0.5, 2.0, 9.0))
        else:
            _cut_off(cluster, standby)


def _cut_off(cluster: TwoHeads, process: Process) -> None:
    process.is_cut_off = True
    seconds = cluster.random.choice((0.5, 2.0, 4.5, 9.0, 15.0))
    cluster.clock.after(seconds, setattr, process, "is_cut_off", False)


def _another_standby(cluster: TwoHeads) -> None:
    cluster.start_standby()


HEAD_FAULTS = (_kill_head, _pause_head, _cut_head_off, _disturb_standby, _another_standby)
_SINGLE = "_restart_coordinator"  # which the standby does here


def simulate_heads(seed: int, head: type[HeldHead] = HeldHead) -> TwoHeads:
    """A run under the faults of `seed`. Raises `BrokenPromise` with what happened."""
    sizes = sizes_of(seed)
    # What a server says reaches whoever coordinates as an agent's message does.
    if sizes["keeps"] == SERVED:
        sizes["keeps"] = PARTS
    cluster = TwoHeads(seed, head=head, rendezvous=Rendezvous, num_steps=12, **sizes)
    try:
        _run(cluster)
    except BrokenPromise as broken:
        story = "\n".join(cluster.notes[-60:])
        raise BrokenPromise(f"seed {seed}: {broken}\n{story}") from None
    return cluster


def _run(cluster: TwoHeads) -> None:
    chance = cluster.random
    for _ in range(cluster.world_size + chance.randrange(0, 4)):
        cluster.clock.after(chance.uniform(0.0, 2.0), cluster.start_machine)
    others = [fault for fault in faults_of(cluster) if fault.__name__ != _SINGLE]
    for _ in range(chance.randrange(1, 4)):
        cluster.clock.after(chance.uniform(0.0, 15.0), befall, cluster, chance.choice(others))
    for _ in range(chance.randrange(1, 4)):
        fault = chance.choice(HEAD_FAULTS)
        cluster.clock.after(chance.uniform(0.0, 15.0), befall, cluster, fault)
    cluster.clock.after(_FAULTS_S, _heal, cluster)
    cluster.clock.run(_FAULTS_S + _HEALED_S, lambda: cluster.journal.is_over)
    check_end(cluster)


def _heal(cluster: TwoHeads) -> None:
    cluster.cuts.clear()
    cluster.deaf.clear()
    for process in (*cluster.alive(), *cluster.waiting()):
        process.is_cut_off = False
        process.paused_until = min(process.paused_until, cluster.clock.now)
    cluster.start_standby()
    for _ in range(cluster.world_size + 1):
        cluster.start_machine("healed" if cluster.group_size > 1 else None)
