"""Two ends of a socket prove that they know the token, or fail to."""

import socket
import threading
import time
from collections.abc import Callable

import pytest

from dpipe.errors import JoinError, TransferError
from dpipe.session import greeting
from dpipe.wire.v1.transport_pb2 import Hello


def hello(from_rank: int = 0) -> Hello:
    return Hello(protocol=1, from_rank=from_rank, to_rank=1, num_connections=1)


def soon() -> float:
    return time.monotonic() + 5


def knows(*secrets: bytes) -> Callable[[Hello], tuple[bytes, ...]]:
    return lambda _: secrets


class Tap:
    """A socket that keeps what is sent on it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.settimeout, self.recv = sock.settimeout, sock.recv
        self.sent: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.sent.append(data)
        self.sock.sendall(data)


def test_token_does_not_cross_the_wire() -> None:
    here, there = map(Tap, socket.socketpair())

    def answer() -> None:
        greeting.welcome(there, greeting.answer(there, knows(b"secret"), soon()), soon())

    with here.sock, there.sock:
        thread = threading.Thread(target=answer)
        thread.start()
        greeting.call(here, hello(), b"secret", soon())
        thread.join(5)
    assert (len(here.sent), len(there.sent)) == (2, 2)
    assert not any(b"secret" in data for data in here.sent + there.sent)


def test_proof_cannot_be_used_for_another_hello_or_role() -> None:
    challenges = bytes(32), bytes(range(32))
    proofs = {
        greeting._proof(b"token", role, first + second, said)
        for role in ("dials", "answers", "again")
        for first, second in (challenges, challenges[::-1])
        for said in (hello(), hello(from_rank=2))
    }
    assert len(proofs) == 12


def test_caller_with_another_token_is_refused_with_an_error() -> None:
    here, there = socket.socketpair()
    raised: list[str] = []

    def answer() -> None:
        try:
            greeting.answer(there, knows(b"secret"), soon())
        except TransferError as error:
            raised.append(str(error))

    with here, there:
        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(JoinError, match="wrong token: node.token must be the same"):
            greeting.call(here, hello(), b"guess", soon())
        thread.join(5)
    assert raised == ["wrong token: node.token must be the same on every rank"]


def test_deadline_that_has_passed_raises_timeout() -> None:
    here, there = socket.socketpair()
    with here, there, pytest.raises(TimeoutError):
        greeting.answer(here, knows(b""), time.monotonic() - 1)
