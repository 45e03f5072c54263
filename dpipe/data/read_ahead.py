"""Items that a thread makes before they are asked for.

thread    make 5   make 6   make 7 .. wait: `most` are ready
              │ queue
caller    3   4   5 ..
"""

from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from queue import Empty, Full, Queue
from threading import Event, Thread, current_thread
from typing import Any, TypeVar

Item = TypeVar("Item")

_POLL_S = 0.1
_CLOSE_S = 5.0  # what reads over a network may not hear at once that it shall end
_END = object()


class _Failure:
    """What making the next item raised."""

    def __init__(self, error: Exception) -> None:
        self.error = error


def read_ahead(items: Generator[Item, None, None], most: int) -> Iterator[Item]:
    """`items`, in order, up to `most` of which are made before they are asked for; what making one
    raises is raised in its place. The thread begins with the first that is asked for, and ends with
    this iterator: at the last item, or when it is closed or dropped.
    """
    ready: Queue[Any] = Queue(most)
    stopped = Event()
    thread = Thread(target=_make, args=(items, ready, stopped), name="read ahead", daemon=True)
    thread.start()
    try:
        while (item := _next(ready, thread)) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item
    finally:
        stopped.set()
        # A circle of objects may be collected in any thread.
        if thread is not current_thread():
            thread.join(_CLOSE_S)


def _make(items: Generator[Any, None, None], ready: Queue[Any], stopped: Event) -> None:
    last: object = _END
    with closing(items):
        try:
            for item in items:
                _put(item, ready, stopped)
                if stopped.is_set():
                    return
        except Exception as error:  # the caller's, whatever it is
            last = _Failure(error)
    _put(last, ready, stopped)


def _put(item: object, ready: Queue[Any], stopped: Event) -> None:
    while not stopped.is_set():
        with suppress(Full):
            ready.put(item, timeout=_POLL_S)
            return


def _next(ready: Queue[Any], thread: Thread) -> Any:
    while True:
        try:
            return ready.get(timeout=_POLL_S)
        except Empty:
            assert thread.is_alive() or not ready.empty(), "it puts its end before it ends"
