"""`AgentProcess`: a machine's agent. It joins, trains one epoch after another, and goes.

connection's thread ──┐  one lock    ┌──▶ keeper
clock thread        ──┼─▶ Attendance ┼──▶ connection
signals, notices    ──┘      ▲       └──▶ work ──▶ main thread: run_epoch
                             └─────────── committed, ended ─┘
"""

import json
import logging
import math
import os
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from dpipe import __version__
from dpipe.agent.control_stream import ControlStream
from dpipe.config.run import NodeConfig
from dpipe.elastic import messages
from dpipe.elastic.agents import Enlistment, EpochOutcome, EpochReport
from dpipe.elastic.attendance import Attendance
from dpipe.elastic.lineage import Held
from dpipe.epoch.assignment import ASSIGNMENT, Assignment
from dpipe.epoch.control import EpochControl
from dpipe.epoch.epoch import EpochEnd, run_epoch
from dpipe.errors import JoinError, RunError
from dpipe.keeper.keeper import Keeper
from dpipe.processes.neighbours import machine
from dpipe.wire.rpc import Security

LOG = logging.getLogger("dpipe")
_TICKS = 16  # in the time after which an agent is lost
_SILENT_SHARE = 1 / 8  # of that time, after which another coordinator is looked for
_GRACE_S = 1.0  # for an epoch to end by its own coordinator, which says all votes first
_THREAD_S = 5.0
_ROWS = 1000  # that are sent again to a coordinator that was away
_REASON_CHARACTERS = 1000

RunEpoch = Callable[..., EpochEnd]


