"""A stage, or a tensor-parallel part of one, on a parameter server, for many callers at once: who
waits for what, and who commits.

    callers   push ---> add --.
              pull ---> give --+--> StageState, under one lock
              norms ----------'           ^
                                          `---- commit thread: complete? -> journal -> commit
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from dpipe.errors import NumericError, RunError, TransferTimeout
from dpipe.paramserver.journal import Journal
from dpipe.paramserver.stage_state import OutgoingChunk, StageState, StepDecision

LOG = logging.getLogger("dpipe")
T = TypeVar("T")
_POLL_S = 1.0  # how often a waiting thread looks whether its caller is still there
_STOP_S = 30.0  # for a commit under way, which writes to a disk


class Caller(Protocol):
    """What is asked of a `grpc.ServicerContext`."""

    def is_active(self) -> bool: ...
    def time_remaining(self) -> float | None: ...


class CallerGone(Exception):  # noqa: N818 - nobody is left to be told
    pass


def session_of(run: str, epoch: int) -> str:
    """The name of the session of a run that comes back, epoch after epoch."""
    return f"{run}.{epoch}"


@dataclass(frozen=True)
class Session:
    """A run and its stage; `part` is the tp_rank, where several ranks share the stage."""

    name: str
    stage: int
    part: int = 0

    def is_behind(self, other: "Session") -> bool:
        """Whether both are of one run, and this one of an earlier epoch (`session_of`)."""
        run, epoch = self._run_and_epoch
        other_run, other_epoch = other._run_and_epoch
        return run == other_run and epoch < other_epoch

    @property
    def _run_and_epoch(self) -> tuple[str, int]:
        """Epoch 0: of a run that does not come back."""
        run, _, text = self.name.partition(".")
        is_number = text.isdecimal() and len(text) < 10
        epoch = int(text) if is_number else 0
        return run, epoch

    @property
    def slot(self) -> tuple[int, int]:
        return self.stage, self.part

    @property
    def what(self) -> str:
        part = f", part {self.part}" if self.part else ""
        return f"stage {self.stage}{part}"


class StageServer:
    """Every call raises what went wrong in the background; once closed, what `close` was given."""

    def __init__(self, session: Session, state: StageState, journal: Journal | None) -> None:
        """Without a `journal` nothing is kept on disk."""
        self.session = session
        self.state = state
        self.left = set() if journal is None else journal.who_left()  # the replicas that are done
        self._journal = journal
        # Guards the state, `left` and the error; notified at each change.
        self._changed = threading.Condition()
        self._error: Exception | None = None
        name = f"dpipe-commit-{session.stage}.{session.part}"
        # A thread of its own, because a commit writes to a disk: callers hold gRPC's threads, and
        # the lock is free meanwhile.
        self._thread = threading.Thread(target=self._commit_steps, name=name, daemon=True)
        self._thread.start()

    def add(
        self,
        step: int,
        replica: int,
        chunk: int,
        values: torch.Tensor,
    ) -> None:
        self._do(lambda: self.state.add(step, replica, chunk, values))

    def decide(self, step: int, replica: int, decision: StepDecision) -> None:
        self._do(lambda: self.state.decide(step, replica, decision))

    def leave(self, replica: int) -> None:
        # On the disk first: it says so once, and a server started again would wait for it.
        if self._journal is not None:
            self._journal.leave(replica)
        self._do(lambda: self.left.add(replica))

    def norms(self, step: int, caller: Caller) -> Mapping[int, float]:
        """Waits until every replica has pushed."""

        def attempt() -> Mapping[int, float] | None:
            return self.state.norms(step) if self.state.is_final(step) else None

        return self._wait(caller, f"all gradients of step {step}", attempt)

    def give(
        self,
        step: int,
        replica: int,
        chunk: int,
        caller: Caller,
    ) -> OutgoingChunk:
        """Waits until the chunk may go to that replica."""

        def attempt() -> OutgoingChunk | None:
            outgoing = self.state.give(step, replica, chunk)
            self._wake_if_complete()
            return outgoing

        return self._wait(caller, f"chunk {chunk} of step {step}", attempt)

    def committed(self, step: int, caller: Caller) -> int:
        """Waits until what a worker after `step` relies on is on the disk; returns the first step
        that is not committed.

        Whoever waits here wants no more chunks.
        """
        bound = self.state.rule.staleness

        def attempt() -> int | None:
            self.state.step_rest(step)
            self._wake_if_complete()
            return self.state.step if self.state.step + bound > step else None

        return self._wait(caller, f"the commit of step {step - bound}", attempt)

    def fetch(self, step: int, caller: Caller) -> dict[str, torch.Tensor]:
        """A copy of all vectors before `step`."""

        def attempt() -> dict[str, torch.Tensor] | None:
            if self.state.step < step:
                return None
            # Copied under the lock: after the next commit a step is made in these tensors.
            vectors = self.state.now.by_name()
            return {name: vector.clone() for name, vector in vectors.items()}

        return self._wait(caller, f"the commit of step {step - 1}", attempt)

    @property
    def failure(self) -> RunError | None:
        """Why no step can be kept any more; None for what the workers are to blame for."""
        error = self._error
        if isinstance(error, RunError) and not isinstance(error, NumericError):
            return error
        return None

    @property
    def is_left_by_all(self) -> bool:
        return len(self.left) == self.state.rule.num_replicas

    def close(self, why: Exception) -> None:
        """Whoever waits raises `why`. What was committed is on the disk."""
        self._fail(why)
        self._thread.join(_STOP_S)
        if self._journal is not None:
            self._journal.close()

    def forget_who_left(self) -> None:
        if self._journal is not None:
            self._journal.forget_who_left()

    def wake(self) -> None:
        """A caller may have gone."""
        with self._changed:
            self._changed.notify_all()

    def _wake_if_complete(self) -> None:
        """For the commit thread. Called with the lock held."""
        if self.state.complete:
            self._changed.notify_all()

    def _do(self, change: Callable[[], object]) -> None:
        with self._changed:
            self._raise()
            change()
            self._changed.notify_all()

    def _wait(self, caller: Caller, what: str, attempt: Callable[[], T | None]) -> T:
        """What `attempt`, called with the lock held, returns once that is not None. Raises
        `CallerGone`, or `TransferTimeout` just before the caller's deadline.
        """
        remaining = caller.time_remaining()
        # The caller hears who is missing only if the answer comes before it gives up.
        patience = float("inf") if remaining is None else remaining - _POLL_S
        deadline = time.monotonic() + patience
        with self._changed:
            while True:
                # Before the attempt: a stage that cannot go on answers nothing more.
                self._raise()
                result = attempt()
                if result is not None:
                    return result
                if not caller.is_active():
                    raise CallerGone
                if time.monotonic() > deadline:
                    raise TransferTimeout(
                        f"waited for {what} of {self.session.what}: {self._who_is_missing()}"
                    )
                self._changed.wait(_POLL_S)

    def _who_is_missing(self) -> str:
        missing = ", ".join(map(str, self.state.missing()))
        return f"nothing, or not all, has come from rank {missing}"

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _commit_steps(self) -> None:
        try:
            while self._next_complete():
                self._commit()
        except NumericError as error:
            self._fail(error)
        except Exception as error:
            if not isinstance(error, RunError):
                LOG.exception("%s cannot go on", self.session.what)
            what = f"step {self.state.step} of {self.session.what}"
            self._fail(RunError(f"cannot keep {what}: {error}"))

    def _commit(self) -> None:
        """Written down first: a worker that hears of the commit forgets its gradient."""
        journal = self._journal
        if journal is None:
            self._do(self.state.commit)
            return
        journal.wait_for_snapshot()
        decision, average = self.state.completed_step()
        # Without the lock: nothing of a step that is complete changes any more.
        journal.write(self.state.step, decision, average)
        self._do(self.state.commit)
        journal.committed(self.state)

    def _fail(self, why: Exception) -> None:
        with self._changed:
            self._error = self._error or why
            self._changed.notify_all()

    def _next_complete(self) -> bool:
        """Waits for a step to commit; false at the end."""
        with self._changed:
            while self._error is None and not self.state.complete:
                self._changed.wait(_POLL_S)
            return self._error is None
