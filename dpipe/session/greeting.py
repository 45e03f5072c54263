"""How the two ends of a TCP connection prove that they know the token, before anything else.

    rank 1 (dials)                                     rank 2
    hello, challenge 1  ---------------------------->
                        <----------------------------  challenge 2
    HMAC(token, "dials" | challenges | hello)  ----->  right? and is this rank waited for?
    right?              <----------------------------  HMAC(token, "answers" | challenges | hello),
                                                       or why not

The token is never sent; a proof holds for one connection. The dialler proves itself first: a
stranger learns nothing. Without TLS, somebody on the path can still change bytes afterwards.
"""

import hmac
import secrets
import socket
import time
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from dpipe.errors import JoinError, TransferError
from dpipe.wire.message import PREFIX_BYTES, framed, framed_size
from dpipe.wire.text import visible
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

_CHALLENGE_BYTES = 32  # random: no proof fits a second connection
_REFUSED = "wrong token: node.token must be the same on every rank"


@dataclass(frozen=True)
class Dialler:
    """Who dialled; it has proved that it knows the token. `proof` is what it waits for."""

    hello: Hello
    proof: bytes


def call(sock: socket.socket, hello: Hello, token: str, deadline: float) -> None:
    """Greet as the end that dialled. Raises `JoinError` where the other end refuses, and
    `TransferError` where it is not dpipe.
    """
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    _send(sock, Greeting(hello=hello, challenge=ours), deadline)
    theirs = _challenge(_receive(sock, deadline))
    _send(sock, Greeting(proof=_proof(token, "dials", ours, theirs, hello)), deadline)
    answer = _receive(sock, deadline)
    if answer.refusal:
        raise JoinError(visible(answer.refusal))
    if not hmac.compare_digest(answer.proof, _proof(token, "answers", ours, theirs, hello)):
        raise TransferError("its proof that it knows the token is wrong")


def answer(sock: socket.socket, tokens: tuple[str, ...], deadline: float) -> Dialler:
    """Greet as the end that was dialled. Each of `tokens` is tried, so that the time tells nothing.
    Raises `TransferError` for a stranger, after telling it so if it greets at all.
    """
    greeting = _receive(sock, deadline)
    hello = greeting.hello
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    said = _challenge(greeting), ours, hello
    _send(sock, Greeting(challenge=ours), deadline)
    shown = _receive(sock, deadline).proof
    fitting = [t for t in tokens if hmac.compare_digest(shown, _proof(t, "dials", *said))]
    if not fitting:
        refuse(sock, _REFUSED, deadline)
        raise TransferError(_REFUSED)
    return Dialler(hello, _proof(fitting[0], "answers", *said))


def welcome(sock: socket.socket, dialler: Dialler, deadline: float) -> None:
    _send(sock, Greeting(proof=dialler.proof), deadline)


def refuse(sock: socket.socket, reason: str, deadline: float) -> None:
    _send(sock, Greeting(refusal=reason), deadline)


def _proof(token: str, role: str, first: bytes, second: bytes, hello: Hello) -> bytes:
    """`first` is the challenge of the end that dialled."""
    said = hello.SerializeToString(deterministic=True)
    # Unambiguous: `role` fixes the lengths of all parts but the last.
    message = b"|".join((b"dpipe", role.encode(), first + second, said))
    return hmac.digest(token.encode(), message, "sha256")


def _challenge(greeting: Greeting) -> bytes:
    if len(greeting.challenge) != _CHALLENGE_BYTES:
        raise TransferError("it does not greet as a dpipe transport")
    return greeting.challenge


def _send(sock: socket.socket, greeting: Greeting, deadline: float) -> None:
    set_deadline(sock, deadline)
    sock.sendall(framed(greeting.SerializeToString()))


def _receive(sock: socket.socket, deadline: float) -> Greeting:
    size = framed_size(_read(sock, PREFIX_BYTES, deadline))
    message = _read(sock, size, deadline)
    try:
        return Greeting.FromString(message)
    except DecodeError:
        raise TransferError("it does not greet as a dpipe transport") from None


def _read(sock: socket.socket, num_bytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < num_bytes:
        set_deadline(sock, deadline)
        part = sock.recv(num_bytes - len(data))
        if not part:
            raise ConnectionError("it closed the connection")
        data += part
    return data


def set_deadline(sock: socket.socket, deadline: float) -> None:
    """Let `sock` wait until `deadline` and no longer, however slowly bytes come. Raises
    `TimeoutError` where it has passed.
    """
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    sock.settimeout(left_s)