class AgentProcess:
    """`run` joins and returns when the run is over, or this agent was asked to leave. Raises
    `JoinError` where it is refused before it has trained, else `RunError`.
    """

    def __init__(
        self,
        address: str,
        keeper: Keeper,
        node: NodeConfig,
        security: Security,
        *,
        name: str,
        memory_bytes: int,
        silence_s: float = 40.0,
        wait_s: float = 60.0,
        trust_code: bool = False,
        train: RunEpoch = run_epoch,
    ) -> None:
        self._keeper = keeper
        self._node = node
        self._trust_code = trust_code
        self._train = train
        self._memory_bytes = memory_bytes
        self._run = ""  # the id of the run that it is in
        self.term: int | None = 0  # of the coordinator that was heard last; None: there is no other
        self._said_agreed = (0, 0)  # an epoch, and the newest step that all its ranks have whole
        self._vouched: messages.Vouched | None = None  # the newest: it may be lost
        self._silence_s = silence_s
        self._lock = threading.Condition()  # guards what is below; notified when there is work
        self._assignments: dict[int, Assignment] = {}
        self._control: EpochControl | None = None
        self._work: Assignment | None = None
        self._rows: deque[messages.Row] = deque(maxlen=_ROWS)
        self._losses: dict[tuple[int, int], float | None] = {}  # by epoch and step, the last
        self._is_out = False
        self._failure: str | None = None
        self._has_trained = False
        self._attendance = Attendance(
            self,
            _enlistment(name, keeper),
            silence_s=silence_s,
            wait_s=wait_s,
            now=time.monotonic(),
        )
        self._connection = ControlStream(
            address,
            security,
            silence_s=silence_s,
            on_open=self._opened,
            on_message=self._take,
            on_break=self._broke,
            on_refusal=self._refused,
        )

    def run(self) -> None:
        threads = [
            threading.Thread(target=self._connection.run, name="agent connection", daemon=True),
            threading.Thread(target=self._tick, name="agent clock", daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            self._work_until_out()
        finally:
            with self._lock:
                self._is_out = True
                self._lock.notify_all()
            self._connection.close()
            for thread in threads:
                thread.join(_THREAD_S)
        if self._failure is not None:
            error = RunError if self._has_trained else JoinError
            raise error(self._failure)

    def leave(self, within_s: float) -> None:
        """Hand over and go, within that time. Any thread may call it."""
        with self._lock:
            self._attendance.leave(within_s, time.monotonic())

    def move(self, address: str) -> None:
        """Another coordinator has taken over, and listens there. Any thread may call it."""
        self._connection.move(address)

    @property
    def is_unanswered(self) -> bool:
        """Whether the coordinator is silent for longer than two messages of it are apart."""
        with self._lock:
            silent_s = self._attendance.unanswered_s(time.monotonic())
        return silent_s > self._silence_s * _SILENT_SHARE

    def _work_until_out(self) -> None:
        while True:
            with self._lock:
                # In short waits, so that Python handles signals meanwhile.
                while self._work is None and not self._is_out:
                    self._lock.wait(0.5)
                assignment = self._work
                control = self._control
                if assignment is None or control is None:
                    return
            self._has_trained = True
            end = self._epoch(assignment, control)
            with self._lock:
                self._work = None
                self._control = None
                self._lock.notify_all()
                outcome = EpochOutcome(end.outcome)
                reason = end.reason[:_REASON_CHARACTERS]
                self._attendance.work_ended(EpochReport(assignment.epoch, outcome, reason))

    def _epoch(self, assignment: Assignment, control: EpochControl) -> EpochEnd:
        LOG.info(
            "rank %d of %d in epoch %d", assignment.rank, assignment.world_size, assignment.epoch
        )
        return self._train(
            assignment,
            self._keeper,
            node=self._node,
            control=control,
            committed=lambda step, loss: self._committed(assignment.epoch, step, loss),
            on_row=lambda row: self._row(assignment.epoch, row),
            vouch=lambda step, digests: self._vouch(assignment.epoch, step, digests),
            trust_code=self._trust_code,
        )

    def _committed(self, epoch: int, step: int, loss: float | None) -> None:
        with self._lock:
            self._losses[epoch, step] = loss
            if len(self._losses) > _ROWS:
                del self._losses[next(iter(self._losses))]
            self._attendance.committed(epoch, step)
            agreed = self._keeper.agreed
            # Where it is lost with a connection, the next one says more.
            if (epoch, agreed) > self._said_agreed and agreed:
                self._said_agreed = (epoch, agreed)
                self._connection.tell(messages.Agreed(epoch=epoch, step=agreed))

    def _vouch(self, epoch: int, step: int, digests: dict[int, str]) -> None:
        message = messages.Vouched(epoch=epoch, step=step, digests=digests)
        self._vouched = message
        self._connection.tell(message)

    def _row(self, epoch: int, row: Mapping[str, Any]) -> None:
        message = messages.Row(epoch=epoch, row=dict(row))
        self._rows.append(message)
        self._connection.tell(message)

    def _say_rows(self, first_row: int) -> None:
        """Those from `first_row` on that this agent has written as rank 0: some may be lost."""
        for message in list(self._rows):
            if message.row["step"] >= first_row:
                self._connection.tell(message)

    def _tick(self) -> None:
        interval_s = min(self._silence_s / _TICKS, 1.0)
        while not self._is_out:
            time.sleep(interval_s)
            with self._lock:
                self._attendance.tick(time.monotonic())

    # The connection, on its thread

    def _opened(self) -> None:
        with self._lock:
            self._attendance.connected(time.monotonic())

    def _broke(self) -> None:
        with self._lock:
            self._attendance.disconnected(time.monotonic())

    def _refused(self, reason: str) -> None:
        with self._lock:
            self._attendance.refused(reason)

    def _take(self, message: messages.ToAgent) -> None:
        """Raises `ValueError` on an assignment that is none."""
        with self._lock:
            attendance = self._attendance
            match message:
                case messages.Enlisted():
                    self._run = message.run
                    self.term = message.term
                    newest = message.newest_valid
                    valid = math.inf if newest is None else newest
                    attendance.enlisted(message.epoch, valid, message.newest_step)
                    self._say_rows(message.first_row)
                    if self._vouched is not None:
                        self._connection.tell(self._vouched)
                case messages.Refusal():
                    attendance.refused(message.reason)
                case messages.Assigned():
                    assignment = self._read(message.assignment)
                    self._assignments = {assignment.epoch: assignment}
                    attendance.assigned(assignment.epoch, message.resume_step)
                case messages.Standby():
                    attendance.standby(message.epoch, message.resume_step)
                case messages.Retire():
                    attendance.retire(message.epoch, message.before)
                case messages.Stop():
                    attendance.stop(message.epoch, after_step=message.after_step)
                case messages.Ask():
                    attendance.asked()
                case messages.Release():
                    attendance.released()
                case messages.Answered():
                    attendance.answered(message.sent_at)

    def _read(self, content: dict[str, Any]) -> Assignment:
        assignment = ASSIGNMENT.read(json.dumps(content).encode())
        # At the host where this agent found the coordinator, which may not know how it is called.
        host = self._connection.address.rpartition(":")[0]
        port = assignment.coordinator.rpartition(":")[2]
        return assignment.model_copy(update={"coordinator": f"{host}:{port}"})

    # What `Attendance` acts through, with the lock held

    def held(self) -> Held:
        return messages.as_sets(self._keeper.held())

    def retire(self, before: int) -> None:
        self._keeper.retire(before)

    def fence(self, epoch: int, newest: float) -> None:
        self._keeper.fence(epoch, newest)

    def start(self, epoch: int) -> None:
        self._work = self._assignments[epoch]
        self._control = EpochControl()
        self._lock.notify_all()

    def stop(self, *, after_step: bool) -> None:
        if self._control is None:
            return
        if after_step:
            self._control.stop()
        else:
            # In a thread: what is cancelled may wait for one that waits for this lock.
            abort = threading.Thread(target=self._abort, args=(self._control,), daemon=True)
            abort.start()

    def _abort(self, control: EpochControl) -> None:
        with self._lock:
            if self._lock.wait_for(lambda: self._control is not control, _GRACE_S):
                return
        control.abort("the coordinator ended the epoch, or is away")

    def exit(self, failure: str | None) -> None:
        self._failure = failure
        self._is_out = True
        self._lock.notify_all()

    def say_enlist(self, enlistment: Enlistment) -> None:
        last = enlistment.last
        self._connection.tell(
            messages.Enlist(
                protocol=messages.PROTOCOL,
                version=__version__,
                run=self._run,
                agent=enlistment.agent,
                name=enlistment.name,
                host=enlistment.host,
                keeper=enlistment.keeper,
                machine=enlistment.machine,
                memory_bytes=self._memory_bytes,
                epoch=enlistment.epoch,
                working=enlistment.working,
                held=messages.as_lists(enlistment.held),
                last=None if last is None else messages.as_report(last),
            )
        )

    def say_committed(self, epoch: int, step: int) -> None:
        loss = self._losses.get((epoch, step))
        self._connection.tell(messages.Committed(epoch=epoch, step=step, loss=loss))

    def say_ended(self, report: EpochReport, held: Held) -> None:
        message = messages.Ended(report=messages.as_report(report), held=messages.as_lists(held))
        self._connection.tell(message)

    def say_holds(self, epoch: int, held: Held) -> None:
        self._connection.tell(messages.Holds(epoch=epoch, held=messages.as_lists(held)))

    def say_leave(self, within_s: float) -> None:
        self._connection.tell(messages.Leave(within_s=within_s))

    def say_beat(self, sent_at: float) -> None:
        self._connection.tell(messages.Beat(sent_at=sent_at))


def _enlistment(name: str, keeper: Keeper) -> Enlistment:
    return Enlistment(
        agent=secrets.token_hex(8),
        name=name,
        host=socket.gethostname(),
        keeper=keeper.address,
        machine=machine(),
    )


def machine_memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
