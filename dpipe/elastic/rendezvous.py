"""What the coordinator of an elastic run decides: who is there, when an epoch ends, where the next
one begins.

                 enough agents, or patience is over and fewer will do
      ┌─────────┐ ─────────────────────────────────────────────────▶ ┌─────────┐ ──finished──▶ OVER
      │ WAITING │                                                    │ RUNNING │
      └─────────┘                                                    └─────────┘
           ▲                                                      a rank is lost, fails or leaves;
           │                                                      a guard is lost; a server moves;
           │                                                      a newcomer that pays
           │ all have said what they hold, or are lost           ┌────────┐ │
           └──────────────────────────────────────────────────── │ ENDING │ ◀┘
                                                                 └────────┘
A coordinator that was killed and started again begins at ENDING with the last epoch of its journal:
its agents come back and say what they hold, or are lost.

What keeps the run one: a step counts where the epoch's own coordinator has all votes for it, so
that it counts for all ranks or none, and that coordinator is closed before the next epoch is
opened. The number of an epoch is in the journal before anybody hears of it. Copies that an epoch
has dropped are never used again (`lineage.py`).

An agent is lost when nothing came from it for `silence_s`, or when its host says that its process
is gone. It may come back, as a spare.

Policy only: `now` is in seconds of a clock that does not jump, and one method is called at a time.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

from dpipe.elastic.agents import Agent, Agents, Enlistment, Epoch, EpochOutcome, EpochReport
from dpipe.elastic.lineage import Lineage, newest_whole
from dpipe.elastic.seating import guardians, holders, num_seats, seated

_MOST_FAILURES = 3  # of ranks, after which the run has come no further
_MOST_PAUSE_S = 30.0  # before another epoch, where those before made no step
_RENEW_SHARE = 0.25  # of `silence_s`, for the step under way
_STOP_SHARE = 0.5  # of the time that a leaving agent has left, for the step under way


class Phase(StrEnum):
    WAITING = "waiting"
    RUNNING = "running"
    ENDING = "ending"
    OVER = "over"


@dataclass(frozen=True)
class Settings:
    num_pieces: int  # of the state, each of which a rank holds whole
    world_size: int  # that the job asks for
    num_steps: int
    silence_s: float = 40.0  # after which an agent is lost
    gather_s: float = 120.0  # for machines to come, before the run begins with fewer
    patience_s: float = 30.0  # for another one, before it goes on with fewer
    stop_s: float = 300.0  # for a step to end that a newcomer waits for
    copies: int = 1  # of each rank's state, kept by others
    group_size: int = 1  # ranks, from the first one on, that must be on one machine


@dataclass(frozen=True)
class Past:
    """What the journal of a run holds."""

    resumed_at: tuple[tuple[int, int], ...] = ()  # of each epoch its number and resume_step
    seats: tuple[str, ...] = ()  # of the last epoch
    newest_step: int = 0  # the newest state that was reached


class Rendezvous:
    def __init__(
        self, settings: Settings, cluster: Agents, past: Past | None = None, now: float = 0.0
    ) -> None:
        past = past or Past()
        self.phase = Phase.ENDING if past.seats else Phase.WAITING
        self.agents: dict[str, Agent] = {}
        self.seats: tuple[str, ...] = past.seats  # of the last epoch, by rank
        self.newest_step = past.newest_step
        self.since = now  # when the phase began
        self._settings = settings
        self._cluster = cluster
        self._lineage = Lineage(past.resumed_at)
        # Of the last epoch: who has not said yet how it ended, and since when that is awaited.
        self._awaited = dict.fromkeys(past.seats, now)
        # Of the others: who has not said yet which copies the epoch has left with it.
        self._asked: set[str] = set()
        self._has_stepped = False  # whether the last epoch has made a step
        self._agreed = 0  # the newest step that all its ranks have whole
        self._failures = 0  # at `_failed_at`
        self._failed_at = 0
        self._idle_epochs = 0  # in a row, that made no step
        self._stop_by: float | None = None  # when an epoch that was asked to stop is closed
        self._rests = False  # no other epoch begins
        self._scattered = 0  # agents that were too few on each machine, as was said
        self._guards: frozenset[str] = frozenset()  # keepers of copies of the last epoch

    @property
    def epoch(self) -> int:
        """The newest; 0 before the first."""
        return self._lineage.epoch

    # What agents say

    def enlist(self, enlistment: Enlistment, now: float) -> str | None:
        """An agent has connected. Returns why it is refused, or None."""
        if enlistment.epoch > self.epoch:
            return (
                f"{enlistment.name} was in epoch {enlistment.epoch} of this run, and the journal "
                f"ends with epoch {self.epoch}: it is older than the run; start the coordinator "
                "with the newest journal"
            )
        agent = self.agents.get(enlistment.agent)
        if agent is None:
            agent = Agent(enlistment, joined_at=now, heard_at=now)
            self.agents[agent.id] = agent
            self._cluster.note(f"{agent} joined")
        agent.enlistment = enlistment
        agent.heard_at = now
        agent.connected = True
        agent.epoch = self.epoch  # the answer tells it
        agent.working = enlistment.epoch if enlistment.working else None
        agent.held = self._lineage.valid(enlistment.held, enlistment.epoch)
        self._asked.discard(agent.id)
        self._place(agent, enlistment, now)
        self._advance(now)
        return None

    def newest_valid(self, epoch: int) -> float:
        """The newest copy that may be kept by an agent that last heard of `epoch`."""
        return self._lineage.newest_valid(epoch)

    def _place(self, agent: Agent, enlistment: Enlistment, now: float) -> None:
        """Fit what an agent is doing into what it should be doing."""
        is_running = self.phase is Phase.RUNNING and agent.id in self._awaited
        if self.phase is Phase.OVER:
            self._cluster.release(agent.id)
        elif agent.working is not None:
            if not (is_running and agent.working == self.epoch):
                self._cluster.stop(agent.id, agent.working, after_step=False)
        elif agent.id in self._awaited:
            # Its report was lost with its connection, or it never heard of the epoch.
            last = enlistment.last
            if last is None or last.epoch != self.epoch:
                last = EpochReport(self.epoch, EpochOutcome.ABORTED, f"{agent} did not hear of it")
            self._report(agent, last, now)

    def beat(self, agent_id: str, now: float) -> None:
        agent = self.agents.get(agent_id)
        if agent is not None:
            agent.heard_at = now

    def committed(self, agent_id: str, epoch: int, step: int, now: float) -> None:
        """A rank has reached the state of `step`."""
        self.beat(agent_id, now)
        # Also late, of an epoch before: its step counts where the epochs since have kept it.
        if step > self._lineage.newest_valid(epoch):
            return
        self._cluster.keep_step(step)
        self.newest_step = max(self.newest_step, step)
        if epoch == self.epoch and not self._has_stepped:
            self._has_stepped = True
            self._idle_epochs = 0
            self._let_leavers_go()
        self._advance(now)

    def agreed(self, agent_id: str, epoch: int, step: int, now: float) -> None:
        """All ranks of `epoch` have the state of `step` whole. They have dropped what is older, and
        spares hear of it from nobody else.
        """
        self.beat(agent_id, now)
        # Once the epoch is ending, what each agent has said that it holds must stay true.
        if self.phase is not Phase.RUNNING or epoch != self.epoch or step <= self._agreed:
            return
        # From its ranks alone: spares drop older copies for it.
        if agent_id not in self.seats:
            return
        self._agreed = step
        for agent in self.agents.values():
            if agent.working is None and agent.id not in self.seats:
                self._cluster.retire(agent.id, epoch, step)

    def ended(
        self,
        agent_id: str,
        report: EpochReport,
        held: Mapping[int, frozenset[int]],
        now: float,
    ) -> None:
        """An agent's work in an epoch has ended, and it holds these copies."""
        agent = self.agents.get(agent_id)
        if agent is None:
            return
        agent.heard_at = now
        agent.held = self._lineage.valid(held, report.epoch)
        if agent.working == report.epoch:
            agent.working = None
        if report.epoch == self.epoch and agent_id in self._awaited:
            self._report(agent, report, now)
        self._advance(now)

    def holds(
        self, agent_id: str, epoch: int, held: Mapping[int, frozenset[int]], now: float
    ) -> None:
        """What an agent holds that was asked for it; `epoch` is the newest that it was told of."""
        agent = self.agents.get(agent_id)
        if agent is None:
            return
        agent.heard_at = now
        agent.held = self._lineage.valid(held, epoch)
        self._asked.discard(agent_id)
        self._advance(now)

    def _report(self, agent: Agent, report: EpochReport, now: float) -> None:
        agent.working = None
        del self._awaited[agent.id]
        if report.outcome is not EpochOutcome.FINISHED and self.phase is Phase.RUNNING:
            if report.outcome is EpochOutcome.FAILED:
                self._count_failure()
            self._end(f"{agent}: {report.reason or report.outcome}", now)

    def _count_failure(self) -> None:
        if self.newest_step > self._failed_at:
            self._failures = 0
        self._failed_at = self.newest_step
        self._failures += 1

    def leave(self, agent_id: str, within_s: float, now: float) -> None:
        """An agent wants to go, and does so after `within_s` in any case."""
        agent = self.agents.get(agent_id)
        if agent is None:
            return
        agent.heard_at = now
        if agent.leave_by is None:
            self._cluster.note(f"{agent} leaves within {within_s:g} s")
        agent.leave_by = now + within_s
        if self.phase is Phase.RUNNING and agent_id in self._awaited:
            self._stop_after_step(now + _STOP_SHARE * within_s)
        self._advance(now)

    def rest(self, within_s: float, now: float) -> None:
        """End the epoch after the step under way, within that time, and begin no other."""
        self._rests = True
        if self.phase is Phase.RUNNING:
            self._stop_after_step(now + within_s)

    def renew(self, why: str, now: float) -> None:
        """What an epoch is begun with has changed: end this one after the step under way. Where the
        change is of what the step waits for, it does not end: not for long.
        """
        self._cluster.note(why)
        if self.phase is Phase.RUNNING:
            self._stop_after_step(now + _RENEW_SHARE * self._settings.silence_s)

    @property
    def is_at_rest(self) -> bool:
        return self._rests and self.phase in (Phase.WAITING, Phase.OVER)

    def disconnected(self, agent_id: str) -> None:
        """Its connection broke. It may open another one."""
        agent = self.agents.get(agent_id)
        if agent is not None:
            agent.connected = False

    def gone(self, agent_id: str, why: str, now: float) -> None:
        """It will not come back: its process has ended."""
        self._lose(agent_id, why, now)
        self._advance(now)

    def was_away(self, now: float) -> None:
        """This coordinator was stopped, or could not answer: nobody's silence counts until now."""
        for agent in self.agents.values():
            agent.heard_at = now
        self._awaited = dict.fromkeys(self._awaited, now)

    def tick(self, now: float) -> None:
        """Call it a few times in `silence_s`."""
        silence_s = self._settings.silence_s
        why = f"no sign of life for {silence_s:g} s"
        for agent in list(self.agents.values()):
            if now - agent.heard_at > silence_s:
                self._lose(agent.id, why, now)
        for agent_id, since in list(self._awaited.items()):
            # Of a coordinator that was started again: whoever has not come back.
            if agent_id not in self.agents and now - since > silence_s:
                del self._awaited[agent_id]
        stop_by = math.inf
        if self.phase is Phase.RUNNING and self._stop_by is not None:
            stop_by = self._stop_by
        if now > stop_by:
            self._end("the step under way took too long for the time left", now)
        self._advance(now)

    # What follows

    def _lose(self, agent_id: str, why: str, now: float) -> None:
        agent = self.agents.pop(agent_id, None)
        if agent is None:
            return
        was_awaited = self._awaited.pop(agent_id, None) is not None
        self._asked.discard(agent_id)
        # Where it lives after all, it comes back and says what it has.
        self._cluster.hang_up(agent_id)
        if agent.leave_by is None or was_awaited:
            self._cluster.note(f"lost {agent}: {why}")
        else:
            self._cluster.note(f"{agent} left")
        if self.phase is not Phase.RUNNING:
            return
        if was_awaited:
            self._end(f"lost {agent}: {why}", now)
        elif agent.keeper in self._guards:
            # Else no copy would be whole any more, and the next loss cost all that came since.
            self._cluster.note(f"stopping after this step for other guards than {agent}")
            self._stop_after_step(now + self._settings.stop_s)

    def _end(self, reason: str, now: float) -> None:
        """The epoch is over for all, whatever they are doing."""
        self._cluster.close_epoch(reason)
        self._cluster.note(f"epoch {self.epoch} ended at step {self.newest_step}: {reason}")
        for agent_id in self._awaited:
            self._cluster.stop(agent_id, self.epoch, after_step=False)
        # Spares keep copies as well, and got some while the epoch went on.
        for agent in self.agents.values():
            if agent.working is None and agent.id not in self.seats:
                self._asked.add(agent.id)
                self._cluster.ask(agent.id)
        self._stop_by = None
        self._enter(Phase.ENDING, now)

    def _enter(self, phase: Phase, now: float) -> None:
        self.phase = phase
        self.since = now

    def _stop_after_step(self, by: float) -> None:
        if self._stop_by is None:
            for agent_id in self._awaited:
                self._cluster.stop(agent_id, self.epoch, after_step=True)
            self._stop_by = by
        self._stop_by = min(by, self._stop_by)

    def _advance(self, now: float) -> None:
        """Go on to the next phase where its time has come."""
        if self.phase is Phase.RUNNING and not self._awaited:
            self._finish(None, now)
        if self.phase is Phase.RUNNING:
            self._take_in(now)
        if self.phase is Phase.ENDING and not self._awaited and not self._asked:
            self._enter(Phase.WAITING, now)
        if self.phase is Phase.WAITING and not self._rests:
            self._form(now)

    def _finish(self, reason: str | None, now: float) -> None:
        self._cluster.close_epoch(reason or "the run has finished")
        self._cluster.finish(reason)
        for agent_id in self.agents:
            self._cluster.release(agent_id)
        self._enter(Phase.OVER, now)

    def _take_in(self, now: float) -> None:
        """Stop for newcomers, where the run has fewer ranks than it asks for and it pays."""
        ranks = len(self.seats)
        if ranks >= self._settings.world_size or self._stop_by is not None:
            return
        if not self._has_stepped:
            return
        agents = self.agents.values()
        more = self._size_for([a for a in agents if a.is_free or a.id in self.seats])
        if more is None or more <= ranks:
            return
        steps_left = self._settings.num_steps - self.newest_step
        if self._cluster.pays(ranks, more, steps_left):
            self._cluster.note(f"stopping after this step to go on with {more} ranks")
            self._stop_after_step(now + self._settings.stop_s)

    def _size_for(self, agents: list[Agent]) -> int | None:
        wanted = self._settings.world_size
        most = num_seats(agents, self._settings.group_size)
        return wanted if most >= wanted else self._cluster.fewer(most)

    def _form(self, now: float) -> None:
        """Begin the next epoch, if there is somebody to begin it with."""
        if self._failures >= _MOST_FAILURES:
            self._finish(f"it failed {_MOST_FAILURES} times at step {self.newest_step}", now)
            return
        pause_s = min(2.0**self._idle_epochs - 1, _MOST_PAUSE_S)
        if now - self.since < pause_s or self._awaits_copies():
            return
        free = [agent for agent in self.agents.values() if agent.is_free]
        staying = [agent for agent in self.agents.values() if agent.leave_by is None]
        if not staying:
            # There is nobody to hand over to.
            self._let_leavers_go()
            return
        size = self._size_for(free)
        patience_s = self._settings.patience_s if self.epoch else self._settings.gather_s
        is_patient = now - self.since <= patience_s
        if size is None or (size < self._settings.world_size and is_patient):
            self._name_scattered(free)
            return
        self._begin(free, size, now)

    def _name_scattered(self, free: list[Agent]) -> None:
        """Why there are agents enough, and no epoch: once, and again where others have come."""
        if len(free) < self._settings.world_size or len(free) == self._scattered:
            return
        self._scattered = len(free)
        self._cluster.note(
            f"{len(free)} processes have joined, and ranks wait: those that hold their layers "
            f"together need {self._settings.group_size} processes on one machine each; start more "
            "where there are too few"
        )

    def _awaits_copies(self) -> bool:
        """Whether somebody whose connection broke, and who may be back at once, holds what makes
        for a newer step.
        """
        idle = self._idle()
        here = self._newest_whole([agent for agent in idle if agent.connected])
        of_all = self._newest_whole(idle)
        return of_all is not None and (here is None or of_all > here)

    def _idle(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.working is None]

    def _newest_whole(self, agents: list[Agent]) -> int | None:
        held = [agent.held for agent in agents]
        return newest_whole(held, self._settings.num_pieces)

    def _begin(self, free: list[Agent], size: int, now: float) -> None:
        # What is held while somebody works belongs to the work.
        holding = [agent for agent in self._idle() if agent.connected]
        seats = seated(free, self.seats, size, self._settings.group_size)
        epoch = self._next_epoch(seats, holding)
        self._lineage.add(epoch.number, epoch.resume_step)
        self.seats = epoch.seats
        self._guards = frozenset(chain.from_iterable(epoch.guards))
        self.newest_step = epoch.resume_step
        self._awaited = dict.fromkeys(epoch.seats, now)
        self._asked.clear()
        self._has_stepped = False
        self._agreed = 0
        self._idle_epochs += 1
        self._stop_by = None
        for agent in self.agents.values():
            agent.epoch = epoch.number
            agent.held = self._lineage.valid(agent.held, epoch.number - 1)
            if agent.id in epoch.seats:
                agent.working = epoch.number
        self._enter(Phase.RUNNING, now)
        self._cluster.begin(epoch)

    def _next_epoch(self, seats: tuple[str, ...], holding: list[Agent]) -> Epoch:
        """It goes on from the newest state that is whole in memory or in a checkpoint."""
        whole = self._newest_whole(holding)
        saved = self._cluster.checkpoint()
        from_checkpoint = saved is not None and (whole is None or saved > whole)
        step = saved if from_checkpoint else whole
        sources = {}
        if whole is not None and not from_checkpoint:
            sources = holders(holding, whole)
        return Epoch(
            number=self.epoch + 1,
            resume_step=step or 0,
            seats=seats,
            from_checkpoint=from_checkpoint,
            sources=sources,
            guards=guardians(seats, self.agents, self._settings.copies),
        )

    def _let_leavers_go(self) -> None:
        """What those had who leave is with others by now, or nobody is left to take it."""
        for agent in self.agents.values():
            if agent.leave_by is not None and agent.working is None:
                self._cluster.release(agent.id)
