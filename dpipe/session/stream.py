"""One TCP or TLS connection that carries tensors: a thread reads it while another writes it."""

import math
import select
import socket
import ssl
import struct
import sys
from contextlib import suppress
from tempfile import NamedTemporaryFile
from threading import Lock

from dpipe.errors import JoinError
from dpipe.session.frames import ByteStream
from dpipe.session.window import Losses, Window
from dpipe.wire.rpc import TLS_NAME, Security

# A thread that reads a tensor is woken for so many: each wake interrupts the sender's core.
_WAKE_BYTES = 512 << 10
_ROOM_BYTES = 4 * _WAKE_BYTES
_FEW_BYTES = 64 << 10  # up to here a thread is woken for the first byte, without a system call
_MORE = getattr(socket, "MSG_MORE", 0)  # more follows: do not send a packet for this alone
_WAKE_MS = 5_000  # poll interval of waits without a deadline of their own
# Of waits for many bytes: what has come meanwhile is taken, a sign of life on a slow path.
_TRICKLE_MS = 500
_MOST_PROBE_S = 32767  # that the kernel takes, as
_MOST_MS = (1 << 31) - 1
_UNSENT_BYTES = 128 << 10  # of which half is left when `can_write` says so: half a ms at 1 Gbit/s
_UNSENT_S = 0.04  # the same of a connection that is paced: half of it is two packets at 1 Mbit/s
_MAX_PACING_RATE = 47  # SO_MAX_PACING_RATE of linux/socket.h: TCP spaces packets out by itself
_RESET = struct.pack("ii", 1, 0)  # linger for no time: close with a reset


