"""A machine of the simulated cluster: its agent, what its keeper holds, and its rank at work."""

import math
from typing import TYPE_CHECKING

from dpipe.elastic.agents import Enlistment, Epoch, EpochOutcome, EpochReport
from dpipe.elastic.attendance import Attendance
from dpipe.elastic.lineage import Held
from dpipe.ranks import ParallelRanks
from simulated.truth import INITIAL

if TYPE_CHECKING:
    from simulated.cluster import SimulatedCluster

_ABORT_S = 0.1  # for a rank to end what it is doing
_AGAIN_S = 0.3  # between looks for a parameter server that is away
_SERVER_PATIENCE = 2.0  # in times of the silence after which a machine is lost


class Machine:
    """One agent's process; a machine that is started again is another one."""

    def __init__(self, cluster: "SimulatedCluster", name: str, place: str) -> None:
        self.name = name
        self.place = place  # equal for processes of one machine
        self.cluster = cluster
        self.is_alive = True
        self.paused_until = 0.0
        self.work: Work | None = None
        self.copies: dict[int, dict[int, int]] = {}  # by state, by piece of it, the content
        self.connection: object | None = None
        self.assigned: dict[int, Epoch] = {}
        self.failure: str | None = None
        self.made: dict[tuple[int, int], int] = {}  # by epoch and state, the content
        self._fence = 0
        self._said: Held = {}
        self.attendance = Attendance(
            self,
            Enlistment(agent=name, name=name, host=place, keeper=name, machine=place),
            silence_s=cluster.silence_s,
            wait_s=cluster.wait_s,
            now=cluster.clock.now,
        )

    def run(self, event: object, *args: object) -> None:
        """Do something in this process: later if it is paused, never if it is dead."""
        if not self.is_alive:
            return
        pause_s = self.paused_until - self.cluster.clock.now
        if pause_s > 0:
            self.cluster.clock.after(pause_s, self.run, event, *args)
        else:
            event(*args)  # type: ignore[operator]

    def after(self, delay_s: float, event: object, *args: object) -> None:
        self.cluster.clock.after(delay_s, self.run, event, *args)

    def tick(self) -> None:
        self.attendance.tick(self.cluster.clock.now)
        if not self.attendance.is_out:
            # As rarely as `Attendance` allows, and as a machine's clock does at the least.
            self.after(min(self.cluster.silence_s / 6, 1.0), self.tick)

    def die(self) -> None:
        self.is_alive = False
        self.work = None
        self.cluster.has_died(self)

    # The keeper

    def put(self, epoch: int, state: int, pieces: dict[int, int]) -> bool:
        """Take copies of `state`, if not of an epoch that is over. They replace those of pieces two
        guarded states older.
        """
        if epoch < self._fence:
            return False
        self.copies.setdefault(state, {}).update(pieces)
        for piece in pieces:
            older = sorted(other for other, held in self.copies.items() if piece in held)
            for other in older[:-3]:
                del self.copies[other][piece]
        return True

    def agree(self, epoch: int, state: int) -> None:
        """All ranks of `epoch` have `state` whole."""
        if epoch >= self._fence and state > 0:
            self.retire(state)
            self.cluster.to_head(self, "agreed", self.name, epoch, state)

    # Surroundings of the attendance

    def held(self) -> Held:
        return {state: frozenset(pieces) for state, pieces in self.copies.items() if pieces}

    def retire(self, before: int) -> None:
        for state in [state for state in self.copies if state < before]:
            del self.copies[state]

    def fence(self, epoch: int, newest: float) -> None:
        self._fence = epoch
        for state in [state for state in self.copies if state > newest]:
            del self.copies[state]

    def start(self, epoch: int) -> None:
        self.work = Work(self, self.assigned[epoch])

    def stop(self, *, after_step: bool) -> None:
        assert self.work is not None
        if after_step:
            self.work.wants_stop = True
        else:
            self.work.end(EpochOutcome.ABORTED, "stopped at once")

    def exit(self, failure: str | None) -> None:
        self.failure = failure
        self.die()

    def said_copies(self) -> dict[int, dict[int, int]]:
        """The copies that it holds and has spoken of."""
        said = {}
        for state, pieces in self.copies.items():
            known = self._said.get(state, frozenset())
            said[state] = {piece: pieces[piece] for piece in known & pieces.keys()}
        return said

    def say_enlist(self, enlistment: Enlistment) -> None:
        self._said = enlistment.held
        self.cluster.to_head(self, "enlist", enlistment)

    def say_committed(self, epoch: int, step: int) -> None:
        self.cluster.to_head(self, "committed", self.name, epoch, step)

    def say_ended(self, report: EpochReport, held: Held) -> None:
        self._said = held
        self.cluster.to_head(self, "ended", self.name, report, held)

    def say_holds(self, epoch: int, held: Held) -> None:
        self._said = held
        self.cluster.to_head(self, "holds", self.name, epoch, held)

    def say_leave(self, within_s: float) -> None:
        self.cluster.to_head(self, "leave", self.name, within_s)

    def say_beat(self, sent_at: float) -> None:
        self.cluster.to_head(self, "beat", self.name, sent_at)


