"""`HolderSearch`: how a machine whose coordinator is silent finds the one that has taken over."""

import logging
import threading
from typing import Protocol

from dpipe.errors import CheckpointError
from dpipe.terms.storing import TermStore, TermStoreError

LOG = logging.getLogger("dpipe")
_EVERY_S = 1.0
_THREAD_S = 5.0


class Follower(Protocol):
    """Whose coordinator may be silent."""

    @property
    def term(self) -> int | None:
        """Of the coordinator that it heard last, as that one said it: what is at the URL then may
        be a later one. 0 before it heard any; None where no other can take over.
        """

    @property
    def is_unanswered(self) -> bool:
        """Whether the coordinator is silent."""

    def move(self, address: str) -> None:
        """Another one listens there."""


class HolderSearch:
    """A thread from `start` until `close`. Where the coordinator is silent, the newest holder's
    address is read at the URL, and the follower moves there, once, if its term is a later one.
    """

    def __init__(self, store: TermStore, follower: Follower) -> None:
        self._store = store
        self._follower = follower
        self._found = 0  # the newest term that the follower was moved to
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._search, name="holder search", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(_THREAD_S)

    def _search(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            term = self._follower.term
            if term is None or not self._follower.is_unanswered:
                continue
            try:
                self._find(max(term, self._found))
            except (TermStoreError, CheckpointError) as error:
                LOG.warning("cannot look for another coordinator: %s", error)

    def _find(self, known: int) -> None:
        number = self._store.newest()
        if number <= known:
            return
        beat = self._store.beat(number)
        if beat is not None:
            self._found = number
            LOG.warning("the run is coordinated at %s now (term %d)", beat.address, number)
            self._follower.move(beat.address)