class SocketStream(ByteStream):
    """Bytes over an open socket; see `frames.ByteStream`."""

    def __init__(self, sock: socket.socket, losses: Losses | None = None) -> None:
        """`losses` are the `Window`'s."""
        self._socket = sock
        # `shut` ends every wait.
        sock.settimeout(None)
        self._readable = select.poll()
        self._readable.register(sock, select.POLLIN)
        self._wakes_at = 1
        self._paced_to = math.inf  # bytes a second
        self._window = Window(sock, losses)
        # The kernel makes its buffer as large as what is waited for, and lets no more be under way:
        # on a path that holds as much, the other end would stop until it is read.
        self._wake_at(_ROOM_BYTES)
        self._wake_at(1)

    def write(self, *parts: bytes | memoryview) -> None:
        """Give all `parts` to the kernel, in order. Only the last, if large, is not copied."""
        large = len(parts[-1]) > _FEW_BYTES
        few = b"".join(parts[:-1] if large else parts)
        self._socket.sendall(few, _MORE if large else 0)
        left = memoryview(parts[-1])
        while large and left:
            written = self._socket.send(left[: self._window.write_bytes])
            left = left[written:]

    def can_write(self, wait_ms: int = 0) -> bool:
        """Whether a few bytes can be written without waiting, after `wait_ms` at most."""
        return _ready(self._socket, select.POLLOUT, wait_ms)

    def await_bytes(self, num_bytes: int) -> None:
        """Wait until there is something to receive: at best `num_bytes`, which will come. Returns
        after `_TRICKLE_MS` of a wait for many, and after `_WAKE_MS` at the latest.
        """
        wake_bytes = 1
        timeout_ms = _WAKE_MS
        if num_bytes > _FEW_BYTES:
            wake_bytes = min(num_bytes, _WAKE_BYTES)
            timeout_ms = _TRICKLE_MS
        self._wake_at(wake_bytes)
        self._readable.poll(timeout_ms)

    def receive(self, view: memoryview, behind: memoryview) -> int:
        """Fill `view`, then `behind`, with what is there. Returns how many bytes were."""
        # Without waiting: a recv that waits would wait for `_wakes_at` again.
        try:
            if not view or not behind:
                return _not_ended(self._socket.recv_into(view or behind, 0, socket.MSG_DONTWAIT))
            return _not_ended(self._socket.recvmsg_into([view, behind], 0, socket.MSG_DONTWAIT)[0])
        except BlockingIOError:
            return 0

    def padding(self, burst_bytes: int) -> int:
        return self._window.look(burst_bytes)

    def outruns_loss(self) -> bool:
        return self._window.outruns_loss

    def pace(self, bytes_per_s: float) -> bool:
        if bytes_per_s == self._paced_to:
            return True
        with suppress(OSError):  # of a socket that is closed
            if sys.platform == "linux" and self._window.is_path_long():
                keep_little_unsent(self._socket, round(_UNSENT_S * bytes_per_s))
                self._socket.setsockopt(socket.SOL_SOCKET, _MAX_PACING_RATE, round(bytes_per_s))
                self._paced_to = bytes_per_s
        return bytes_per_s == self._paced_to

    def end(self) -> None:
        """Write no more; the peer reads what was written, then the end."""
        _shutdown(self._socket, socket.SHUT_WR)

    def shut(self) -> None:
        """End both directions at once and wake threads at either end. From any thread."""
        shut(self._socket)

    def give_up(self) -> None:
        """Shut, so that `close` tells the peer at once, past bytes that it never gets."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.shut()

    def close(self) -> None:
        """Close the socket, once no thread uses it."""
        self._socket.close()

    def _wake_at(self, num_bytes: int) -> None:
        """Let `poll` return for no less; the kernel makes its buffer large enough."""
        if num_bytes != self._wakes_at:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, num_bytes)
            self._wakes_at = num_bytes


class TlsStream(SocketStream):
    """TLS. OpenSSL allows one thread at a time in a connection, so a thread must not wait for the
    network while it is inside.
    """

    def __init__(self, sock: ssl.SSLSocket, losses: Losses | None = None) -> None:
        super().__init__(sock, losses)
        sock.setblocking(False)
        self._tls = sock
        self._inside = Lock()
        self._reading_awaits = 0  # the event without which `receive` gets nothing

    def write(self, *parts: bytes | memoryview) -> None:
        for part in parts:
            left = memoryview(part)
            while left:
                written = self._write_some(left)
                left = left[written:]

    def await_bytes(self, num_bytes: int) -> None:
        if self._reading_awaits:
            _ready(self._socket, self._reading_awaits, _WAKE_MS)

    def receive(self, view: memoryview, behind: memoryview) -> int:
        self._reading_awaits = 0
        try:
            with self._inside:
                return _not_ended(self._tls.recv_into(view or behind))
        except ssl.SSLWantReadError:
            self._reading_awaits = select.POLLIN
        except ssl.SSLWantWriteError:
            self._reading_awaits = select.POLLOUT
        return 0

    def _write_some(self, view: memoryview) -> int:
        while True:
            try:
                with self._inside:
                    return self._tls.send(view)
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            _ready(self._socket, event, _WAKE_MS)


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


def stream_over(sock: socket.socket, losses: Losses | None = None) -> ByteStream:
    if isinstance(sock, ssl.SSLSocket):
        return TlsStream(sock, losses)
    return SocketStream(sock, losses)


def tune(sock: socket.socket, silence_s: float, unacknowledged_s: float) -> None:
    """Send small messages at once, and have the kernel notice a host that is gone: one that answers
    nothing for `silence_s`, or takes nothing for `unacknowledged_s`. The kernel sizes buffers.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = min(max(1, round(silence_s / 4)), _MOST_PROBE_S)
    options = {
        "TCP_KEEPIDLE": probe_s,
        "TCP_KEEPINTVL": probe_s,
        "TCP_KEEPCNT": 3,
        "TCP_USER_TIMEOUT": min(round(unacknowledged_s * 1e3), _MOST_MS),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def keep_little_unsent(sock: socket.socket, num_bytes: int = _UNSENT_BYTES) -> None:
    """Have the kernel take no more than it sends soon: what is not sent yet another connection may
    carry earlier.
    """
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, num_bytes)


def shut(sock: socket.socket) -> None:
    """Wake threads that wait on `sock`, here and at the other end; it is not closed yet."""
    _shutdown(sock, socket.SHUT_RDWR)


def _ready(sock: socket.socket, event: int, timeout_ms: int) -> bool:
    waiter = select.poll()
    waiter.register(sock, event)
    return bool(waiter.poll(timeout_ms))


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
