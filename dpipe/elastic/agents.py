"""What the coordinator knows of a machine's agent, and what it decides for an epoch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from dpipe.elastic.lineage import Held


class EpochOutcome(StrEnum):
    """How an epoch ended for one rank."""

    FINISHED = "finished"  # train.steps are done, and what the run leaves behind is written
    LEFT = "left"  # all ranks stopped after the same step, because one was asked to
    ABORTED = "aborted"  # another rank was lost or failed, or this one was told to stop at once
    FAILED = "failed"  # it would fail again: a loss that is not finite, a full disk


@dataclass(frozen=True)
class EpochReport:
    """An epoch that has ended, as one agent says it."""

    epoch: int
    outcome: EpochOutcome
    reason: str = ""


@dataclass(frozen=True)
class Enlistment:
    """What an agent says first on each connection: it may be its first, or one in the place of
    another that broke.
    """

    agent: str  # random, made by the agent's process
    name: str  # for people
    host: str
    keeper: str  # host:port
    machine: str = ""  # equal for agents that reach each other over loopback
    epoch: int = 0  # the newest that it was told of; 0: none
    working: bool = False  # at `epoch`
    held: Held = field(default_factory=dict)
    last: EpochReport | None = None


@dataclass(eq=False)
class Agent:
    enlistment: Enlistment
    joined_at: float
    heard_at: float
    connected: bool = True
    epoch: int = 0  # the newest that it was told of
    working: int | None = None  # the epoch that it is at work in
    held: dict[int, frozenset[int]] = field(default_factory=dict)  # only what is valid
    leave_by: float | None = None  # when it goes, replaced or not

    @property
    def id(self) -> str:
        return self.enlistment.agent

    @property
    def keeper(self) -> str:
        return self.enlistment.keeper

    @property
    def is_free(self) -> bool:
        """Whether it could be given a rank."""
        return self.connected and self.working is None and self.leave_by is None

    def __str__(self) -> str:
        return f"{self.enlistment.name} ({self.enlistment.host})"


@dataclass(frozen=True)
class Epoch:
    """One run with fixed ranks."""

    number: int
    resume_step: int  # the state it begins with: so many steps are done
    seats: tuple[str, ...]  # by rank, the agent's id
    from_checkpoint: bool = False
    # By piece, the keepers of its state of `resume_step`; empty: a checkpoint's, or the initial one
    sources: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    guards: tuple[tuple[str, ...], ...] = ()  # by rank, who keeps its copies

    @property
    def world_size(self) -> int:
        return len(self.seats)


class Agents(Protocol):
    """What `Rendezvous` acts through. A call returns when its effect is sure to happen or to be
    lost with the agent's connection; none calls back.
    """

    def begin(self, epoch: Epoch) -> None:
        """Keep `epoch` in the journal, then open its coordinator, then tell its agents."""

    def close_epoch(self, reason: str) -> None:
        """End the open epoch's coordinator: from here on no vote of it is counted."""

    def stop(self, agent: str, epoch: int, *, after_step: bool) -> None:
        """Tell an agent to stop its work, at once or after the step under way."""

    def retire(self, agent: str, epoch: int, before: int) -> None:
        """Tell an agent to forget copies of steps before that one."""

    def ask(self, agent: str) -> None:
        """Ask an agent what it holds."""

    def release(self, agent: str) -> None:
        """Tell an agent that it may go."""

    def hang_up(self, agent: str) -> None:
        """Close an agent's connection, if there is one."""

    def finish(self, reason: str | None) -> None:
        """Keep in the journal that the run is over, and tell all agents; None: as it should be."""

    def keep_step(self, step: int) -> None:
        """Keep in the journal that the state of `step` was reached."""

    def note(self, text: str) -> None:
        """Something that a person should know."""

    def checkpoint(self) -> int | None:
        """The step of the newest checkpoint from which any agent could resume."""

    def fewer(self, num_agents: int) -> int | None:
        """The most ranks, at most `num_agents`, for which the job can be planned anew."""

    def pays(self, ranks: int, more: int, steps_left: int) -> bool:
        """Whether stopping, and going on with `more` ranks, ends the run sooner."""
