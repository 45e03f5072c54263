"""The simulated cluster: the network between machines and coordinator, and what befalls them."""

import random
from collections.abc import Callable
from typing import Any

from dpipe.elastic.agents import Epoch, EpochOutcome
from dpipe.elastic.rendezvous import Rendezvous
from dpipe.keeper.pieces import Pieces
from simulated.clock import Clock
from simulated.head import EpochServer, Head, Journal
from simulated.machine import Machine, Work
from simulated.served import SimulatedServer
from simulated.truth import INITIAL, BrokenPromise, Truth

_NOTICE_S = 0.5  # until the other end of a connection sees that a process has ended
_REDIAL_S = 0.5
# What replicas keep of a layer
WHOLE = "whole"  # the same as the others
PARTS = "parts"  # each its own part: a sharded optimizer, local SGD
SERVED = "served"  # each its own part, and the optimizer is on a server by itself


class SimulatedCluster:
    def __init__(
        self,
        seed: int,
        *,
        world_size: int = 4,
        group_size: int = 1,
        replicas: int = 1,
        keeps: str = WHOLE,
        num_steps: int = 8,
        fewest: int = 1,
        silence_s: float = 4.0,
        whole_s: float = 0.02,
        rendezvous: Callable[..., Rendezvous] = Rendezvous,
    ) -> None:
        self.random = random.Random(seed)
        self.clock = Clock()
        self.world_size = world_size
        self.group_size = group_size  # ranks that hold their layers together, on one machine
        self.replicas = replicas
        self.keeps = keeps
        # By stage two layers, so that another cut can share them out otherwise.
        self.num_layers = 2 * world_size // (group_size * replicas)
        self.pieces = Pieces(group_size * (1 if keeps == WHOLE else replicas))
        self.num_pieces = self.num_layers * self.pieces.num_parts
        self.num_steps = num_steps
        self.fewest = fewest
        self.guard_every = 3
        self.silence_s = silence_s
        self.wait_s = 3.75 * silence_s
        self.patience_s = 1.5 * silence_s
        self.whole_s = whole_s  # most of the delay of a message
        self.rendezvous_of = rendezvous
        self.truth = Truth(self.num_pieces)
        self.machines: dict[str, Machine] = {}
        self.servers: list[EpochServer] = []
        self.saved: dict[int, dict[int, int]] = {}  # checkpoints whose every part is written
        self.saves = self.random.random() < 0.5
        self.journal = Journal()
        self.head: Head | None = None
        self.notes: list[str] = []
        self.cuts: set[str] = set()  # machines from which nothing reaches the coordinator
        self.deaf: set[str] = set()  # machines that nothing reaches from the coordinator
        self._parts: dict[tuple[int, int], dict[int, int]] = {}
        self.served = SimulatedServer(self) if keeps == SERVED else None
        self.start_head()

    def note(self, text: str) -> None:
        self.notes.append(f"{self.clock.now:7.2f} {text}")

    # Processes

    def start_head(self) -> None:
        if self.head is None and not self.journal.is_over:
            self.note("the coordinator starts")
            self.head = Head(self, self.journal)
            self.head.tick()

    def kill_head(self) -> None:
        if self.head is None or self.head.is_over:
            return
        self.note("the coordinator is killed")
        head = self.head
        head.is_alive = False
        self.head = None
        if head.server is not None:
            self.close(head.server)
        for machine in list(head.connections.values()):
            machine.after(
                _NOTICE_S * self.random.random(), self.hang_up, machine, machine.connection
            )

    def start_machine(self, place: str | None = None) -> Machine:
        """A process, on the machine that `place` names."""
        name = f"m{len(self.machines)}"
        machine = Machine(self, name, place or self._place_for(name))
        self.machines[machine.name] = machine
        machine.run(self.dial, machine)
        machine.tick()
        return machine

    def _place_for(self, name: str) -> str:
        """Where groups must be together, often beside another."""
        if self.group_size > 1 and self.machines and self.random.random() < 0.7:
            beside = self.random.choice(list(self.machines.values()))
            return beside.place
        return name

    def has_died(self, machine: Machine) -> None:
        self.note(f"{machine.name} ends ({machine.failure or 'killed or released'})")
        for server in self.servers:
            if server.is_open and any(w.machine is machine for w in server.ranks.values()):
                self.clock.after(_NOTICE_S, self.close, server)
        if self.head is not None:
            self.clock.after(0.01, self.head.lost_connection, machine)

    # The network. Messages of one connection stay in order; those of a broken one are lost.

    def is_cut(self, machine: Machine) -> bool:
        return machine.name in self.cuts or machine.name in self.deaf

    def dial(self, machine: Machine) -> None:
        if machine.connection is not None or machine.attendance.is_out:
            return
        if self.head is None or self.is_cut(machine):
            machine.after(_REDIAL_S, self.dial, machine)
            return
        if self.head.connections.get(machine.name) is machine:
            self.head.lost_connection(machine)
        machine.connection = object()
        machine.attendance.connected(self.clock.now)

    def hang_up(self, machine: Machine, connection: object) -> None:
        """The machine's end of a connection notices that it broke."""
        if machine.connection is None or machine.connection is not connection:
            return
        machine.connection = None
        machine.attendance.disconnected(self.clock.now)
        machine.after(_REDIAL_S, self.dial, machine)

    def break_connection(self, machine: Machine) -> None:
        if machine.connection is not None:
            connection = machine.connection
            machine.after(0.0, self.hang_up, machine, connection)
            if self.head is not None:
                self.clock.after(0.1 * self.random.random(), self._drop, self.head, machine)

    def _drop(self, head: Head, machine: Machine) -> None:
        # Unless it has another one by now.
        if head.is_alive and machine.connection is None:
            head.lost_connection(machine)

    def to_head(self, machine: Machine, kind: str, *args: Any) -> None:
        if machine.name in self.cuts or machine.connection is None or self.head is None:
            return
        self.clock.after(
            self.whole_s, self._hear, self.head, machine, machine.connection, kind, args
        )

    def _hear(
        self, head: Head, machine: Machine, connection: object, kind: str, args: tuple[Any, ...]
    ) -> None:
        if head.is_alive and machine.connection is connection:
            head.hear(machine, kind, args)

    def to_machine(self, machine: Machine, kind: str, *args: Any, **options: Any) -> None:
        if machine.name in self.deaf:
            return
        self.clock.after(
            self.whole_s, machine.run, self._told, machine, machine.connection, kind, args, options
        )

    def _told(
        self,
        machine: Machine,
        connection: object,
        kind: str,
        args: tuple[Any, ...],
        options: dict[str, Any],
    ) -> None:
        if machine.connection is connection and not machine.attendance.is_out:
            getattr(machine.attendance, kind)(*args, **options)

    # The coordinator of an epoch

    def to_server(self, work: Work, kind: str, *args: Any) -> None:
        delay_s = self.whole_s * self.random.random()
        self.clock.after(delay_s, self._serve, work, kind, args, self.clock.now)

    def _serve(self, work: Work, kind: str, args: tuple[Any, ...], sent_at: float) -> None:
        server = self._server_of(work)
        if work.machine.name in self.cuts and work.machine.is_alive:
            # Sent again, until one of both takes the other for lost.
            if self.clock.now - sent_at > self.silence_s and server is not None:
                self.close(server)
            elif not work.is_over:
                self.clock.after(_REDIAL_S, self._serve, work, kind, args, sent_at)
            return
        if server is None or not server.is_open:
            self._tell(work, work.end, EpochOutcome.ABORTED, "the epoch is over")
        elif kind == "join":
            server.ranks[work.rank] = work
            if len(server.ranks) == server.epoch.world_size:
                for other in server.ranks.values():
                    self._tell(other, other.load)
        else:
            self._count(server, work, *args)

    def _count(self, server: EpochServer, work: Work, state: int, stops: bool, whole: int) -> None:
        votes = server.votes.setdefault(state, {})
        votes[work.rank] = (stops, whole)
        if len(votes) == server.epoch.world_size:
            self.truth.voted(server.epoch.number)
            any_stops = any(stops for stops, _ in votes.values())
            agreed = min(whole for _, whole in votes.values())
            for other in server.ranks.values():
                self._tell(other, self._commit, other, any_stops, agreed)

    @staticmethod
    def _commit(work: Work, stops: bool, agreed: int) -> None:
        if not work.is_over:
            work.commit(stops=stops, agreed=agreed)

    def _tell(self, work: Work, event: Callable[..., None], *args: Any) -> None:
        delay_s = self.whole_s * self.random.random()
        self.clock.after(delay_s, self._reach, work, event, args, self.clock.now)

    def _reach(
        self, work: Work, event: Callable[..., None], args: tuple[Any, ...], sent_at: float
    ) -> None:
        server = self._server_of(work)
        if work.machine.name not in self.deaf:
            work.machine.run(event, *args)
        elif self.clock.now - sent_at > self.silence_s and server is not None:
            self.close(server)
        else:
            self.clock.after(_REDIAL_S, self._reach, work, event, args, sent_at)

    def _server_of(self, work: Work) -> EpochServer | None:
        for server in self.servers:
            if server.epoch is work.epoch:
                return server
        return None

    def close(self, server: EpochServer) -> None:
        """All ranks hear that the epoch is over; those that are cut off, when their wait ends."""
        if not server.is_open:
            return
        server.is_open = False
        for work in server.ranks.values():
            delay_s = self.silence_s if work.machine.name in self.deaf else self.whole_s
            self.clock.after(
                delay_s, work.machine.run, work.end, EpochOutcome.ABORTED, "the epoch is over"
            )

    def left_server(self, work: Work) -> None:
        """A rank that ended without the others ends the epoch for them."""
        server = self._server_of(work)
        finished = work.state == self.num_steps
        if server is not None and work.rank in server.ranks and not finished:
            self.clock.after(self.whole_s, self.close, server)

    def works_alone(self, work: Work) -> None:
        """A rank without others makes a step: nobody else may have its seat."""
        # One that was paused does what it was about to, before it looks at the time.
        was_paused = self.clock.now - work.machine.paused_until < self.silence_s
        if self.truth.epochs[-1] != work.epoch.number and not was_paused:
            raise BrokenPromise(f"epoch {work.epoch.number} goes on beside a newer one")

    # Copies

    def fetch(self, machine: Machine, epoch: Epoch, piece: int) -> int | None:
        if epoch.resume_step == 0 and not epoch.sources:
            return INITIAL
        if epoch.from_checkpoint:
            return self.saved[epoch.resume_step][piece]
        own = machine.copies.get(epoch.resume_step, {})
        if piece in own:
            return own[piece]
        for keeper in epoch.sources[piece]:
            other = self.machines[keeper]
            if other.is_alive:
                return other.copies.get(epoch.resume_step, {}).get(piece)
        return None

    def guard(self, machine: Machine, keeper: str, work: Work) -> None:
        other = self.machines[keeper]
        pieces = dict.fromkeys(work.pieces, work.content)
        delay_s = self.random.uniform(0.05, 1.0)
        put = (self._put, other, work, work.state, pieces)
        self.clock.after(delay_s, self._deliver, machine, other, put)

    @staticmethod
    def _put(keeper: Machine, work: Work, state: int, pieces: dict[int, int]) -> None:
        if keeper.put(work.epoch.number, state, pieces):
            work.whole = state

    @staticmethod
    def _deliver(machine: Machine, other: Machine, put: tuple[Any, ...]) -> None:
        if machine.is_alive:
            other.run(*put)

    def wrote_part(self, work: Work) -> None:
        """A rank's part of a checkpoint, which counts once all have written theirs."""
        if not self.saves:
            return
        parts = self._parts.setdefault((work.epoch.number, work.state), {})
        parts.update(dict.fromkeys(work.pieces, work.content))
        if len(parts) == self.num_pieces and self.truth.epochs[-1] == work.epoch.number:
            self.saved[work.state] = parts

    # What must hold

    def check_begin(self, epoch: Epoch) -> None:
        """The epoch resumes at the newest state that whoever is here holds whole, and each of its
        groups is on one machine.
        """
        assert self.head is not None
        self._check_places(epoch)
        agents = self.head.rendezvous.agents
        here = []
        for name, machine in self.machines.items():
            is_known = name in agents and agents[name].connected
            # Also what is gone, where that cannot be known yet: the epoch will not begin, then.
            if is_known and machine.work is None:
                here.append(machine.said_copies())
        best = max(self.truth.best(here) or 0, max(self.saved, default=0))
        if epoch.resume_step != best:
            raise BrokenPromise(
                f"epoch {epoch.number} resumes at {epoch.resume_step}; {best} is whole"
            )

    def _check_places(self, epoch: Epoch) -> None:
        for first in range(0, epoch.world_size, self.group_size):
            group = epoch.seats[first : first + self.group_size]
            places = {self.machines[name].place for name in group}
            if len(places) > 1 or len(group) < self.group_size:
                raise BrokenPromise(f"{group} hold layers together, and are on {places}")
