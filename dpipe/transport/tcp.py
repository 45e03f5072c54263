"""A mesh of TCP or TLS connections between processes: the fastest where nothing asks for HTTP/2.

Bytes go from the tensor's memory into the kernel, and from there into the memory of the tensor that
`recv` gives; Python copies none.
"""

import socket
import ssl
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from threading import BoundedSemaphore, Thread

from dpipe.errors import ConfigError, DpipeError, JoinError
from dpipe.session import greeting
from dpipe.session.dial import dial
from dpipe.session.frames import ByteFrames
from dpipe.session.listen import ACCEPT_S, open_listener
from dpipe.session.redial import GREETING_S
from dpipe.session.session import LOOK_S
from dpipe.session.stream import Tls, keep_little_unsent, shut, stream_over, tune
from dpipe.session.window import Losses, set_congestion_control
from dpipe.transport.mesh import MAX_LINKS, WAKE_S
from dpipe.transport.sessions import Called, SessionConnection, SessionMesh
from dpipe.wire.rpc import Security
from dpipe.wire.v1.transport_pb2 import Hello


class TcpConnection(SessionConnection):
    """Of several on a link, and in a turn, one asks for more once most of the last is sent."""

    def _write(self) -> None:
        for _ in self.writing():
            while not self.session.has_room():
                self.session.await_room()
            drains = self._num_connections > 1 or self._uplink.is_taken
            while drains and not self.session.await_drained():
                continue


class TcpTransport(SessionMesh):
    """A mesh of TCP connections."""

    connection_type = TcpConnection
    look_s = LOOK_S

    def _listen(self, bind: str, port: int, security: Security) -> int:
        self._tls = Tls(security) if security.tls else None
        self._losses = defaultdict[int, Losses](Losses)  # by peer
        self._strangers = BoundedSemaphore(MAX_LINKS * self._num_connections)  # in the lobby
        self._listener = open_listener(bind, port)
        # Those that it accepts have it as well.
        try:
            self._set_congestion_control(self._listener)
        except ConfigError:
            self._listener.close()
            raise
        self._open_lobby(security)
        self._acceptor = Thread(target=self._accept, name=f"dpipe-accept-{self.rank}", daemon=True)
        self._acceptor.start()
        return int(self._listener.getsockname()[1])

    def _set_congestion_control(self, sock: socket.socket) -> None:
        set_congestion_control(sock, self._congestion_control, loses=self._one_outruns_loss)

    # Dialling

    @contextmanager
    def _call(
        self,
        connection: SessionConnection,
        address: str,
        hello: Hello,
        secret: bytes,
        deadline: float,
    ) -> Iterator[Called]:
        left_s = max(0.001, deadline - time.monotonic())
        raw = dial(address, left_s, connection.segment, self._set_congestion_control)
        with self._secured(raw, deadline, server=False) as sock:
            greeted = greeting.call(sock, hello, secret, deadline)
            confirm = partial(greeting.confirm, sock, deadline)
            yield Called(self._frames_over(sock, connection.end.peer), greeted, confirm)

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
        deadline = time.monotonic() + GREETING_S
        try:
            with self._secured(raw, deadline, server=True) as sock:
                dialler = greeting.answer(sock, self._secrets_for, deadline)
                if dialler.hello.resumes:
                    connection = self._admit_again(sock, dialler)
                else:
                    connection = self._admit(sock, dialler)
            connection.send_again()
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

    def _admit(self, sock: socket.socket, dialler: greeting.Dialler) -> SessionConnection:
        try:
            connection = self.claim(dialler.hello)
        except JoinError as refusal:
            greeting.refuse(sock, str(refusal), time.monotonic() + GREETING_S)
            raise
        connection.session.secret = dialler.next_secret
        with suppress(OSError):  # the connection's reader finds out
            greeting.welcome(sock, dialler, time.monotonic() + GREETING_S)
        connection.start(self._frames_over(sock, connection.end.peer))
        return connection

    def _admit_again(self, sock: socket.socket, dialler: greeting.Dialler) -> SessionConnection:
        """Go on with a session whose other end has dialled again."""
        hello = dialler.hello
        deadline = time.monotonic() + GREETING_S
        connection = self._connection_of(hello)
        assert connection is not None, "its secret was proved"
        session = connection.session
        broke_at = time.monotonic()
        try:
            state = self._detach(connection, hello)
        except DpipeError as refusal:
            greeting.refuse(sock, str(refusal), deadline)
            raise
        greeting.welcome(sock, dialler, deadline, state)
        greeting.await_confirmation(sock, deadline)
        session.attach(self._frames_over(sock, hello.from_rank), hello.received, state.received)
        self._log_resumed(connection, broke_at)
        return connection

    def _frames_over(self, sock: socket.socket, peer: int) -> ByteFrames:
        adapts = self._congestion_control == "auto"
        return ByteFrames(stream_over(sock, self._losses[peer] if adapts else None))

    @contextmanager
    def _secured(
        self, raw: socket.socket, deadline: float, *, server: bool
    ) -> Iterator[socket.socket]:
        """`raw`, with TLS where it is on; closed where the block raises."""
        sock = raw
        try:
            tune(raw, self._heartbeat_s, self._transfer_timeout_s)
            if self._num_connections > 1:
                keep_little_unsent(raw)
            if self._tls is not None:
                sock = self._tls.wrap(raw, server=server)
            with self._lobby.watching(partial(shut, sock)):
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
        self._acceptor.join(max(0.0, deadline - time.monotonic()) + 2 * ACCEPT_S)
        self._listener.close()
        self._close_lobby(deadline)
