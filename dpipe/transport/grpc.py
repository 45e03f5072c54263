"""A mesh of gRPC streams between processes, each stream on a TCP connection of its own.

gRPC speaks HTTP/2, which passes the proxies and inspection of real networks. Where there are none,
tcp.py is faster.
"""

import hmac
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from threading import Lock

import grpc

from dpipe.errors import DpipeError, JoinError
from dpipe.session import greeting, grpc_stream
from dpipe.session.forward import forward
from dpipe.session.frames import Frames, MessageFrames
from dpipe.session.grpc_stream import GrpcStream
from dpipe.session.stream import tune
from dpipe.transport.mesh import MAX_LINKS
from dpipe.transport.sessions import Called, SessionConnection, SessionMesh
from dpipe.wire.rpc import Security, serve
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

_SERVICE = "dpipe.wire.v1.Transport"
_METHOD = "Connect"
_ALL = object()  # has been written


class GrpcConnection(SessionConnection):
    """Written by gRPC's own threads, one for each stream: they come for more when the network takes
    it, so that no other thread need be woken in between.
    """

    def start(self, frames: Frames) -> None:
        # The thread of a stream that broke leaves before the next one goes on.
        self._feeding = Lock()
        self._pieces = self.writing()
        super().start(frames)

    def begin_writing(self) -> None:
        stream = self.session.stream
        if isinstance(stream, GrpcStream):  # else it broke already
            stream.feed_by(partial(self._feed, stream), self.look_up)

    def send_again(self) -> None:
        self.begin_writing()

    def _feed(self, stream: GrpcStream) -> None:
        """Write one piece on `stream`, or on the one that has taken its place."""
        with self._feeding:
            # Another thread may have been quicker.
            if not stream.can_write() or self.session.send_next():
                return
            if not self.session.has_room():
                self.session.await_room()
            elif next(self._pieces, _ALL) is _ALL:
                stream.end()


class GrpcTransport(SessionMesh):
    """A mesh of gRPC streams."""

    connection_type = GrpcConnection

    def _listen(self, bind: str, port: int, security: Security) -> int:
        grpc_stream.keep_memory()
        accept: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._accept
        )
        handlers = [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: accept})]
        max_streams = MAX_LINKS * self._num_connections
        self._server = serve(
            handlers, bind, port, security, max_streams, bulk=True, silence_s=self._heartbeat_s
        )
        self._open_lobby(security)
        return self._server.port

    @contextmanager
    def _call(
        self,
        connection: SessionConnection,
        address: str,
        hello: Hello,
        secret: bytes,
        deadline: float,
    ) -> Iterator[Called]:
        if connection.segment is not None:
            left_s = max(0.001, deadline - time.monotonic())
            address = forward(address, left_s, connection.segment, self._tune_outer)
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
                yield Called(MessageFrames(stream), greeted, stream.confirm)
            except BaseException:
                stream.close()
                raise

    def _tune_outer(self, sock: socket.socket) -> None:
        tune(sock, self._heartbeat_s, self._transfer_timeout_s)

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
            connection.start(MessageFrames(stream))
        # The dialler waits for it: a stream that was only opened may be anybody's.
        state.hello.CopyFrom(hello)
        yield state.SerializeToString()
        if hello.resumes:
            # Once the greeting was heard: in one large packet with it, both could be lost.
            stream.await_confirmation(connection.session.silence_s / 2)
            connection.send_again()
        yield from stream.outgoing()

    def _go_on(
        self, connection: SessionConnection, stream: GrpcStream, hello: Hello, state: Greeting
    ) -> None:
        broke_at = time.monotonic()
        try:
            connection.session.attach(MessageFrames(stream), hello.received, state.received)
        except (OSError, DpipeError):
            return stream.give_up()
        self._log_resumed(connection, broke_at)

    def _admit_again(self, hello: Hello, secret: bytes) -> tuple[SessionConnection, Greeting]:
        connection = self._connection_of(hello)
        expected = b"" if connection is None else connection.session.secret
        if connection is None or not expected or not hmac.compare_digest(expected, secret):
            raise JoinError(greeting.NOT_THE_SAME)
        return connection, self._detach(connection, hello)

    def _stop(self, deadline: float) -> None:
        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        self._server.stop(left())
        self._close_lobby(deadline)
        self._server.join(left() + 1.0)
