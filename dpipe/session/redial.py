"""Opening another connection in the place of one that broke."""

import time
from collections.abc import Callable
from threading import Event

from dpipe.errors import DpipeError
from dpipe.session.session import LinkSession

GREETING_S = 5.0  # for either end to say who it is
_FIRST_PAUSE_S = 0.02  # between attempts
_PAUSE_S = 1.0


def dial_again(
    session: LinkSession, resume: Callable[[], bool], stopping: Event, gone_s: float
) -> bool:
    """Try until a connection has taken the place of the broken one, or it is too late. Returns
    whether one has; what the last one has lost is then to be sent again.

    `resume` says whether it went on; it raises `OSError` where nobody could be reached, and
    `DpipeError` where the other end refuses. A host that refuses connections for `gone_s` lives,
    and the process is gone.
    """
    broke_at = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while session.awaits_another() and not stopping.is_set():
        try:
            if resume():
                return True
        except (OSError, ValueError) as error:
            refused = isinstance(error, ConnectionRefusedError)
            if refused and time.monotonic() - broke_at > gone_s:
                session.close(f"{session.why}, and nothing listens there any more")
            stopping.wait(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_S)
        except DpipeError as refusal:
            session.close(f"{session.why}; dialled again, it says: {refusal}")
    return False
