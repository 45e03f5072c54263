"""What the kernel knows of TCP connections, together."""

import fcntl
import socket
import termios
from collections.abc import Iterable
from typing import NamedTuple

from dpipe.session.window import tcp_info


class Counts(NamedTuple):
    """Of some connections together, since each was opened."""

    acked_bytes: int
    segments: int  # sent, the repeated ones too
    lost: int  # of them, as far as the sender can tell


def counts(sockets: Iterable[socket.socket]) -> Counts:
    total = Counts(0, 0, 0)
    for info in map(tcp_info, sockets):
        total = Counts(
            total.acked_bytes + info.acknowledged_bytes,
            total.segments + info.sent,
            total.lost + info.lost,
        )
    return total


def queued_bytes(sock: socket.socket) -> int:
    """What was written and is not acknowledged yet, sent or not."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, "little")
