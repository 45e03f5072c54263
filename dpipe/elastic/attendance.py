"""What the agent of a machine decides: when it works, when it stops, when it gives up.

               enlisted                    assigned
    AWAY ───────────────────▶ READY ◀──────────────────────▶ AT WORK in epoch e
      ▲ the connection broke    │      the epoch has ended       │ lease over, told to stop: at once
      └─────────────────────────┴────────────────────────────────┘
                                │ released, or away for longer than `wait_s`
                                ▼
                               OUT

The lease: what this agent said at time t was answered. The coordinator counts from when it heard
it, and does not take the agent for lost before t + `silence_s`. The agent stops its work at two
thirds of that, whatever the network does: who has its rank next is alone with it.

Policy only, as `rendezvous.py`: no clock, no thread, no socket.
"""

from collections import deque
from dataclasses import replace
from typing import Protocol

from dpipe.elastic.agents import Enlistment, EpochReport
from dpipe.elastic.lineage import Held

_LEASE_SHARE = 2 / 3  # of the silence after which an agent is lost; the rest is for it to stop
_REMEMBERED = 10_000  # steps that are said again to a coordinator that was away


class Surroundings(Protocol):
    """What `Attendance` acts through. Nothing of it calls back before it returns."""

    def held(self) -> Held:
        """What the keeper holds now."""

    def retire(self, before: int) -> None:
        """Drop copies of steps before that one."""

    def fence(self, epoch: int, newest: float) -> None:
        """Take no copies of epochs before `epoch` any more, and drop those newer than `newest`."""

    def start(self, epoch: int) -> None:
        """Begin the work of `epoch`, as it was assigned."""

    def stop(self, *, after_step: bool) -> None:
        """End the work under way; how it ended is reported to `Attendance.work_ended`."""

    def exit(self, failure: str | None) -> None:
        """The agent is done: there is nothing left to do (None), or it cannot go on."""

    # To the coordinator; lost where the connection is broken.

    def say_enlist(self, enlistment: Enlistment) -> None: ...

    def say_committed(self, epoch: int, step: int) -> None: ...

    def say_ended(self, report: EpochReport, held: Held) -> None: ...

    def say_holds(self, epoch: int, held: Held) -> None: ...

    def say_leave(self, within_s: float) -> None: ...

    def say_beat(self, sent_at: float) -> None: ...


