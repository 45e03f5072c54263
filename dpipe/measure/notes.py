"""What the two ends of a pair say to each other while they measure: nine bytes a note.

    kind  value (8 bytes)
    PING  a number            PONG with the same number comes back
    DONE  bytes that were sent in this stream; no more follow
    GOT   bytes that have arrived, all of them
    HAVE  bytes that have arrived so far, over a link that is relayed

They go on a connection of their own, so that no stream of bytes is in their way.
"""

import socket
import ssl
import struct
from enum import IntEnum
from typing import NamedTuple

from dpipe.errors import TransferError

NOT_YET = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_FORMAT = struct.Struct(">BQ")
_MOST_BYTES = 4096  # that are read at once


class NoteKind(IntEnum):
    PING = 1
    PONG = 2
    DONE = 3
    GOT = 4
    HAVE = 5


_KINDS = frozenset(map(int, NoteKind))


class Note(NamedTuple):
    kind: NoteKind
    value: int

    def encode(self) -> bytes:
        return _FORMAT.pack(self.kind, self.value)


def decode(data: bytes) -> tuple[list[Note], bytes]:
    """The whole notes in `data`, and the bytes of one that has not come whole. Raises
    `TransferError` for a kind that is none.
    """
    whole = len(data) - len(data) % _FORMAT.size
    notes = []
    for kind, value in _FORMAT.iter_unpack(data[:whole]):
        if kind not in _KINDS:
            raise TransferError(f"a note of kind {kind} came, which dpipe does not send")
        notes.append(Note(NoteKind(kind), value))
    return notes, data[whole:]


class Notes:
    """One end of a connection for notes. It never waits."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._begun = b""  # of a note that has not come whole

    def send(self, kind: NoteKind, value: int) -> None:
        """Raises `OSError` where the other end has not read for long."""
        # A note that does not fit into the buffer is thousands behind those that do.
        if self.socket.send(Note(kind, value).encode()) != _FORMAT.size:
            raise BrokenPipeError("it does not read what it is sent")

    def take(self) -> list[Note]:
        """What has come. Raises `OSError` at the end of the connection."""
        try:
            data = self.socket.recv(_MOST_BYTES)
        except NOT_YET:
            return []
        if not data:
            raise ConnectionError("it closed the connection")
        notes, self._begun = decode(self._begun + data)
        return notes