class Work:
    """A rank of one epoch: build, meet the others, load, then steps until the end."""

    def __init__(self, machine: Machine, epoch: Epoch) -> None:
        self.machine = machine
        self.epoch = epoch
        self.rank = epoch.seats.index(machine.name)
        self.state = epoch.resume_step
        self.content = INITIAL
        self.wants_stop = False
        self.is_loaded = False
        self.whole = 0  # the newest state that its guards have, too
        self.is_over = False
        cluster = machine.cluster
        num_stages = epoch.world_size // (cluster.group_size * cluster.replicas)
        here = ParallelRanks(self.rank, num_stages, cluster.replicas, cluster.group_size)
        layers = _layers(cluster, here)
        self.pieces = cluster.pieces.kept_by(here, layers)
        self._needed = cluster.pieces.needed_by(here, layers)
        self._waits_until = 0.0  # for the parameter server
        self._later(machine.cluster.random.uniform(0.1, 1.0), self._join)

    def _later(self, delay_s: float, event: object, *args: object) -> None:
        self.machine.after(delay_s, self._if_at_work, event, *args)

    def _if_at_work(self, event: object, *args: object) -> None:
        if not self.is_over:
            event(*args)  # type: ignore[operator]

    def _join(self) -> None:
        if self.epoch.world_size == 1:
            self.load()
            return
        self.machine.cluster.to_server(self, "join")

    def load(self) -> None:
        """All are here: take the state from whoever has it."""
        cluster = self.machine.cluster
        contents = set()
        for piece in self._needed:
            contents.add(cluster.fetch(self.machine, self.epoch, piece))
        if None in contents:
            self.end(EpochOutcome.ABORTED, "a piece could not be fetched")
            return
        if len(contents) > 1:
            contents.add(math.nan)  # the truth says what is wrong with it
        for content in contents:
            cluster.truth.loaded(self.epoch.number, self.state, content)  # type: ignore[arg-type]
            self.content = content  # type: ignore[assignment]
        self.is_loaded = True
        # Its live state is a copy, too, and its guards of this epoch have none yet.
        self._keep(self.state)
        if self.epoch.sources:
            self._send()
        self._open()

    def _open(self) -> None:
        """Bring the parameter server, if there is one, what the epoch begins with."""
        served = self.machine.cluster.served
        number = self.epoch.number
        if served is None:
            self._next()
        elif not served.is_reached(number):
            self._await_server(self._open)
        elif served.open(number):
            self._next()
        else:
            self.end(EpochOutcome.ABORTED, "the server has gone on without this rank")

    def _await_server(self, event: object) -> None:
        cluster = self.machine.cluster
        now = cluster.clock.now
        if self._waits_until == 0.0:
            self._waits_until = now + _SERVER_PATIENCE * cluster.silence_s
        if now > self._waits_until:
            self.end(EpochOutcome.ABORTED, "the parameter server did not come back")
        else:
            self._later(_AGAIN_S, event)

    def _next(self) -> None:
        cluster = self.machine.cluster
        if self.state == cluster.num_steps:
            self._later(cluster.random.uniform(0.0, 0.5), self.end, EpochOutcome.FINISHED, "")
        else:
            self._later(cluster.random.uniform(0.5, 1.5), self._vote)

    def _vote(self) -> None:
        served = self.machine.cluster.served
        if served is not None and not served.is_reached(self.epoch.number):
            self._await_server(self._vote)
            return
        if served is not None and not served.has(self.epoch.number):
            self.end(EpochOutcome.ABORTED, "the parameter server came back without its state")
            return
        self._waits_until = 0.0
        if self.epoch.world_size == 1:
            self.machine.cluster.works_alone(self)
            self.commit(stops=self.wants_stop, agreed=self.whole)
        else:
            self.machine.cluster.to_server(self, "vote", self.state, self.wants_stop, self.whole)

    def commit(self, *, stops: bool, agreed: int) -> None:
        """All have voted for the step, and have `agreed` whole."""
        cluster = self.machine.cluster
        alone = self.epoch.world_size == 1
        self.state += 1
        self.content = cluster.truth.stepped(
            self.epoch.number, self.state, self.content, self.machine.name, alone=alone
        )
        self.machine.made[self.epoch.number, self.state] = self.content
        self.machine.attendance.committed(self.epoch.number, self.state)
        self.machine.agree(self.epoch.number, agreed)
        if self.state % cluster.guard_every == 0:
            self._keep(self.state)
            self._send()
            cluster.wrote_part(self)
        if stops:
            self.end(EpochOutcome.LEFT, "")
        else:
            self._next()

    def _send(self) -> None:
        """Copies of its state to its guards."""
        for keeper in self.epoch.guards[self.rank]:
            self.machine.cluster.guard(self.machine, keeper, self)

    def _keep(self, state: int) -> None:
        pieces = dict.fromkeys(self.pieces, self.content)
        self.machine.put(self.epoch.number, state, pieces)

    def _has_whole(self, outcome: EpochOutcome) -> bool:
        """Whether what is here is all of what this rank keeps."""
        cluster = self.machine.cluster
        has_all = cluster.pieces.num_parts == cluster.group_size
        if has_all or outcome is not EpochOutcome.ABORTED:
            return True
        # The other replicas, or the server, had a part of it on its way.
        return cluster.served is None and cluster.random.random() < 0.5

    def end(self, outcome: EpochOutcome, reason: str) -> None:
        if self.is_over:
            return
        self.is_over = True
        delay_s = _ABORT_S if outcome is EpochOutcome.ABORTED else 0.0
        self.machine.after(delay_s, self._ended, EpochReport(self.epoch.number, outcome, reason))

    def _ended(self, report: EpochReport) -> None:
        if self.is_loaded and self._has_whole(report.outcome):
            self._keep(self.state)
        self.machine.work = None
        self.machine.cluster.left_server(self)
        self.machine.attendance.work_ended(report)


def _layers(cluster: "SimulatedCluster", here: ParallelRanks) -> list[int]:
    """Those of the rank's stage."""
    first = cluster.num_layers * here.pp_rank // here.pp_size
    last = cluster.num_layers * (here.pp_rank + 1) // here.pp_size
    return list(range(first, last))
