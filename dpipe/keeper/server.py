"""`KeeperServer`: answers who knows the token, each connection in a thread of its own."""

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import BoundedSemaphore, Event, Lock, Thread
from typing import Protocol

from dpipe.errors import DpipeError, TransferError
from dpipe.keeper.copies import PieceCopy
from dpipe.keeper.messages import REQUEST, Answer, Offered, Refused, Request, Wanted
from dpipe.session import greeting
from dpipe.session.listen import open_listener
from dpipe.session.stream import Tls, shut, tune
from dpipe.wire.message import PREFIX_BYTES, framed, framed_size
from dpipe.wire.rpc import Security

PROTOCOL = 3
GREETING_S = 10.0
SILENCE_S = 40.0  # of a transfer without a byte; and of a connection that asks nothing
CHUNK_BYTES = 1 << 20
_CONNECTIONS = 64  # at once; who dials beyond them waits in the kernel
_WAKE_S = 1.0
_STOP_S = 5.0


class CopyStore(Protocol):
    """What is served: a `Keeper`. Each method may raise `Refused`."""

    def give(self, wanted: Wanted) -> PieceCopy: ...

    def has(self, offered: Offered) -> bool: ...

    def make_room(self, offered: Offered) -> None: ...

    def take(self, offered: Offered, content: bytes | None) -> None: ...


class KeeperServer:
    """Listens from the constructor until `close`. Raises `JoinError` if it cannot."""

    def __init__(self, store: CopyStore, security: Security, bind: str, port: int) -> None:
        self._store = store
        self._security = security
        self._tls = Tls(security) if security.tls else None
        self._places = BoundedSemaphore(_CONNECTIONS)
        self._closing = Event()
        self._lock = Lock()  # guards the open sockets and their threads
        self._sockets: set[socket.socket] = set()
        self._threads: set[Thread] = set()
        self._listener = open_listener(bind, port)
        self.port = int(self._listener.getsockname()[1])
        self._acceptor = Thread(target=self._accept, name="keeper accepts", daemon=True)
        self._acceptor.start()

    def close(self) -> None:
        """End all connections. Safe to call twice."""
        self._closing.set()
        shut(self._listener)  # wakes the thread in `accept`; a close would not
        self._acceptor.join(_STOP_S)
        self._listener.close()
        with self._lock:
            for sock in self._sockets:
                shut(sock)
            threads = tuple(self._threads)
        for thread in threads:
            thread.join(_STOP_S)

    def _accept(self) -> None:
        while not self._closing.is_set():
            if not self._places.acquire(timeout=_WAKE_S):
                continue
            try:
                raw, _ = self._listener.accept()
            except OSError:  # nobody dialled, out of sockets, or this end is closing
                self._places.release()
                self._closing.wait(0.1)  # out of sockets it would fail again at once
                continue
            thread = Thread(target=self._serve, args=(raw,), name="keeper serves", daemon=True)
            with self._lock:
                self._threads = {other for other in self._threads if other.is_alive()}
                self._threads.add(thread)
                thread.start()

    def _serve(self, raw: socket.socket) -> None:
        try:
            with self._admitted(raw) as sock:
                while not self._closing.is_set():
                    sock.settimeout(SILENCE_S)
                    self._answer(sock, _request(sock))
        except (OSError, ValueError, DpipeError):
            pass  # a stranger, or one that has left; told so where it greeted
        finally:
            self._places.release()

    @contextmanager
    def _admitted(self, raw: socket.socket) -> Iterator[socket.socket]:
        """`raw`, with TLS where it is on, of somebody who knows the token."""
        deadline = time.monotonic() + GREETING_S
        sock = raw
        with self._lock:
            self._sockets.add(raw)
        try:
            tune(raw, SILENCE_S, SILENCE_S)
            if self._tls is not None:
                sock = self._tls.wrap(raw, server=True)
                with self._lock:
                    self._sockets.add(sock)
            if isinstance(sock, ssl.SSLSocket):
                greeting.set_deadline(sock, deadline)
                sock.do_handshake()
            dialler = greeting.answer(
                sock,
                lambda hello: tuple(token.encode() for token in self._security.tokens()),
                deadline,
            )
            if dialler.hello.protocol != PROTOCOL:
                reason = f"keeper protocol {dialler.hello.protocol}, here it is {PROTOCOL}"
                greeting.refuse(sock, f"{reason}: install one dpipe version everywhere", deadline)
                raise TransferError(reason)
            greeting.welcome(sock, dialler, deadline)
            yield sock
        finally:
            with self._lock:
                self._sockets -= {raw, sock}
            sock.close()

    def _answer(self, sock: socket.socket, request: Request) -> None:
        try:
            if request.get is not None:
                self._send(sock, self._store.give(request.get))
            elif request.put is not None:
                self._receive(sock, request.put)
            else:
                raise Refused("the request asks nothing")
        except Refused as refusal:
            _say(sock, Answer(refusal=str(refusal)))

    def _send(self, sock: socket.socket, copy: PieceCopy) -> None:
        _say(sock, Answer(size=len(copy.content), digest=copy.digest))
        view = memoryview(copy.content)
        # In chunks: the time limit of a socket is for one call.
        for start in range(0, len(view), CHUNK_BYTES):
            sock.sendall(view[start : start + CHUNK_BYTES])

    def _receive(self, sock: socket.socket, offered: Offered) -> None:
        if self._store.has(offered):
            _say(sock, Answer(held=True))
            return
        self._store.make_room(offered)
        content = None
        try:
            _say(sock, Answer())
            content = read_exactly(sock, offered.size)
        finally:
            self._store.take(offered, content)
        _say(sock, Answer())


def _request(sock: socket.socket) -> Request:
    return REQUEST.read(read_framed(sock))


def _say(sock: socket.socket, answer: Answer) -> None:
    sock.sendall(framed(answer.model_dump_json().encode()))


def read_framed(sock: socket.socket) -> bytes:
    size = framed_size(read_exactly(sock, PREFIX_BYTES))
    return read_exactly(sock, size)


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes:
    """Raises `ConnectionError` where the other end closes before, and `TimeoutError` where a chunk
    takes longer than `SILENCE_S`: a byte now and then is no transfer.
    """
    content = bytearray(num_bytes)
    view = memoryview(content)
    chunk_ends = len(view)
    deadline = 0.0
    while view:
        now = time.monotonic()
        if len(view) <= chunk_ends:
            chunk_ends = max(0, len(view) - CHUNK_BYTES)
            deadline = now + SILENCE_S
        elif now > deadline:
            raise TimeoutError(f"{CHUNK_BYTES} bytes took longer than {SILENCE_S:g} s")
        got = sock.recv_into(view[:CHUNK_BYTES])
        if not got:
            raise ConnectionError("it closed the connection")
        view = view[got:]
    return bytes(content)
