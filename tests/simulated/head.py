"""The simulated coordinator's process: `Rendezvous`, its journal, and an epoch's votes."""

from typing import TYPE_CHECKING

from dpipe.elastic.agents import Enlistment, Epoch
from dpipe.elastic.rendezvous import Past, Phase, Rendezvous, Settings

if TYPE_CHECKING:
    from simulated.cluster import SimulatedCluster
    from simulated.machine import Machine, Work

_NOTICE_S = 0.5  # for the loss of a process to be noticed by those it was connected with


class Journal:
    """What is on disk: it outlives the process."""

    def __init__(self) -> None:
        self.epochs: list[Epoch] = []
        self.newest_step = 0
        self.is_over = False
        self.failure: str | None = None
        self.server_at = 0  # the parameter server's address

    def past(self) -> Past:
        resumed_at = tuple((epoch.number, epoch.resume_step) for epoch in self.epochs)
        seats = self.epochs[-1].seats if self.epochs else ()
        return Past(resumed_at, seats, self.newest_step)


class EpochServer:
    """The votes of one epoch."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch = epoch
        self.is_open = True
        self.ranks: dict[int, Work] = {}
        # By state, by rank: whether it wants to stop, and the newest state that it has whole.
        self.votes: dict[int, dict[int, tuple[bool, int]]] = {}


class Head:
    def __init__(self, cluster: "SimulatedCluster", journal: Journal) -> None:
        self.cluster = cluster
        self.journal = journal
        self.is_alive = True
        self.server: EpochServer | None = None
        self.connections: dict[str, Machine] = {}
        self._content = 0  # of the state that is being spoken of
        settings = Settings(
            num_pieces=cluster.num_pieces,
            world_size=cluster.world_size,
            num_steps=cluster.num_steps,
            silence_s=cluster.silence_s,
            gather_s=cluster.patience_s,
            patience_s=cluster.patience_s,
            group_size=cluster.group_size,
        )
        self.rendezvous: Rendezvous = cluster.rendezvous_of(
            settings, self, journal.past(), cluster.clock.now
        )

    def tick(self) -> None:
        if self.is_alive:
            self.rendezvous.tick(self.cluster.clock.now)
            self.cluster.clock.after(self.cluster.silence_s / 6, self.tick)

    def hear(self, machine: "Machine", kind: str, args: tuple[object, ...]) -> None:
        """A message of an agent."""
        now = self.cluster.clock.now
        if kind == "enlist":
            self.connections[machine.name] = machine
            self._enlist(machine, args[0], now)  # type: ignore[arg-type]
        elif kind == "beat":
            self.rendezvous.beat(machine.name, now)
            self.cluster.to_machine(machine, "answered", args[1])
        else:
            if kind == "committed":
                self._content = machine.made[args[1:]]  # type: ignore[index]
            getattr(self.rendezvous, kind)(*args, now)

    def _enlist(self, machine: "Machine", enlistment: Enlistment, now: float) -> None:
        rendezvous = self.rendezvous
        valid = rendezvous.newest_valid(enlistment.epoch)
        # First: what `enlist` has it do is told behind it.
        told = (rendezvous.epoch, valid, rendezvous.newest_step)
        self.cluster.to_machine(machine, "enlisted", *told)
        refusal = rendezvous.enlist(enlistment, now)
        if refusal:
            self.cluster.to_machine(machine, "refused", refusal)

    # What `Rendezvous` acts through

    def begin(self, epoch: Epoch) -> None:
        self.cluster.check_begin(epoch)
        self.journal.epochs.append(epoch)
        self.journal.newest_step = epoch.resume_step
        if self.cluster.served is not None:
            self.cluster.served.told[epoch.number] = self.journal.server_at
        self.cluster.truth.begun(epoch.number, epoch.resume_step, self.connections)
        self.server = EpochServer(epoch)
        self.cluster.servers.append(self.server)
        for name, machine in self.connections.items():
            if name in epoch.seats:
                machine.assigned[epoch.number] = epoch
                self.cluster.to_machine(machine, "assigned", epoch.number, epoch.resume_step)
            else:
                self.cluster.to_machine(machine, "standby", epoch.number, epoch.resume_step)

    def close_epoch(self, reason: str) -> None:
        if self.server is not None:
            self.cluster.close(self.server)

    def stop(self, agent: str, epoch: int, *, after_step: bool) -> None:
        if agent in self.connections:
            self.cluster.to_machine(self.connections[agent], "stop", epoch, after_step=after_step)

    def retire(self, agent: str, epoch: int, before: int) -> None:
        if agent in self.connections:
            self.cluster.to_machine(self.connections[agent], "retire", epoch, before)

    def ask(self, agent: str) -> None:
        if agent in self.connections:
            self.cluster.to_machine(self.connections[agent], "asked")

    def release(self, agent: str) -> None:
        if agent in self.connections:
            self.cluster.to_machine(self.connections[agent], "released")

    def hang_up(self, agent: str) -> None:
        machine = self.connections.pop(agent, None)
        if machine is not None:
            machine.after(0.0, self.cluster.hang_up, machine, machine.connection)

    def finish(self, reason: str | None) -> None:
        self.journal.is_over = True
        self.journal.failure = reason

    def keep_step(self, step: int) -> None:
        self.cluster.truth.kept(step, self._content)
        self.journal.newest_step = max(self.journal.newest_step, step)

    def note(self, text: str) -> None:
        self.cluster.note(text)

    def checkpoint(self) -> int | None:
        return max(self.cluster.saved, default=None)

    def fewer(self, num_agents: int) -> int | None:
        cluster = self.cluster
        unit = cluster.group_size * cluster.replicas
        ranks = num_agents // unit * unit
        return ranks if ranks >= max(unit, cluster.fewest) else None

    def move_server(self, address: int) -> None:
        """What a parameter server says by itself."""
        self.journal.server_at = address
        self.rendezvous.renew("the parameter server has moved", self.cluster.clock.now)

    def pays(self, ranks: int, more: int, steps_left: int) -> bool:
        return steps_left > 2

    # Connections

    def lost_connection(self, machine: "Machine") -> None:
        if self.connections.get(machine.name) is machine:
            del self.connections[machine.name]
            self.rendezvous.disconnected(machine.name)
            # Its host says so, where there still is one.
            if not machine.is_alive:
                self.cluster.clock.after(_NOTICE_S, self._is_gone, machine)

    def _is_gone(self, machine: "Machine") -> None:
        if self.is_alive and not self.cluster.is_cut(machine):
            self.rendezvous.gone(machine.name, "its process ended", self.cluster.clock.now)

    @property
    def is_over(self) -> bool:
        return self.rendezvous.phase is Phase.OVER