class Attendance:
    def __init__(
        self,
        surroundings: Surroundings,
        enlistment: Enlistment,
        *,
        silence_s: float,
        wait_s: float,
        now: float,
    ) -> None:
        self.epoch = 0  # the newest that it was told of
        self.work: int | None = None  # the epoch that it is at work in
        self.is_out = False
        self._surroundings = surroundings
        self._enlistment = enlistment
        self._lease_s = silence_s * _LEASE_SHARE
        self._wait_s = wait_s
        self._is_connected = False
        self._is_enlisted = False
        self._away_since = now
        self._ticked_at = now
        self._lease_until = now
        self._heard_at = now  # the newest of what the coordinator has answered was said then
        self._enlisting_at = now
        self._next: int | None = None  # assigned, while the work of an older epoch still ends
        self._last: EpochReport | None = None
        self._steps: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        self._leave_by: float | None = None
        self._said: Held = {}  # what the coordinator was told last that this agent holds

    @property
    def is_leaving(self) -> bool:
        return self._leave_by is not None

    # The connection

    def connected(self, now: float) -> None:
        self._is_connected = True
        self._is_enlisted = False
        self._enlisting_at = now
        self._said = self._surroundings.held()
        enlistment = replace(
            self._enlistment,
            epoch=self.epoch,
            working=self.work is not None and self.work == self.epoch,
            held=self._said,
            last=self._last,
        )
        self._surroundings.say_enlist(enlistment)
        if self._leave_by is not None:
            self._surroundings.say_leave(max(0.0, self._leave_by - now))

    def disconnected(self, now: float) -> None:
        self._is_connected = False
        # An attempt that came to nothing does not count: the coordinator has been away all along.
        if self._is_enlisted:
            self._is_enlisted = False
            self._away_since = now

    def enlisted(self, epoch: int, newest_valid: float, newest_step: int) -> None:
        """The coordinator knows this agent, and the run up to the state of `newest_step`."""
        self._is_enlisted = True
        self._heard_at = self._enlisting_at
        self._lease_until = self._enlisting_at + self._lease_s
        self._hear_of(epoch, newest_valid)
        for step_epoch, step in self._steps:
            if step > newest_step:
                self._surroundings.say_committed(step_epoch, step)

    def refused(self, reason: str) -> None:
        self._stop_work()
        self._out(reason)

    def answered(self, sent_at: float) -> None:
        """The coordinator has heard what was said at `sent_at`."""
        self._heard_at = max(self._heard_at, sent_at)
        self._lease_until = max(self._lease_until, sent_at + self._lease_s)

    def unanswered_s(self, now: float) -> float:
        """How old the newest is of what the coordinator has heard."""
        return now - self._heard_at

    # Epochs

    def assigned(self, epoch: int, resume_step: int) -> None:
        self._hear_of(epoch, resume_step)
        if self.work is None:
            self._begin(epoch)
        else:
            self._next = epoch
            self._stop_work()

    def standby(self, epoch: int, resume_step: int) -> None:
        """Others begin `epoch`."""
        self._hear_of(epoch, resume_step)
        self._next = None
        self._stop_work()

    def stop(self, epoch: int, *, after_step: bool) -> None:
        if self._next is not None and self._next <= epoch:
            self._next = None
        if self.work is not None and self.work <= epoch:
            self._surroundings.stop(after_step=after_step)

    def retire(self, epoch: int, before: int) -> None:
        """The ranks of `epoch` need no copies of steps before that one."""
        if epoch == self.epoch:
            self._surroundings.retire(before)

    def asked(self) -> None:
        """The coordinator wants to know what this agent holds."""
        self._say_holds(self._surroundings.held())

    def _say_holds(self, held: Held) -> None:
        self._said = held
        self._surroundings.say_holds(self.epoch, held)

    def _say_news(self) -> None:
        """Copies come in while others work, and while nobody does."""
        held = self._surroundings.held()
        if self.work is None and self._is_enlisted and held != self._said:
            self._say_holds(held)

    def _hear_of(self, epoch: int, newest: float) -> None:
        self.epoch = epoch
        self._surroundings.fence(epoch, newest)

    def _begin(self, epoch: int) -> None:
        self.work = epoch
        self._last = None
        self._surroundings.start(epoch)

    def _stop_work(self) -> None:
        if self.work is not None:
            self._surroundings.stop(after_step=False)

    def committed(self, epoch: int, step: int) -> None:
        """This rank has reached the state of `step`."""
        self._steps.append((epoch, step))
        if self._is_connected:
            self._surroundings.say_committed(epoch, step)

    def work_ended(self, report: EpochReport) -> None:
        self.work = None
        self._last = report
        if self._is_connected:
            self._said = self._surroundings.held()
            self._surroundings.say_ended(report, self._said)
        if self._next is not None:
            epoch = self._next
            self._next = None
            self._begin(epoch)

    # The end

    def leave(self, within_s: float, now: float) -> None:
        """Hand over and go, within the time that is left."""
        if self._leave_by is not None:
            return
        self._leave_by = now + within_s
        if self._is_connected:
            self._surroundings.say_leave(within_s)

    def released(self) -> None:
        """Nothing is left to do here."""
        self._stop_work()
        self._out(None)

    def tick(self, now: float) -> None:
        """Call it six times in `silence_s`, or more often."""
        if self.is_out:
            return
        late_s = now - self._ticked_at
        self._ticked_at = now
        if late_s > self._lease_s / 2:
            # This process was stopped: that long nobody else was away.
            self._away_since += late_s
        if self._is_connected:
            self._surroundings.say_beat(now)
            self._say_news()
        if now > self._lease_until:
            self._stop_work()
        away_s = now - self._away_since
        if self._leave_by is not None and now > self._leave_by:
            self._stop_work()
            self._out(None)
        elif not self._is_enlisted and away_s > self._wait_s:
            self._stop_work()
            self._out(f"the coordinator has not come back for {self._wait_s:g} s")

    def _out(self, failure: str | None) -> None:
        if not self.is_out:
            self.is_out = True
            self._surroundings.exit(failure)
