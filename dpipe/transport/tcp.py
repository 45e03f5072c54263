"""A mesh of TCP or TLS connections between processes: the fastest where nothing asks for HTTP/2.

    rank 1 (lower: dials)                            rank 2
    send --> queue 0 --> writer 0 --> socket 0 ====> reader 0 --> stripe 0 of the tensor --.
         `-> queue 1 --> writer 1 --> socket 1 ====> reader 1 --> stripe 1 of the tensor ----> recv
    recv <-- both readers <-------- both sockets <== both writers <-- both queues <-- send

Bytes go from the tensor's memory into the kernel, and from there into the memory of the tensor that
`recv` gives; Python copies none. Each connection has two threads, and one while it is opened. One
that breaks is dialled again by the end that dialled it: see session/session.py.
"""

import itertools
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import BoundedSemaphore, Event, Lock, Thread

from dpipe.errors import DpipeError, JoinError, TransferError, TransferTimeout
from dpipe.session import greeting
from dpipe.session.dial import dial, smaller
from dpipe.session.frames import Frames
from dpipe.session.session import LinkSession, reason_of
from dpipe.session.stream import Tls, shut, stream_over, tune
from dpipe.transport.link import LinkEnd
from dpipe.transport.mesh import CHECK, MAX_LINKS, WAKE_S, Connection, Mesh
from dpipe.wire.message import PREFIX_BYTES, Header, framed, framed_size
from dpipe.wire.rpc import Security
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

LOG = logging.getLogger("dpipe")
_GREETING_S = 5.0  # for a dialler to say who it is
_ACCEPT_S = 1.0  # poll interval of the thread that accepts
_FIRST_PAUSE_S = 0.02  # between attempts to dial again
_PAUSE_S = 1.0
_WATCHES = 160  # looks at each connection in `heartbeat_s`, in which it is to be heard 32 times
_END = bytes(PREFIX_BYTES)  # a header of no bytes: no more tensors


