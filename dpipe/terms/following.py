"""`HolderSearch`: how a machine whose coordinator is silent finds the one that has taken over."""

import logging
import threading
from collections.abc import Callable

from dpipe.errors import CheckpointError
from dpipe.terms.storing import TermStore, TermStoreError

LOG = logging.getLogger("dpipe")
_EVERY_S = 1.0
_THREAD_S = 5.0


class HolderSearch:
    """A thread from `start` until `close`. Where `is_silent()`, the newest holder's address is read
    at the URL, and given to `move`, where its term is newer than the one that was there before.
    """

    def __init__(
        self, store: TermStore, is_silent: Callable[[], bool], move: Callable[[str], None]
    ) -> None:
        self._store = store
        self._is_silent = is_silent
        self._move = move
        self._term: int | None = None  # in which the coordinator was heard
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._search, name="holder search", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(_THREAD_S)

    def _search(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            try:
                self._look()
            except (TermStoreError, CheckpointError) as error:
                if self._is_silent():
                    LOG.warning("cannot look for another coordinator: %s", error)

    def _look(self) -> None:
        if self._is_silent():
            self._find()
        elif self._term is None:
            self._term = self._store.newest()

    def _find(self) -> None:
        number = self._store.newest()
        if number <= (self._term or 0):
            return
        beat = self._store.beat(number)
        if beat is not None:
            self._term = number
            LOG.warning("the run is coordinated at %s now (term %d)", beat.address, number)
            self._move(beat.address)
