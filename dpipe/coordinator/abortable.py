"""What nothing can interrupt, such as a wait inside torch, given up where the run is over."""

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import Thread
from typing import TypeVar

from dpipe.coordinator.base import Coordination
from dpipe.errors import RunAborted

T = TypeVar("T")
_POLL_S = 0.1


def unless_over(coordinator: Coordination, call: Callable[[], T]) -> T:
    """What `call` returns or raises, in a thread of its own. Raises what the run is aborted with
    meanwhile; the thread is left to end by itself, and what it returns is dropped.
    """
    over: list[RunAborted] = []
    coordinator.on_abort(over.append)
    result: Future[T] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    Thread(target=run, name="a call that nothing interrupts", daemon=True).start()
    while not over:
        wait([result], _POLL_S)
        if result.done():
            return result.result()
    raise over[0]