class TcpConnection(Connection):
    """A session over TCP or TLS, with a thread that writes and one that reads."""

    def __init__(
        self, end: LinkEnd, index: int, num_connections: int, chunk_bytes: int, heartbeat_s: float
    ) -> None:
        super().__init__(end, index, num_connections, chunk_bytes)
        self.session = LinkSession(
            heartbeat_s, may_resume=self._may_resume, on_break=lambda: self.on_break()
        )
        self.on_break: Callable[[], None] = lambda: None  # of the end that dials
        self.segment: int | None = None  # bytes; None for what the path takes
        self._threads: list[Thread] = []

    def start(self, frames: Frames) -> None:
        self.session.attach(frames, 0, 0)
        for verb, run in (("read", self._read), ("write", self._write)):
            thread = Thread(target=run, name=f"dpipe-{verb}-{self.name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self.open()

    def cancel(self) -> None:
        self.enqueue(None)
        self.session.close()

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.session.release()

    def _may_resume(self) -> bool:
        return self.end.error is None and not self.end.closing

    def _write(self) -> None:
        try:
            while (sending := self.next_sending()) is not None:
                sending.begin()
                lead = framed(sending.header.encode())
                for chunk in self.chunks(sending):
                    sending.keep(self.session.write(lead, chunk))
                    lead = b""
                sending.end_stripe()
            # Said, because the kernel ends the stream of a process that dies as well.
            self.session.write(_END, memoryview(b""))
            self.session.end()
        except OSError as error:
            self.end.lose(f"the connection broke: {reason_of(error)}")
        except TransferTimeout:
            pass  # the device never gave the bytes; `begin` has broken the link

    def _read(self) -> None:
        session = self.session
        try:
            for sequence in itertools.count():
                header = self._read_header()
                if header is None:
                    return self.end.end_stream()
                arrived = None if self.end.closing else self.arrive(header, sequence)
                if arrived is None:
                    # To the peer's end of the stream: a socket that is closed with bytes unread
                    # resets the connection, and the peer loses what it was sent last.
                    session.skip()
                    return self.end.end_stream()
                receiving, stripe = arrived
                session.read(stripe)
                receiving.end_stripe()
        except OSError as error:
            self.end.lose(f"the connection broke: {reason_of(error)}")
        except Exception as error:  # this end found it wrong: wait() raises it
            self.end.break_off(error)

    def _read_header(self) -> Header | None:
        prefix = bytearray(PREFIX_BYTES)
        self.session.read(memoryview(prefix))
        if prefix == _END:
            return None
        message = bytearray(framed_size(bytes(prefix)))
        self.session.read(memoryview(message))
        return Header.decode(bytes(message))


class _Lobby:
    """Sockets that have not greeted yet, with a thread each."""

    def __init__(self) -> None:
        self._lock = Lock()  # guards what is below
        self._sockets: set[socket.socket] = set()
        self._threads: list[Thread] = []
        self._closed = False

    def spawn(self, run: Callable[[], None], name: str) -> None:
        thread = Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
            thread.start()  # under the lock: one that has not started cannot be joined

    @contextmanager
    def watching(self, sock: socket.socket) -> Iterator[None]:
        """Inside, a thread that waits on `sock` is woken when the lobby closes."""
        with self._lock:
            self._sockets.add(sock)
            if self._closed:
                shut(sock)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)

    def close(self, deadline: float) -> None:
        with self._lock:
            self._closed = True
            for sock in self._sockets:
                shut(sock)
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class TcpTransport(Mesh[TcpConnection]):
    """A mesh of TCP connections."""

    connection_type = TcpConnection

    def _new_connection(self, end: LinkEnd, index: int) -> TcpConnection:
        count = self._num_connections
        return TcpConnection(end, index, count, self._chunk_bytes, self._heartbeat_s)

    def _listen(self, bind: str, port: int, security: Security) -> int:
        self._security = security
        self._tls = Tls(security) if security.tls else None
        self._lobby = _Lobby()
        # Diallers that may be in the lobby at once.
        self._strangers = BoundedSemaphore(MAX_LINKS * self._num_connections)
        self._stopping = Event()
        self._listener = open_listener(bind, port)
        self._threads = [
            Thread(target=run, name=f"dpipe-{verb}-{self.rank}", daemon=True)
            for verb, run in (("accept", self._accept), ("watch", self._watch))
        ]
        for thread in self._threads:
            thread.start()
        return int(self._listener.getsockname()[1])

    # Dialling

    def _dial(self, connection: TcpConnection, address: str, hello: Hello, deadline: float) -> None:
        call = partial(self._call, connection, address, hello, deadline)
        again = partial(self._dial_again, connection, address)
        name = f"dpipe-dial-{connection.name}"
        connection.on_break = lambda: self._lobby.spawn(again, name)
        self._lobby.spawn(call, name)

    def _call(self, connection: TcpConnection, address: str, hello: Hello, deadline: float) -> None:
        """Open a connection to `address` and greet whoever is there."""
        end = connection.end
        try:
            raw = dial(address, max(0.001, deadline - time.monotonic()))
            with self._secured(raw, deadline, server=False) as sock:
                token = self._security.tokens()[0].encode()
                greeted = greeting.call(sock, hello, token, deadline)
                connection.session.secret = greeted.secret
                connection.start(Frames(stream_over(sock)))
        except TimeoutError:
            pass  # `connect`, which has the same deadline, says what to check
        except (OSError, ValueError) as error:
            end.lose(f"{reason_of(error)}; {CHECK}")
        except JoinError as refusal:
            end.lose(str(refusal))
        except TransferError as error:
            end.break_off(TransferError(f"{end.peer_name} is no dpipe transport: {error}"))

    def _dial_again(self, connection: TcpConnection, address: str) -> None:
        """Try until a connection has taken the place of the broken one, or it is too late."""
        session = connection.session
        broke_at = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        made_smaller = session.stalled
        if made_smaller:
            connection.segment = smaller(connection.segment)
        while session.awaits_another() and not self._stopping.is_set():
            try:
                resumed = self._resume(connection, address, may_stall=made_smaller)
            except (OSError, ValueError) as error:
                refused = isinstance(error, ConnectionRefusedError)
                if refused and time.monotonic() - broke_at > session.silence_s / 2:
                    session.close(f"{session.why}, and nothing listens there any more")
                self._stopping.wait(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_S)
            except DpipeError as refusal:
                session.close(f"{session.why}; dialled again, it says: {refusal}")
            else:
                if resumed:
                    _log_resumed(connection, broke_at)
                    return session.send_again()
                made_smaller = True
                connection.segment = smaller(connection.segment)

    def _resume(self, connection: TcpConnection, address: str, *, may_stall: bool) -> bool:
        """Go on with the session on a new connection, unless it would stall as the last one."""
        session = connection.session
        deadline = time.monotonic() + _GREETING_S
        hello = self.hello(connection)
        hello.resumes = True
        hello.received = session.received
        raw = dial(address, _GREETING_S, connection.segment)
        with self._secured(raw, deadline, server=False) as sock:
            greeted = greeting.call(sock, hello, session.secret, deadline)
            if greeted.stalled and not may_stall:
                sock.close()
                return False
            greeting.confirm(sock, deadline)
            session.attach(Frames(stream_over(sock)), greeted.received, hello.received)
        return True

    # Being dialled

    def _accept(self) -> None:
        """Greet whoever dials, each in a thread with a deadline."""
        while not self._stopping.is_set():
            # Before `accept`: beyond so many, who dials waits in the kernel and takes no thread.
            if not self._strangers.acquire(timeout=WAKE_S):
                continue
            try:
                raw, _ = self._listener.accept()
            except OSError:  # nobody dialled, out of sockets, or this end is closing
                self._strangers.release()
                self._stopping.wait(0.1)  # out of sockets it would fail again at once
            else:
                self._lobby.spawn(partial(self._answer, raw), f"dpipe-greet-{self.rank}")

    def _answer(self, raw: socket.socket) -> None:
        deadline = time.monotonic() + _GREETING_S
        try:
            with self._secured(raw, deadline, server=True) as sock:
                dialler = greeting.answer(sock, self._secrets_for, deadline)
                if dialler.hello.resumes:
                    session = self._admit_again(sock, dialler)
                else:
                    session = self._admit(sock, dialler)
            session.send_again()
        except (OSError, ValueError, DpipeError):
            pass  # a stranger, told so if it greeted; links go on
        finally:
            self._strangers.release()

    def _secrets_for(self, hello: Hello) -> tuple[bytes, ...]:
        """Of which the dialler has to prove one; none for a link that is not there."""
        if not hello.resumes:
            return tuple(token.encode() for token in self._security.tokens())
        connection = self._connection_of(hello)
        if connection is None or not connection.session.secret:
            return ()
        return (connection.session.secret,)

    def _connection_of(self, hello: Hello) -> TcpConnection | None:
        link = self._links.get(hello.from_rank)
        if link is None or hello.connection >= len(link.connections):
            return None
        return link.connections[hello.connection]

    def _admit(self, sock: socket.socket, dialler: greeting.Dialler) -> LinkSession:
        try:
            connection = self.claim(dialler.hello)
        except JoinError as refusal:
            greeting.refuse(sock, str(refusal), time.monotonic() + _GREETING_S)
            raise
        connection.session.secret = dialler.next_secret
        with suppress(OSError):  # the connection's reader finds out
            greeting.welcome(sock, dialler, time.monotonic() + _GREETING_S)
        connection.start(Frames(stream_over(sock)))
        return connection.session

    def _admit_again(self, sock: socket.socket, dialler: greeting.Dialler) -> LinkSession:
        """Go on with a session whose other end has dialled again."""
        hello = dialler.hello
        deadline = time.monotonic() + _GREETING_S
        connection = self._connection_of(hello)
        assert connection is not None, "its secret was proved"
        session = connection.session
        broke_at = time.monotonic()
        try:
            if connection.end.error is not None or connection.end.closing:
                raise JoinError(
                    f"rank {self.rank} has given up its link with rank {hello.from_rank}"
                )
            session.check_arrived(hello.received)
        except DpipeError as refusal:
            greeting.refuse(sock, str(refusal), deadline)
            raise
        state = Greeting(received=session.detach(), stalled=session.stalled)
        greeting.welcome(sock, dialler, deadline, state)
        greeting.await_confirmation(sock, deadline)
        session.attach(Frames(stream_over(sock)), hello.received, state.received)
        _log_resumed(connection, broke_at)
        return session

    def _watch(self) -> None:
        """Notice connections that have fallen silent, and keep this end's from being so."""
        interval_s = self._heartbeat_s / _WATCHES
        watched_at = stopped_until = time.monotonic()
        while not self._stopping.wait(interval_s):
            now = time.monotonic()
            if now - watched_at > 2 * interval_s:
                stopped_until = now
            watched_at = now
            for link in tuple(self._links.values()):
                for connection in link.connections:
                    connection.session.watch(now, stopped_until)

    @contextmanager
    def _secured(
        self, raw: socket.socket, deadline: float, *, server: bool
    ) -> Iterator[socket.socket]:
        """`raw`, with TLS where it is on; closed where the block raises."""
        sock = raw
        try:
            tune(raw, self._heartbeat_s, self._transfer_timeout_s)
            if self._tls is not None:
                sock = self._tls.wrap(raw, server=server)
            with self._lobby.watching(sock):
                if isinstance(sock, ssl.SSLSocket):
                    greeting.set_deadline(sock, deadline)
                    sock.do_handshake()
                yield sock
        except BaseException:
            sock.close()
            raise

    def _stop(self, deadline: float) -> None:
        self._stopping.set()
        shut(self._listener)  # wakes the thread in `accept`; a close would not
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()) + 2 * _ACCEPT_S)
        self._listener.close()
        self._lobby.close(deadline + 1.0)


def open_listener(bind: str, port: int) -> socket.socket:
    host = bind.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            (host, port), family=family, backlog=MAX_LINKS, dualstack_ipv6=both
        )
    except OSError as error:
        raise JoinError(
            f"cannot listen on {bind}:{port}: {error.strerror}; set node.bind and node.port to "
            "what is free here"
        ) from None
    listener.settimeout(_ACCEPT_S)
    return listener


def _log_resumed(connection: TcpConnection, broke_at: float) -> None:
    end = connection.end
    LOG.warning(
        "rank %d: connection %d with %s broke (%s); it was dialled again and goes on, after %.1f s",
        end.rank,
        connection.index,
        end.peer_name,
        connection.session.why,
        time.monotonic() - broke_at,
    )
