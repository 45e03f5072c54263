"""`Background`: a tracker on a thread of its own, which the run never waits for."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from queue import Full, Queue
from threading import Event, Thread

from dpipe.trackers.kinds import TRACKERS
from dpipe.trackers.tracker import TracedStep, TrackedRun, Tracker

LOG = logging.getLogger("dpipe")
_MOST_WAITING = 1000
_CLOSE_S = 30.0  # MLflow takes ten on a busy machine to make its database
_Work = Callable[[Tracker], None]


class Background:
    """Passes rows and spans on to the tracker of that name.

        run      log  log  log  trace  close ─────── at most `close_s` ──┐
        thread   build ─── log ── log ── log ── trace ── close ──────────┘

    What a tracker raises, and rows that it has no time for, are a warning each, once.
    """

    def __init__(self, name: str, run: TrackedRun, *, close_s: float = _CLOSE_S) -> None:
        self._name = name
        self._close_s = close_s
        self._queue: Queue[_Work] = Queue(_MOST_WAITING)
        self._closing = Event()
        self._has_failed = False
        self._has_dropped = False
        # A daemon: a tracker that hangs must not keep the process.
        self._thread = Thread(target=self._serve, args=(run,), name=f"tracker {name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._put(lambda tracker: tracker.log(step, values))

    def trace(self, steps: Sequence[TracedStep]) -> None:
        self._put(lambda tracker: tracker.trace(steps))

    def close(self) -> None:
        self._closing.set()
        # It may wait for a row; where it does not, the queue may be full.
        with suppress(Full):
            self._queue.put_nowait(lambda tracker: None)
        self._thread.join(self._close_s)
        if self._thread.is_alive():
            LOG.warning(
                'run.trackers "%s" has not ended in %.0f s; what it has not written is lost',
                self._name,
                self._close_s,
            )

    def _put(self, work: _Work) -> None:
        try:
            self._queue.put_nowait(work)
        except Full:
            if not self._has_dropped:
                LOG.warning('run.trackers "%s" is too slow; it misses rows', self._name)
            self._has_dropped = True

    def _serve(self, run: TrackedRun) -> None:
        try:
            module, _, function = TRACKERS.named(self._name).builder.partition(":")
            tracker: Tracker = getattr(import_module(module), function)(run)
        except Exception as error:
            self._note(error, "the run continues without it")
            return
        succeeds = True
        # At the end nothing waits for a server that is away, once for each row.
        while not self._closing.is_set() or (succeeds and not self._queue.empty()):
            succeeds = self._try(self._queue.get(), tracker)
        self._try(lambda tracker: tracker.close(), tracker)

    def _try(self, work: _Work, tracker: Tracker) -> bool:
        try:
            work(tracker)
            return True
        except Exception as error:
            self._note(error, "the run goes on; this is not said again")
            return False

    def _note(self, error: Exception, consequence: str) -> None:
        if not self._has_failed:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            LOG.warning('run.trackers "%s" failed (%s); %s', self._name, reason, consequence)
        self._has_failed = True
