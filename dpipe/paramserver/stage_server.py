"""A stage, or part of one, on a parameter server, for many callers at once: who waits for what, and
who commits.

callers   push ---> add --.
          pull ---> give --+--> StageState, under one lock      commit thread: complete? -> journal -> commit
          norms ----------'
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
_LOOK_S = 1.0  # how often a waiting thread looks whether its caller is still there
_STOP_S = 30.0


class Caller(Protocol):
    """`grpc.ServicerContext`, of which only this is asked."""

    def is_active(self) -> bool: ...
    def time_remaining(self) -> float | None: ...


class CallerGone(Exception):  # noqa: N818 - nobody is left to be told
    pass


@dataclass(frozen=True)
class Session:
    """Whose run this is, and where on the server: `part` of a stage that several ranks of a replica
    hold together.
    """

    name: str
    stage: int
    part: int = 0

    @property
    def slot(self) -> tuple[int, int]:
        return self.stage, self.part

    @property
    def what(self) -> str:
        return f"stage {self.stage}, part {self.part}" if self.part else f"stage {self.stage}"


class StageServer:
    """Raises what went wrong in the background from every call, as it is; `RunError` once
    closed.
    """

    def __init__(self, session: Session, master: StageState, journal: Journal | None) -> None:
        self.session = session
        self.master = master
        self.left = set() if journal is None else journal.who_left()
        self._journal = journal
        self._changed = threading.Condition()
        self._error: Exception | None = None
        name = f"dpipe-commit-{session.stage}.{session.part}"
        self._thread = threading.Thread(target=self._commit_steps, name=name, daemon=True)
        self._thread.start()

    def add(self, step: int, replica: int, chunk: int, values: torch.Tensor) -> None:
        self._do(lambda: self.master.add(step, replica, chunk, values))

    def decide(self, step: int, replica: int, verdict: StepDecision) -> None:
        self._do(lambda: self.master.decide(step, replica, verdict))

    def leave(self, replica: int) -> None:
        if self._journal is not None:
            self._journal.leave(replica)
        self._do(lambda: self.left.add(replica))

    def norms(self, step: int, caller: Caller) -> Mapping[int, float]:
        """Waits until every replica has pushed."""
        return self._until(
            caller,
            f"all gradients of step {step}",
            lambda: self.master.norms(step) if self.master.is_final(step) else None,
        )

    def give(self, step: int, replica: int, chunk: int, caller: Caller) -> OutgoingChunk:
        """Waits until the chunk may go to that replica."""
        return self._until(
            caller, f"chunk {chunk} of step {step}", lambda: self._give(step, replica, chunk)
        )

    def committed(self, step: int, caller: Caller) -> int:
        """Waits until what a worker behind `step` may rely on is on the disk; the first step that
        is not committed.

        Whoever waits here wants no more chunks.
        """
        bound = self.master.rule.staleness
        return self._until(
            caller, f"the commit of step {step - bound}", lambda: self._committed(step, bound)
        )

    def fetch(self, step: int, caller: Caller) -> dict[str, torch.Tensor]:
        """A copy of all rows before `step`."""
        return self._until(
            caller,
            f"the commit of step {step - 1}",
            lambda: (
                {n: r.clone() for n, r in self.master.now.rows().items()}
                if self.master.step >= step
                else None
            ),
        )

    @property
    def failure(self) -> RunError | None:
        """Why no step can be kept any more; None for what the workers are to blame for."""
        error = self._error
        return (
            error if isinstance(error, RunError) and not isinstance(error, NumericError) else None
        )

    @property
    def is_left_by_all(self) -> bool:
        return len(self.left) == self.master.rule.num_replicas

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

    def _give(self, step: int, replica: int, chunk: int) -> OutgoingChunk | None:
        given = self.master.give(step, replica, chunk)
        if self.master.complete:
            self._changed.notify_all()
        return given

    def _committed(self, step: int, bound: int) -> int | None:
        self.master.step_rest(step)
        if self.master.complete:
            self._changed.notify_all()
        return self.master.step if self.master.step + bound > step else None

    def _do(self, change: Callable[[], object]) -> None:
        with self._changed:
            self._raise()
            change()
            self._changed.notify_all()

    def _until(self, caller: Caller, what: str, attempt: Callable[[], T | None]) -> T:
        """What `attempt` gives, as soon as it does. Raises `CallerGone`, or `TransferTimeout` near
        its deadline.
        """
        left = caller.time_remaining()
        deadline = time.monotonic() + (float("inf") if left is None else left - _LOOK_S)
        with self._changed:
            while True:
                self._raise()
                if (found := attempt()) is not None:
                    return found
                if not caller.is_active():
                    raise CallerGone
                if time.monotonic() > deadline:
                    raise TransferTimeout(
                        f"waited for {what} of {self.session.what}: {self._who_is_missing()}"
                    )
                self._changed.wait(_LOOK_S)

    def _who_is_missing(self) -> str:
        missing = self.master.missing()
        return f"nothing, or not all, has come from rank {', '.join(map(str, missing))}"

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _commit_steps(self) -> None:
        try:
            while self._next_complete():
                step = self.master.step
                journal = self._journal
                if journal is not None:
                    journal.settle()
                    journal.write(step, *self.master.due())
                self._do(self.master.commit)
                if journal is not None:
                    journal.committed(self.master)
        except NumericError as error:
            self._fail(error)
        except Exception as error:
            if not isinstance(error, RunError):
                LOG.exception("%s cannot go on", self.session.what)
            self._fail(
                RunError(f"cannot keep step {self.master.step} of {self.session.what}: {error}")
            )

    def _fail(self, why: Exception) -> None:
        with self._changed:
            self._error = self._error or why
            self._changed.notify_all()

    def _next_complete(self) -> bool:
        """Waits for a step to commit; false at the end."""
        with self._changed:
            while self._error is None and not self.master.complete:
                self._changed.wait(_LOOK_S)
            return self._error is None
