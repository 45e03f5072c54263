"""SIGINT and SIGTERM: a rank stops after its step, with a checkpoint; a server stops at once."""

import logging
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

LOG = logging.getLogger("dpipe")
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def stop_on_signals(
    then: str = "stopping after this step, with a checkpoint",
) -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether a signal came; on the first the log says `then`. A second
    one does not wait: it raises `KeyboardInterrupt`.

    Outside the main thread, to which Python delivers no signals, the function is always False.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked.is_set
        return

    def ask(signum: int, frame: FrameType | None) -> None:
        # Asked twice: the step may be waiting for a peer that is gone.
        if asked.is_set():
            raise KeyboardInterrupt
        asked.set()
        LOG.warning("%s: %s", signal.Signals(signum).name, then)

    before = {number: signal.signal(number, ask) for number in _SIGNALS}
    try:
        yield asked.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
