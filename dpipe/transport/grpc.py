"""A mesh of gRPC streams between processes, each stream on a TCP connection of its own.

    rank 1 (lower: dials)                        rank 2
    send --> queue 0 --> stream 0 =============> reader 0 --> stripe 0 of the tensor --.
         `-> queue 1 --> stream 1 =============> reader 1 --> stripe 1 of the tensor ----> recv
    recv <-- both readers <===================== both streams <-- both queues <-- send

gRPC speaks HTTP/2, which passes the proxies and inspection of real networks. Where there are none,
tcp.py is faster.
"""

import ctypes
import itertools
import time
from collections.abc import Iterator
from threading import Thread
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dpipe.errors import JoinError, PeerLost, TransferError, TransferTimeout
from dpipe.transport.link import LinkEnd
from dpipe.transport.mesh import CHECK, MAX_LINKS, Connection, Mesh
from dpipe.wire.message import Header, framed, unframed
from dpipe.wire.rpc import Security, open_channel, serve, token_metadata
from dpipe.wire.text import visible
from dpipe.wire.v1.transport_pb2 import Hello

_SERVICE = "dpipe.wire.v1.Transport"
_METHOD = "Connect"
_HELLO_KEY = "dpipe-hello-bin"  # "-bin": only then gRPC takes any bytes
# Numbers of mallopt's parameters: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
_MALLOC = {-1: 256 << 20, -2: 16 << 20, -3: 32 << 20}


class GrpcConnection(Connection):
    """A gRPC stream: gRPC's threads pull messages to send, a thread of its own reads."""

    def __init__(self, end: LinkEnd, index: int, num_connections: int, chunk_bytes: int) -> None:
        super().__init__(end, index, num_connections, chunk_bytes)
        self._reader: Thread | None = None
        self._call: Any = None

    def start(self, call: Any, messages: Iterator[bytes], hello: bytes | None) -> None:
        """Read `messages`, which `call` can cancel. `hello`, where there is one, must come first:
        the dialled end echoes it.
        """
        self._call = call
        self._reader = Thread(
            target=self._read, args=(messages, hello), name=f"dpipe-read-{self.name}", daemon=True
        )
        self._reader.start()

    def cancel(self) -> None:
        self.enqueue(None)
        if self._call is not None:
            self._call.cancel()

    def join(self, timeout_s: float) -> None:
        if self._reader is not None:
            self._reader.join(timeout_s)

    def outgoing(self) -> Iterator[bytes]:
        """The messages that gRPC sends; it pulls the next one when the network takes more."""
        while (sending := self.next_sending()) is not None:
            try:
                sending.begin()
            except TransferTimeout:
                return  # the device never gave the bytes; `begin` has broken the link
            # In front of the first chunk, to save a message.
            lead = framed(sending.header.encode())
            for chunk in self.chunks(sending):
                yield b"".join((lead, chunk))
                lead = b""
            sending.end_stripe()  # gRPC has asked for more: the last chunk is with the network

    def _read(self, messages: Iterator[bytes], hello: bytes | None) -> None:
        try:
            if hello is not None and next(messages, None) != hello:
                raise TransferError(
                    f"{self.end.peer_name} is no dpipe transport: it does not answer as one"
                )
            self.open()
            for sequence in itertools.count():
                message = next(messages, None)
                if message is None:
                    return self.end.end_stream()
                if not self.end.closing:  # else read on to the peer's end of the stream
                    self._receive(sequence, message, messages)
        except grpc.RpcError as error:
            self.end.lose(_reason(error, self.opened))
        except Exception as error:  # this end found it wrong: wait() raises it
            self.end.break_off(error)

    def _receive(self, sequence: int, message: bytes, messages: Iterator[bytes]) -> None:
        """Read one tensor's stripe, of which `message` is the header and the first chunk."""
        header, chunk = unframed(message)
        arrived = self.arrive(Header.decode(header), sequence)
        if arrived is not None:
            receiving, stripe = arrived
            self._fill(stripe, chunk, messages)
            receiving.end_stripe()

    def _fill(
        self, stripe: memoryview, chunk: memoryview | bytes | None, messages: Iterator[bytes]
    ) -> None:
        filled = 0
        while filled < len(stripe) or chunk:  # also a chunk that is too much: it is refused
            if chunk is None:
                raise PeerLost(
                    f"rank {self.end.rank} lost {self.end.peer_name}: it closed the link within a "
                    "tensor"
                )
            if not 0 < len(chunk) <= len(stripe) - filled:
                raise TransferError(
                    f"{self.end.peer_name} sent {len(chunk)} bytes where {len(stripe) - filled} "
                    "are due"
                )
            stripe[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            chunk = next(messages, None) if filled < len(stripe) else b""


class GrpcTransport(Mesh[GrpcConnection]):
    """A mesh of gRPC streams."""

    connection_type = GrpcConnection

    def _listen(self, bind: str, port: int, security: Security) -> int:
        _keep_memory()
        self._security = security
        self._channels: list[grpc.Channel] = []
        accept: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._accept
        )
        handlers = [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: accept})]
        max_streams = MAX_LINKS * self._num_connections
        self._server, port = serve(handlers, bind, port, security, max_streams, bulk=True)
        return port

    def _dial(
        self, connection: GrpcConnection, address: str, hello: Hello, deadline: float
    ) -> None:
        channel = open_channel(address, self._security, own_connection=True, bulk=True)
        self._channels.append(channel)
        greeting = hello.SerializeToString()
        # In the metadata: the other end decides about a stream before it reads from it.
        metadata: Any = (*token_metadata(self._security), (_HELLO_KEY, greeting))
        connect: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        call = connect(connection.outgoing(), metadata=metadata)
        connection.start(call, call, greeting)

    def _accept(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve one stream that a peer opened, or refuse it."""
        hello = _hello_of(context)
        try:
            connection = self.claim(hello)
        except JoinError as refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        connection.start(context, messages, None)
        # The dialler waits for it: a stream that was only opened may be anybody's.
        yield hello.SerializeToString()
        yield from connection.outgoing()

    def _stop(self, deadline: float) -> None:
        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        stopped = self._server.stop(left())
        for channel in self._channels:
            channel.close()
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


def _hello_of(context: grpc.ServicerContext) -> Hello:
    """What the dialler says of itself; one that says nothing gets protocol 0, and is refused."""
    message: Any = dict(context.invocation_metadata()).get(_HELLO_KEY, b"")
    try:
        return Hello.FromString(message)
    except DecodeError:
        return Hello()


def _reason(error: grpc.RpcError, opened: bool) -> str:
    """Why a stream ended. Only the end that dialled learns more than that it did."""
    if not isinstance(error, grpc.Call):
        return "the connection broke"
    match error.code():
        case grpc.StatusCode.CANCELLED:
            return "it broke off the link"
        case grpc.StatusCode.UNAVAILABLE if not opened:
            return f"{visible(str(error.details()))}; {CHECK}"
    return visible(str(error.details()))
