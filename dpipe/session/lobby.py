"""Who has dialled, or is being dialled, and has not greeted yet."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, Thread


class Lobby:
    """Who has not greeted yet, with a thread each."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards what is below
        self._waiting: set[Callable[[], None]] = set()  # what wakes them
        self._threads: list[Thread] = []
        self._closed = False

    def spawn(self, run: Callable[[], None], name: str) -> None:
        thread = Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
            thread.start()  # under the lock: one that has not started cannot be joined

    @contextmanager
    def watching(self, wake: Callable[[], None]) -> Iterator[None]:
        """Inside, a thread that waits is woken with `wake` when the lobby closes."""
        with self._lock:
            self._waiting.add(wake)
            if self._closed:
                wake()
        try:
            yield
        finally:
            with self._lock:
                self._waiting.discard(wake)

    def close(self, deadline: float) -> None:
        with self._lock:
            self._closed = True
            for wake in self._waiting:
                wake()
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
