"""Whether a process whose connection broke is still there: one that ended takes no connections, and
where its host lives, the host says so at once.
"""

import socket
import threading
import time
from collections.abc import Callable

_KNOCK_S = 2.0  # for a host to answer: half a second and more away, behind a busy link
_BETWEEN_S = 0.1
_REFUSALS = 2  # in a row: one may be of a listener that is full


def is_refused(address: str) -> bool:
    """Whether the host answers that nobody listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S):
            return False
    except ConnectionRefusedError:
        return True
    except (OSError, ValueError, OverflowError):
        return False


def watch(address: str, gone: Callable[[], None], is_settled: Callable[[], bool]) -> None:
    """In a thread: call `gone` once nobody listens at `address` any more, unless `is_settled()`
    before.
    """

    def look() -> None:
        refusals = 0
        while refusals < _REFUSALS:
            time.sleep(_BETWEEN_S)
            if is_settled():
                return
            refusals = refusals + 1 if is_refused(address) else 0
        gone()

    threading.Thread(target=look, name=f"knocking at {address}", daemon=True).start()
