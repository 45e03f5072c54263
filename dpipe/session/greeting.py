"""How the two ends of a TCP connection prove that they know a secret, before anything else.

    rank 1 (dials)                                     rank 2
    hello, challenge 1  ----------------------------->
                        <-----------------------------  challenge 2
    HMAC(secret, "dials" | challenges | hello)  ----->  right? and is this rank waited for?
    right?              <-----------------------------  state, HMAC(secret, "answers" | challenges |
                                                        hello | state), or why not
    heard               ----------------------------->  (of a session that goes on) go on

The secret of a first connection is the token. It gives the two ends a new one, HMAC(token, "again"
| challenges | hello), which every later connection of the same session must prove: whoever knows
the token, another rank of the run, cannot take a link over, and nobody can take it into another
run. The state is what the dialled end has received; the dialler's is in its hello.

No secret is ever sent, and a proof holds for one connection only. The dialler proves itself first,
so that a stranger learns nothing. Without TLS this keeps strangers out, but not somebody on the
path who changes bytes afterwards.

A session goes on once the dialler has heard the state. Were it behind the state on the connection,
TCP could send both again in one large packet, and a path that loses those would lose the state too.
"""

import hmac
import secrets
import socket
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from dpipe.errors import JoinError, TransferError
from dpipe.wire.message import PREFIX_BYTES, framed, framed_size
from dpipe.wire.text import visible
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

_CHALLENGE_BYTES = 32  # random: no proof fits a second connection
_REFUSED = "wrong token: node.token must be the same on every rank"
NOT_THE_SAME = "this is not the end that opened this link, or not the same run"
_NEW = Greeting()


@dataclass(frozen=True)
class Greeted:
    """Who is at the other end; it has proved it. `secret` is for the next connection."""

    hello: Hello
    secret: bytes
    received: int = 0  # bytes that have arrived at the dialled end
    stalled: bool = False


@dataclass(frozen=True)
class Dialler:
    """Who dialled; it has proved it, and waits to be let in."""

    hello: Hello
    secret: bytes
    challenges: bytes

    def is_proved_by(self, proof: bytes) -> bool:
        return hmac.compare_digest(proof, _proof(self.secret, "dials", self.challenges, self.hello))

    @property
    def next_secret(self) -> bytes:
        return _proof(self.secret, "again", self.challenges, self.hello)


def call(sock: socket.socket, hello: Hello, secret: bytes, deadline: float) -> Greeted:
    """Greet as the end that dialled. Raises `JoinError` where the other end refuses, and
    `TransferError` where it is not dpipe.
    """
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    _send(sock, Greeting(hello=hello, challenge=ours), deadline)
    dialler = Dialler(hello, secret, ours + _challenge(_receive(sock, deadline)))
    proof = _proof(secret, "dials", dialler.challenges, hello)
    _send(sock, Greeting(proof=proof), deadline)
    answer = _receive(sock, deadline)
    if answer.refusal:
        raise JoinError(visible(answer.refusal))
    if not hmac.compare_digest(answer.proof, _answer_proof(dialler, answer)):
        raise TransferError("its proof that it knows the token is wrong")
    return Greeted(hello, dialler.next_secret, answer.received, answer.stalled)


def answer(
    sock: socket.socket, secrets_for: Callable[[Hello], tuple[bytes, ...]], deadline: float
) -> Dialler:
    """Greet as the end that was dialled. Each secret is tried, so that the time tells nothing.
    Raises `TransferError` for a stranger, after telling it so if it greets at all.
    """
    greeting = _receive(sock, deadline)
    hello = greeting.hello
    ours = secrets.token_bytes(_CHALLENGE_BYTES)
    theirs = _challenge(greeting)
    _send(sock, Greeting(challenge=ours), deadline)
    shown = _receive(sock, deadline).proof
    diallers = [Dialler(hello, secret, theirs + ours) for secret in secrets_for(hello)]
    fitting = [dialler for dialler in diallers if dialler.is_proved_by(shown)]
    if not fitting:
        refusal = NOT_THE_SAME if hello.resumes else _REFUSED
        refuse(sock, refusal, deadline)
        raise TransferError(refusal)
    return fitting[0]


def welcome(sock: socket.socket, dialler: Dialler, deadline: float, state: Greeting = _NEW) -> None:
    """Let the dialler in. `state` says what has arrived here."""
    proof = _answer_proof(dialler, state)
    _send(sock, Greeting(proof=proof, received=state.received, stalled=state.stalled), deadline)


def confirm(sock: socket.socket, deadline: float) -> None:
    """Say, as the end that dialled, that the state was heard."""
    _send(sock, Greeting(), deadline)


def await_confirmation(sock: socket.socket, deadline: float) -> None:
    """Raises `ConnectionError` where the dialler has left."""
    _receive(sock, deadline)


def refuse(sock: socket.socket, reason: str, deadline: float) -> None:
    _send(sock, Greeting(refusal=reason), deadline)


def _answer_proof(dialler: Dialler, state: Greeting) -> bytes:
    said = struct.pack(">Q?", state.received, state.stalled)
    return _proof(dialler.secret, "answers", dialler.challenges + said, dialler.hello)


def _proof(secret: bytes, role: str, fixed: bytes, hello: Hello) -> bytes:
    """`fixed` begins with the challenges, the dialler's first; its length follows from `role`."""
    said = hello.SerializeToString(deterministic=True)
    # Unambiguous: `role` fixes the lengths of all parts but the last.
    message = b"|".join((b"dpipe", role.encode(), fixed, said))
    return hmac.digest(secret, message, "sha256")


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
