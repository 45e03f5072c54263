"""A mesh of TCP or TLS connections between processes: the fastest where nothing asks for HTTP/2.

    rank 1 (lower: dials)                            rank 2
    send --> queue 0 --> writer 0 --> socket 0 ====> reader 0 --> stripe 0 of the tensor --.
         `-> queue 1 --> writer 1 --> socket 1 ====> reader 1 --> stripe 1 of the tensor ----> recv
    recv <-- both readers <-------- both sockets <== both writers <-- both queues <-- send

Bytes go from the tensor's memory into the kernel, and from there into the memory of the tensor that
`recv` gives; Python copies none. Each connection has two threads, and one while it is opened.
"""

import itertools
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import BoundedSemaphore, Event, Lock, Thread

from dpipe.errors import DpipeError, JoinError, TransferError, TransferTimeout
from dpipe.session import greeting
from dpipe.session.stream import Stream, Tls, shut, stream_over, tune
from dpipe.transport.link import LinkEnd
from dpipe.transport.mesh import CHECK, MAX_LINKS, WAKE_S, Connection, Mesh
from dpipe.wire.message import PREFIX_BYTES, Header, framed, framed_size
from dpipe.wire.rpc import Security
from dpipe.wire.v1.transport_pb2 import Hello

_GREETING_S = 5.0  # for a dialler to say who it is
_ACCEPT_S = 1.0  # poll interval of the thread that accepts
_END = bytes(PREFIX_BYTES)  # a header of no bytes: no more tensors


class TcpConnection(Connection):
    """A TCP or TLS stream with a thread that writes and one that reads."""

    def __init__(self, end: LinkEnd, index: int, num_connections: int, chunk_bytes: int) -> None:
        super().__init__(end, index, num_connections, chunk_bytes)
        self._stream: Stream | None = None
        self._threads: list[Thread] = []

    def start(self, stream: Stream) -> None:
        self._stream = stream
        for verb, run in (("read", self._read), ("write", self._write)):
            thread = Thread(
                target=run, args=(stream,), name=f"dpipe-{verb}-{self.name}", daemon=True
            )
            self._threads.append(thread)
            thread.start()
        self.open()
        # An error before `_stream` was set found nothing to cancel.
        if self.end.error is not None:
            self.cancel()

    def cancel(self) -> None:
        self.enqueue(None)
        if self._stream is not None:
            self._stream.shut()

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if self._stream is not None and not any(thread.is_alive() for thread in self._threads):
            self._stream.close()

    def _write(self, stream: Stream) -> None:
        try:
            while (sending := self.next_sending()) is not None:
                sending.begin()
                lead = framed(sending.header.encode())
                for chunk in self.chunks(sending):
                    stream.write(lead, chunk)
                    lead = b""
                sending.end_stripe()
            # Said, because the kernel ends the stream of a process that dies as well.
            stream.write(_END)
            stream.end()
        except OSError as error:
            self.end.lose(f"the connection broke: {_reason(error)}")
        except TransferTimeout:
            pass  # the device never gave the bytes; `begin` has broken the link

    def _read(self, stream: Stream) -> None:
        try:
            for sequence in itertools.count():
                header = self._read_header(stream)
                if header is None:
                    return self.end.end_stream()
                arrived = None if self.end.closing else self.arrive(header, sequence)
                if arrived is None:
                    # To the peer's end of the stream: a socket that is closed with bytes unread
                    # resets the connection, and the peer loses what it was sent last.
                    stream.skip()
                    return self.end.end_stream()
                receiving, stripe = arrived
                stream.read(stripe)
                receiving.end_stripe()
        except OSError as error:
            self.end.lose(f"the connection broke: {_reason(error)}")
        except Exception as error:  # this end found it wrong: wait() raises it
            self.end.break_off(error)

    def _read_header(self, stream: Stream) -> Header | None:
        prefix = bytearray(PREFIX_BYTES)
        stream.read(memoryview(prefix))
        if prefix == _END:
            return None
        message = bytearray(framed_size(bytes(prefix)))
        stream.read(memoryview(message))
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

    def _listen(self, bind: str, port: int, security: Security) -> int:
        self._security = security
        self._tls = Tls(security) if security.tls else None
        self._lobby = _Lobby()
        # Diallers that may be in the lobby at once.
        self._strangers = BoundedSemaphore(MAX_LINKS * self._num_connections)
        self._stopping = Event()
        self._listener = _open_listener(bind, port)
        self._acceptor = Thread(target=self._accept, name=f"dpipe-accept-{self.rank}", daemon=True)
        self._acceptor.start()
        return int(self._listener.getsockname()[1])

    def _dial(self, connection: TcpConnection, address: str, hello: Hello, deadline: float) -> None:
        call = partial(self._call, connection, address, hello, deadline)
        self._lobby.spawn(call, f"dpipe-dial-{connection.name}")

    def _call(self, connection: TcpConnection, address: str, hello: Hello, deadline: float) -> None:
        """Open a connection to `address` and greet whoever is there."""
        end = connection.end
        host, _, port = address.rpartition(":")
        left_s = max(0.001, deadline - time.monotonic())  # 0 would not wait, but fail at once
        try:
            raw = socket.create_connection((host.strip("[]"), int(port)), left_s)
            with self._secured(raw, deadline, server=False) as sock:
                greeting.call(sock, hello, self._security.tokens()[0], deadline)
                connection.start(stream_over(sock))
        except TimeoutError:
            pass  # `connect`, which has the same deadline, says what to check
        except (OSError, ValueError) as error:
            end.lose(f"{_reason(error)}; {CHECK}")
        except JoinError as refusal:
            end.lose(str(refusal))
        except TransferError as error:
            end.break_off(TransferError(f"{end.peer_name} is no dpipe transport: {error}"))

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
                self._admit(sock, greeting.answer(sock, self._security.tokens(), deadline))
        except (OSError, ValueError, DpipeError):
            pass  # a stranger, told so if it greeted; links go on
        finally:
            self._strangers.release()

    def _admit(self, sock: socket.socket, dialler: greeting.Dialler) -> None:
        try:
            connection = self.claim(dialler.hello)
        except JoinError as refusal:
            greeting.refuse(sock, str(refusal), time.monotonic() + _GREETING_S)
            raise
        with suppress(OSError):  # the connection's reader finds out
            greeting.welcome(sock, dialler, time.monotonic() + _GREETING_S)
        connection.start(stream_over(sock))

    @contextmanager
    def _secured(
        self, raw: socket.socket, deadline: float, *, server: bool
    ) -> Iterator[socket.socket]:
        """`raw`, with TLS where it is on; closed where the block raises."""
        sock = raw
        try:
            tune(raw)
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
        self._acceptor.join(max(0.0, deadline - time.monotonic()) + 2 * _ACCEPT_S)
        self._listener.close()
        self._lobby.close(deadline + 1.0)


def _open_listener(bind: str, port: int) -> socket.socket:
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


def _reason(error: Exception) -> str:
    """The error text without errno, which differs between systems."""
    return getattr(error, "strerror", None) or str(error)
