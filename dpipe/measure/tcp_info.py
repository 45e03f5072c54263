"""What the kernel knows of its TCP connections: `struct tcp_info` of linux/tcp.h."""

import fcntl
import socket
import struct
import termios
from collections.abc import Iterable
from typing import NamedTuple

_BYTES = 256  # that are asked for; an older kernel gives fewer
# Offsets in the struct, which only grows.
_TOTAL_RETRANS = 100
_BYTES_ACKED = 120
_DATA_SEGS_OUT = 156
_DSACK_DUPS = 216


class Counts(NamedTuple):
    """Of some connections together, since each was opened."""

    acked_bytes: int
    segments: int  # sent, the repeated ones too
    lost: int  # of them, as far as the sender can tell


def counts(sockets: Iterable[socket.socket]) -> Counts:
    total = Counts(0, 0, 0)
    for sock in sockets:
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES).ljust(_BYTES, b"\0")
        repeated = _int(info, _TOTAL_RETRANS)
        # The receiver had some of them twice: they were late and not lost.
        in_vain = _int(info, _DSACK_DUPS)
        (acked,) = struct.unpack_from("Q", info, _BYTES_ACKED)
        total = Counts(
            total.acked_bytes + acked,
            total.segments + _int(info, _DATA_SEGS_OUT),
            total.lost + max(0, repeated - in_vain),
        )
    return total


def queued_bytes(sock: socket.socket) -> int:
    """What was written and is not acknowledged yet, sent or not."""
    answer = fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))
    return int.from_bytes(answer, "little")


def _int(info: bytes, offset: int) -> int:
    (value,) = struct.unpack_from("I", info, offset)
    return int(value)
