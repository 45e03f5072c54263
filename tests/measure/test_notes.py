import socket
from collections.abc import Iterator

import pytest

from dpipe.errors import TransferError
from dpipe.measure.notes import Note, NoteKind, Notes, decode


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


def test_notes_are_decoded_however_they_are_cut() -> None:
    sent = [Note(NoteKind.PING, 7), Note(NoteKind.DONE, 2**64 - 1), Note(NoteKind.GOT, 0)]
    data = b"".join(note.encode() for note in sent)
    assert len(data) == 27
    taken: list[Note] = []
    rest = b""
    for byte in data:
        notes, rest = decode(rest + bytes([byte]))
        taken += notes
    assert taken == sent
    assert rest == b""


def test_note_of_no_kind_is_refused() -> None:
    with pytest.raises(TransferError, match="a note of kind 9 came, which dpipe does not send"):
        decode(b"\x09" + bytes(8))


def test_nothing_has_come_yet(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = map(Notes, ends)
    assert ours.take() == []
    theirs.send(NoteKind.PONG, 3)
    assert ours.take() == [Note(NoteKind.PONG, 3)]


def test_end_of_the_connection_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    notes = Notes(ends[0])
    ends[1].close()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        notes.take()


def test_peer_that_does_not_read_is_an_error(ends: tuple[socket.socket, socket.socket]) -> None:
    notes = Notes(ends[0])

    def ping_on_and_on() -> None:
        for number in range(10_000_000):
            notes.send(NoteKind.PING, number)

    with pytest.raises(OSError):  # noqa: PT011 - the kernel's words, or ours where half a note fits
        ping_on_and_on()


def test_half_a_note_in_a_full_buffer_is_an_error() -> None:
    class Full(socket.socket):
        def send(self, *_: object) -> int:
            return 4

    with Full() as sock, pytest.raises(BrokenPipeError, match="does not read what it is sent"):
        Notes(sock).send(NoteKind.PING, 1)
