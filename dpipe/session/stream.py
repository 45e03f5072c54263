"""One TCP or TLS connection that carries tensors: a thread reads it while another writes it."""

import select
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from tempfile import NamedTemporaryFile
from threading import Lock

from dpipe.errors import JoinError
from dpipe.wire.rpc import TLS_NAME, Security

# Given to the kernel at once: it sends these while it copies the next, and the cache holds both.
_WRITE_BYTES = 512 << 10
# A thread that reads a tensor is woken for so many: each wake interrupts the sender's core.
_WAKE_BYTES = 512 << 10
_FEW_BYTES = 64 << 10  # up to here a thread is woken for the first byte, without a system call
_MORE = getattr(socket, "MSG_MORE", 0)  # more follows: do not send a packet for this alone
_WAKE_MS = 5_000  # poll interval of waits without a deadline of their own
# Seconds, seconds, probes; the same as gRPC's keep-alive.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 2}


class Stream:
    """Bytes over an open socket. Every failure is an `OSError`, an early end too."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        # `shut` ends every wait, and keep-alive notices a host that is gone.
        sock.settimeout(None)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._wakes_at = 1

    def write(self, *parts: bytes | memoryview) -> None:
        """Give all `parts` to the kernel, in order and without a copy before its own."""
        *leads, left = [memoryview(part) for part in parts if len(part)]
        for lead in leads:
            self._socket.sendall(lead, _MORE)
        while left:
            written = self._socket.send(left[:_WRITE_BYTES])
            left = left[written:]

    def read(self, view: memoryview) -> None:
        """Fill `view`."""
        filled = 0
        while filled < len(view):
            filled += self._read_some(view[filled:])

    def skip(self) -> None:
        """Read and drop bytes until the peer ends."""
        scratch = memoryview(bytearray(1 << 16))
        with suppress(OSError):
            while True:
                self._read_some(scratch)

    def end(self) -> None:
        """Write no more; the peer reads what was written, then the end."""
        _shutdown(self._socket, socket.SHUT_WR)

    def shut(self) -> None:
        """End both directions at once and wake threads at either end. From any thread."""
        shut(self._socket)

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        self._socket.close()

    def _read_some(self, view: memoryview) -> int:
        wake_bytes = 1
        if len(view) > _FEW_BYTES:
            wake_bytes = min(len(view), _WAKE_BYTES)
        self._wake_at(wake_bytes)
        self._readable.poll(_WAKE_MS)
        # Without waiting: a recv that waits would wait for `wake_bytes` again.
        try:
            return _not_ended(self._socket.recv_into(view, 0, socket.MSG_DONTWAIT))
        except BlockingIOError:
            return 0

    def _wake_at(self, num_bytes: int) -> None:
        """Let `poll` return for no less; the kernel makes its buffer large enough."""
        if num_bytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes


class TlsStream(Stream):
    """TLS. OpenSSL allows one thread at a time in a connection, so a thread must not wait for the
    network while it is inside.
    """

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        sock.setblocking(False)
        self._tls = sock
        self._inside = Lock()

    def write(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            left = memoryview(part)
            while left:
                rest = left
                written = self._when_ready(lambda: self._tls.send(rest))  # noqa: B023 - called at once
                left = left[written:]

    def _read_some(self, view: memoryview) -> int:
        return _not_ended(self._when_ready(lambda: self._tls.recv_into(view)))

    def _when_ready(self, attempt: Callable[[], int]) -> int:
        while True:
            try:
                with self._inside:
                    return attempt()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            waiter = select.poll()
            waiter.register(self._tls, event)
            waiter.poll(_WAKE_MS)


class Tls:
    """The two contexts of mutual TLS, made once: each end shows a certificate and asks for one."""

    def __init__(self, security: Security) -> None:
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, security)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, security)
        self._server.verify_mode = ssl.CERT_REQUIRED

    def wrap(self, sock: socket.socket, *, server: bool) -> ssl.SSLSocket:
        """TLS over `sock`, which it takes over; the caller does the handshake."""
        if server:
            return self._server.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        return self._client.wrap_socket(
            sock, server_hostname=TLS_NAME, do_handshake_on_connect=False
        )


def stream_over(sock: socket.socket) -> Stream:
    if isinstance(sock, ssl.SSLSocket):
        return TlsStream(sock)
    return Stream(sock)


def tune(sock: socket.socket) -> None:
    """Send small messages at once and notice a host that is gone; the kernel sizes buffers."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(sock: socket.socket) -> None:
    """Wake threads that wait on `sock`, here and at the other end; it is not closed yet."""
    _shutdown(sock, socket.SHUT_RDWR)


def _shutdown(sock: socket.socket, how: int) -> None:
    with suppress(OSError):  # where the peer was first
        socket.socket.shutdown(sock, how)  # an SSLSocket's own would go on without TLS


def _not_ended(num_bytes: int) -> int:
    if not num_bytes:
        raise ConnectionError("it closed the connection")
    return num_bytes


def _context(protocol: int, security: Security) -> ssl.SSLContext:
    assert security.cert is not None
    assert security.key is not None
    assert security.ca is not None
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(cadata=security.ca.decode())
        # Python's ssl reads keys from files only; this one can be read by this user alone.
        with NamedTemporaryFile() as chain:
            chain.write(security.key + b"\n" + security.cert)
            chain.flush()
            context.load_cert_chain(chain.name)
    except (ssl.SSLError, ValueError) as error:
        raise JoinError(
            f"node.tls_cert, node.tls_key, node.tls_ca cannot be used: {error}"
        ) from None
    return context
