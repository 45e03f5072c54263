"""A mesh of gRPC streams between processes, each stream on a TCP connection of its own.

gRPC speaks HTTP/2, which passes the proxies and inspection of real networks. Where there are none,
tcp.py is faster.
"""

import ctypes
import hmac
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from dpipe.errors import DpipeError, JoinError
from dpipe.session import greeting, grpc_stream
from dpipe.session.frames import Frames
from dpipe.session.grpc_stream import GrpcStream
from dpipe.transport.mesh import MAX_LINKS
from dpipe.transport.sessions import Called, SessionConnection, SessionMesh
from dpipe.wire.rpc import Security, serve
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

_SERVICE = "dpipe.wire.v1.Transport"
_METHOD = "Connect"
# Numbers of mallopt's parameters: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
_MALLOC = {-1: 256 << 20, -2: 16 << 20, -3: 32 << 20}


class GrpcTransport(SessionMesh):
    """A mesh of gRPC streams."""

    def _listen(self, bind: str, port: int, security: Security) -> int:
        _keep_memory()
        accept: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._accept
        )
        handlers = [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: accept})]
        max_streams = MAX_LINKS * self._num_connections
        self._server, port = serve(
            handlers, bind, port, security, max_streams, bulk=True, silence_s=self._heartbeat_s
        )
        self._open_lobby(security)
        return port

    @contextmanager
    def _call(
        self,
        connection: SessionConnection,
        address: str,
        hello: Hello,
        secret: bytes,
        deadline: float,
    ) -> Iterator[Called]:
        dialling = grpc_stream.Dialling(
            address,
            f"/{_SERVICE}/{_METHOD}",
            hello,
            secret,
            self._security,
            silence_s=self._heartbeat_s,
            bulk=True,
        )
        with self._lobby.watching(dialling.cancel):
            stream, greeted = dialling.greet(deadline)
            try:
                yield Called(Frames(stream), greeted, lambda: None)
            except BaseException:
                stream.close()
                raise

    def _accept(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve one stream that a peer opened, or refuse it."""
        hello, secret = grpc_stream.hello_of(context)
        try:
            if hello.resumes:
                connection, state = self._admit_again(hello, secret)
            else:
                connection = self.claim(hello)
                state = Greeting(secret=secrets.token_bytes(grpc_stream.SECRET_BYTES))
                connection.session.secret = state.secret
        except DpipeError as refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        stream = GrpcStream(bulk=True)
        stream.carry(context, messages)
        # First: the peer may dial again before gRPC has found out that it sent the greeting.
        if hello.resumes:
            self._go_on(connection, stream, hello, state)
        else:
            connection.start(Frames(stream))
        # The dialler waits for it: a stream that was only opened may be anybody's.
        state.hello.CopyFrom(hello)
        yield state.SerializeToString()
        yield from stream.outgoing()

    def _go_on(
        self, connection: SessionConnection, stream: GrpcStream, hello: Hello, state: Greeting
    ) -> None:
        session = connection.session
        broke_at = time.monotonic()
        try:
            session.attach(Frames(stream), hello.received, state.received)
        except (OSError, DpipeError):
            return stream.give_up()
        self._log_resumed(connection, broke_at)
        # Not by this thread, which hands to gRPC what that one writes.
        self._lobby.spawn(session.send_again, f"dpipe-again-{connection.name}")

    def _admit_again(self, hello: Hello, secret: bytes) -> tuple[SessionConnection, Greeting]:
        connection = self._connection_of(hello)
        expected = b"" if connection is None else connection.session.secret
        if connection is None or not expected or not hmac.compare_digest(expected, secret):
            raise JoinError(greeting.NOT_THE_SAME)
        return connection, self._detach(connection, hello)

    def _stop(self, deadline: float) -> None:
        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        stopped = self._server.stop(left())
        self._close_lobby(deadline)
        stopped.wait(left() + 1.0)
        del self._server  # the threads that served its streams end with it


def _keep_memory() -> None:
    """Have glibc's malloc keep freed memory. gRPC allocates each message twice at either end, and
    to fault in a fresh page costs as much as to copy it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, num_bytes in _MALLOC.items():
        mallopt(parameter, num_bytes)
