"""`HeldTerm`: a coordinator's term, while it has it.

beating  ──each second──▶ beat written ──▶ is there a later term? ──no──▶ it answers for `lease_s`
copying  ──each second──▶ journal and rows               └──yes──▶ lost: it answers nobody any more
"""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal

from dpipe.errors import CheckpointError, TermLost
from dpipe.terms.copying import RunCopies
from dpipe.terms.policy import Tenure, TermLease, TermTimes
from dpipe.terms.records import HolderBeat
from dpipe.terms.storing import TermStore, TermStoreError

LOG = logging.getLogger("dpipe")
_LOOK_S = 0.2
_THREAD_S = 5.0
_REASON_CHARACTERS = 1000


class HeldTerm:
    """From `start` until `close`."""

    def __init__(self, store: TermStore, number: int, times: TermTimes, copies: RunCopies) -> None:
        self.number = number
        self._store = store
        self._times = times
        self._copies = copies
        self._address = ""
        self._lease = TermLease(times.lease_s)
        self._lock = threading.Condition()  # guards the lease; notified when it changes
        self._stopped = threading.Event()
        self._is_closed = False
        self._count = 0
        self._doubts = False  # whether that was logged
        loops = ((self._beat, "term beat"), (self._copies.copy, "term copies"))
        self._threads = [
            threading.Thread(target=self._again, args=(act,), name=name, daemon=True)
            for act, name in loops
        ]

    def start(self, address: str) -> None:
        """Machines reach this coordinator there. Raises `TermStoreError` where the URL does not
        answer.
        """
        self._address = address
        # Before anybody joins: whoever takes over finds a run.
        self._copies.copy()
        self._beat()
        for thread in self._threads:
            thread.start()

    @property
    def holds(self) -> bool:
        return self._tenure() is Tenure.HOLDS

    @property
    def is_lost(self) -> bool:
        return self._tenure() is Tenure.LOST

    def _tenure(self) -> Tenure:
        with self._lock:
            return self._lease.tenure(time.monotonic())

    def check(self) -> None:
        """Before anything is answered: wait until it is certain that this still is the coordinator.
        Raises `TermLost` where it is not, or `stop_waiting` was called.
        """
        with self._lock:
            while (tenure := self._lease.tenure(time.monotonic())) is not Tenure.HOLDS:
                if tenure is Tenure.LOST or self._stopped.is_set():
                    raise TermLost("this process coordinates the run no longer")
                self._lock.wait(_LOOK_S)

    def publish(self) -> None:
        """Before anybody hears of an epoch: its journal is at the URL, and no later term is. Waits
        for that. Raises as `check` does.
        """
        while True:
            try:
                self._copies.copy_journal()
                self._look()
            except TermStoreError as error:
                LOG.warning("%s; the run waits for it", error)
            else:
                return self.check()
            if self._stopped.wait(self._times.beat_s):
                self.check()

    def stop_waiting(self) -> None:
        self._stopped.set()

    def close(self, state: Literal["left", "over"] = "left", failure: str | None = None) -> None:
        """Say to standbys that this one has gone, or that the run is over."""
        # By name where the run is over, and once more with all that is closed at the end.
        if self._is_closed:
            return
        self._is_closed = True
        self._stopped.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(_THREAD_S)
        # Of a term that is lost nobody asks any more.
        if self.is_lost:
            return
        reason = None if failure is None else failure[:_REASON_CHARACTERS]
        try:
            self._copies.copy()
            self._say(HolderBeat(count=0, address=self._address, state=state, failure=reason))
        except TermStoreError as error:
            LOG.warning("%s; a standby finds out by itself that this coordinator has gone", error)

    def lost_to(self) -> str:
        """What there is to say of a term that is lost."""
        where = ""
        with suppress(TermStoreError, CheckpointError):
            beat = self._store.beat(self.number + 1)
            where = "" if beat is None else f" at {beat.address}"
        return (
            f"another coordinator{where} has taken this run over, in term {self.number + 1}: this "
            f"one has stopped, and the machines find the other by {self._store.place}"
        )

    def _again(self, act: Callable[[], None]) -> None:
        while not (self._stopped.wait(self._times.beat_s) or self.is_lost):
            try:
                act()
            except (TermStoreError, CheckpointError) as error:
                self._warn(error)

    def _warn(self, error: Exception) -> None:
        """Once, where nobody is answered any more: until then it may pass."""
        is_new = not self.holds and not self._doubts
        self._doubts = not self.holds
        if is_new:
            LOG.warning("%s; the run waits for it", error)

    def _beat(self) -> None:
        # From here on, and not from its answer: that may take as long as it likes.
        began_at = time.monotonic()
        self._say(HolderBeat(count=self._count + 1, address=self._address))
        self._look()
        with self._lock:
            self._lease.confirmed(began_at)
            self._lock.notify_all()

    def _say(self, beat: HolderBeat) -> None:
        self._count += 1
        self._store.say(self.number, beat.model_copy(update={"count": self._count}))

    def _look(self) -> None:
        if self._store.is_claimed(self.number + 1):
            with self._lock:
                self._lease.superseded()
                self._lock.notify_all()
