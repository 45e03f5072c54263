"""Ending an epoch from outside, by any thread."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Lock

from dpipe.errors import RunAborted


class EpochControl:
    """`stop` ends an epoch after the step under way, on all ranks after the same one; `abort` ends
    this rank's part of it now. Either may come before it begins.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._stop = Event()
        self._error: RunAborted | None = None
        self._cancels: dict[object, Callable[[RunAborted], None]] = {}

    def stop(self) -> None:
        self._stop.set()

    def wants_stop(self) -> bool:
        return self._stop.is_set()

    def abort(self, reason: str) -> None:
        """Every wait of the epoch raises `RunAborted(reason)`. The first reason stays."""
        with self._lock:
            if self._error is not None:
                return
            self._error = RunAborted(reason)
            cancels = list(self._cancels.values())
        # Outside the lock: what is cancelled may come back to this object.
        for cancel in cancels:
            cancel(self._error)

    def on_abort(self, key: object, cancel: Callable[[RunAborted], None]) -> None:
        """Call `cancel` once it is aborted, in the place of an earlier one of this key. Raises what
        it was aborted with, if it was.
        """
        with self._lock:
            if self._error is not None:
                raise self._error
            self._cancels[key] = cancel

    @contextmanager
    def watched(self) -> Iterator[None]:
        """An epoch runs inside. Raises what it was aborted with, if it was."""
        try:
            with self._lock:
                if self._error is not None:
                    raise self._error
            yield
        finally:
            with self._lock:
                self._cancels.clear()
