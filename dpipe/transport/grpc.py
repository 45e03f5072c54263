"""Ranks as processes and machines: each link is one or more gRPC streams, each a TCP connection of its own.

    rank 1 (lower: dials)                        rank 2
    send --> queue 0 --> stream 0 =============> reader 0 --> stripe 0 of the tensor --.
         `-> queue 1 --> stream 1 =============> reader 1 --> stripe 1 of the tensor ----> recv
    recv <-- both readers <===================== both streams <-- both queues <-- send

A stream carries both directions, so one end that can be reached is enough. What is on a stream: transport.proto.
"""

import itertools
import time
from collections.abc import Collection, Iterator, Mapping
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from typing import Any

import grpc
import torch
from google.protobuf.message import DecodeError

from dpipe.errors import JoinError, PeerLost, TransferError
from dpipe.transport.link import LinkEnd, Receiving, Sending
from dpipe.wire.message import Header, byte_view
from dpipe.wire.rpc import Security, open_channel, serve, token_metadata
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import Hello

PROTOCOL = 1  # of transport.proto; ranks of another are refused
_SERVICE, _METHOD = "dpipe.wire.v1.Transport", "Connect"
_HELLO_KEY = "dpipe-hello-bin"
_MAX_LINKS = 64  # that may dial this rank; a thread each and connection, made when needed
_OPEN = Security()
_CHECK = (
    "check that it runs, that its node.advertise and node.port are right, that no firewall blocks the way, and that "
    "both ends use TLS with certificates of one authority (node.tls_*), or neither"
)
_CLOSE_S = 5.0  # for the last sends to leave and the peer to take note
_WAKE_S = 5.0  # an idle writer looks around this often


class _Connection:
    """One stream of a link: a queue of tensors whose stripe `index` goes out, and a thread that reads what comes in."""

    def __init__(self, end: LinkEnd, index: int, num_connections: int, chunk_bytes: int) -> None:
        self.end = end
        self.bytes_sent = 0
        self._index = index
        self._num_connections = num_connections
        self._chunk_bytes = chunk_bytes
        self._queue: SimpleQueue[Sending | None] = SimpleQueue()
        self._reader: Thread | None = None
        self.opened = False
        self.call: Any = None

    def start(self, call: Any, messages: Iterator[bytes], hello: bytes | None) -> None:
        """Read `messages` in a thread of its own; `call` can cancel them; `hello` is what the dialled end echoes."""
        self.call = call
        name = f"dpipe-read-{self.end.rank}-{self.end.peer}.{self._index}"
        self._reader = Thread(target=self._read, args=(messages, hello), name=name, daemon=True)
        self._reader.start()

    def enqueue(self, sending: Sending | None) -> None:
        """Send the stripe of a tensor; None ends the stream after what is queued."""
        self._queue.put(sending)

    def cancel(self) -> None:
        self._queue.put(None)
        if self.call is not None:
            self.call.cancel()

    def join(self, timeout_s: float) -> None:
        if self._reader is not None:
            self._reader.join(timeout_s)

    def outgoing(self) -> Iterator[bytes]:
        """What gRPC pulls and sends, message by message: it comes back for more when the network takes more."""
        while (sending := self._next()) is not None:
            assert sending.view is not None
            yield from self._messages(sending, sending.view)

    def _next(self) -> Sending | None:
        while True:
            try:
                return self._queue.get(timeout=_WAKE_S)
            except Empty:
                if self.end.error is not None:
                    return None

    def _messages(self, sending: Sending, view: memoryview) -> Iterator[bytes]:
        sending.begin()
        yield sending.header.encode()
        stripe = self._stripe(view)
        for start in range(0, len(stripe), self._chunk_bytes):
            chunk = bytes(stripe[start : start + self._chunk_bytes])
            self.bytes_sent += len(chunk)
            yield chunk
        sending.end_stripe()

    def _stripe(self, view: memoryview) -> memoryview:
        first, last = (len(view) * i // self._num_connections for i in (self._index, self._index + 1))
        return view[first:last]

    def _read(self, messages: Iterator[bytes], hello: bytes | None) -> None:
        try:
            if hello is not None and next(messages, None) != hello:
                raise TransferError(f"{self.end.peer_name} is no dpipe transport: it does not answer as one")
            self._open()
            for sequence in itertools.count():
                message = next(messages, None)
                if message is None:
                    return self.end.end_stream()
                if not self.end.closing:  # else read on only to see the peer take note
                    self._receive(sequence, message, messages)
        except grpc.RpcError as error:
            self.end.lose(_reason(error, self.opened))
        except Exception as error:  # what this end found wrong: wait() raises it
            self.end.break_off(error)

    def _open(self) -> None:
        with self.end.changed:
            self.opened = True
            self.end.changed.notify_all()

    def _receive(self, sequence: int, message: bytes, messages: Iterator[bytes]) -> None:
        """Read one tensor's stripe, of which `message` is the header."""
        header = Header.decode(message)
        if header.sequence != sequence:
            raise TransferError(f"{self.end.peer_name} sent tensor {header.sequence} where {sequence} belongs")
        receiving = self.end.arrive(header)
        if receiving is not None:
            assert receiving.tensor is not None
            self._fill(self._stripe(byte_view(receiving.tensor)), messages)
            receiving.end_stripe()

    def _fill(self, stripe: memoryview, messages: Iterator[bytes]) -> None:
        filled = 0
        while filled < len(stripe):
            chunk = next(messages, None)
            if chunk is None:
                raise PeerLost(f"rank {self.end.rank} lost {self.end.peer_name}: it closed the link within a tensor")
            if not 0 < len(chunk) <= len(stripe) - filled:
                raise TransferError(
                    f"{self.end.peer_name} sent {len(chunk)} bytes where {len(stripe) - filled} are due"
                )
            stripe[filled : filled + len(chunk)] = chunk
            filled += len(chunk)


class _Link:
    """A `LinkEnd` with the connections that carry it."""

    def __init__(self, end: LinkEnd, num_connections: int, chunk_bytes: int) -> None:
        self.end = end
        self.connections = [_Connection(end, c, num_connections, chunk_bytes) for c in range(num_connections)]
        end.on_broken = self._cancel

    def enqueue(self, sending: Sending | None) -> None:
        for connection in self.connections:
            connection.enqueue(sending)

    def wait_open(self, timeout_s: float) -> bool:
        """Whether all connections are open within `timeout_s`; gives up at once on an error."""

        def settled() -> bool:
            return self.end.error is not None or all(c.opened for c in self.connections)

        with self.end.changed:
            return self.end.changed.wait_for(settled, timeout_s) and self.end.error is None

    def _cancel(self) -> None:
        for connection in self.connections:
            connection.cancel()


class GrpcTransport:
    """Moves tensors between processes. Made in two steps, since addresses are known only when all ranks listen:

    transport = GrpcTransport(rank)                   listens on transport.port
    transport.connect(addresses, peers)               opens and checks every link
    ...                                               send, recv
    transport.close()                                 a process that does not close may not end
    """

    def __init__(
        self,
        rank: int,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        security: Security = _OPEN,
        connections: int = 1,
        chunk_bytes: int = 1 << 19,
        buffer_bytes: int = 256 << 20,
        transfer_timeout_s: float = 300.0,
        connect_timeout_s: float = 20.0,
        device: torch.device | str = "cpu",
    ) -> None:
        """Listen; raises `JoinError` where it cannot. `buffer_bytes` is what a link may hold unclaimed."""
        self.rank = rank
        self._security = security
        self._num_connections = connections
        self._chunk_bytes = chunk_bytes
        self._end_options: dict[str, Any] = {
            "num_stripes": connections,
            "buffer_bytes": buffer_bytes,
            "timeout_s": transfer_timeout_s,
            "device": device,
        }
        self._connect_timeout_s = connect_timeout_s
        self._links: dict[int, _Link] = {}
        self._known = Event()  # set once it is known who may dial this rank
        self._channels: list[grpc.Channel] = []
        self._accepting = Lock()
        self._closing = Lock()
        self._closed = False
        accept: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(self._accept)
        handlers = [grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: accept})]
        self._server, self.port = serve(handlers, bind, port, security, _MAX_LINKS * connections)

    def connect(self, addresses: Mapping[int, str | None], peers: Collection[int]) -> None:
        """Open and check every link with `peers`, in both directions.

        The lower rank dials the higher one, unless that has no address (it is behind a NAT): then the other way round.
        All ranks call this at about the same time. Raises `JoinError` naming each peer that cannot be reached, its
        address, and what to check.
        """
        dialled = [peer for peer in peers if _dials(self.rank, peer, addresses)]
        for peer in peers:
            end = LinkEnd(self.rank, peer, addresses[peer], **self._end_options)
            self._links[peer] = _Link(end, self._num_connections, self._chunk_bytes)
        self._known.set()
        deadline = time.monotonic() + self._connect_timeout_s
        for peer in dialled:
            self._dial(peer, addresses[peer])
        blocked = [
            self._explain(peer, addresses)
            for peer, link in self._links.items()
            if not link.wait_open(max(0.0, deadline - time.monotonic()))
        ]
        if blocked:
            raise JoinError("\n  ".join([f"rank {self.rank} cannot open every link:", *blocked]))

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> Sending:
        link = self._links[peer]
        return link.end.send(tensor, tag, link.enqueue)

    def recv(self, like: TensorSpec, peer: int, tag: str) -> Receiving:
        return self._links[peer].end.post(like, tag)

    def bytes_sent(self, peer: int) -> int:
        """Bytes of tensors handed to the network for `peer` so far."""
        return sum(connection.bytes_sent for connection in self._links[peer].connections)

    def fail(self, error: Exception) -> None:
        """Every pending and later wait raises `error`; peers get `PeerLost`. Close all the same."""
        for link in self._links.values():
            link.end.break_off(error, failed=True)

    def close(self) -> None:
        """Let queued sends leave, for at most 5 s where the links are whole, then end every stream and thread."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._known.set()
                self._close(time.monotonic() + _CLOSE_S)

    def _close(self, deadline: float) -> None:
        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        for link in self._links.values():
            link.end.drain(left())
            link.enqueue(None)
        connections = [connection for link in self._links.values() for connection in link.connections]
        for connection in connections:
            connection.join(left())
        for link in self._links.values():
            link.end.close()
        stopped = self._server.stop(left())
        for channel in self._channels:
            channel.close()
        stopped.wait(left() + 1.0)
        for connection in connections:
            connection.join(left() + 1.0)
        del self._server  # the threads that served its streams end with it

    def _dial(self, peer: int, address: str | None) -> None:
        assert address is not None
        for index, connection in enumerate(self._links[peer].connections):
            channel = open_channel(address, self._security, own_connection=True)
            self._channels.append(channel)
            hello = Hello(
                protocol=PROTOCOL,
                from_rank=self.rank,
                to_rank=peer,
                connection=index,
                num_connections=self._num_connections,
            ).SerializeToString()
            metadata: Any = (*token_metadata(self._security), (_HELLO_KEY, hello))
            connect: Any = channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
            call = connect(connection.outgoing(), metadata=metadata)
            connection.start(call, call, hello)

    def _accept(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Serve one stream that a peer opened, or refuse it."""
        hello = _hello_of(context)
        self._known.wait(self._connect_timeout_s)
        with self._accepting:
            refusal = self._refusal(hello)
            if refusal is None:
                connection = self._links[hello.from_rank].connections[hello.connection]
                connection.start(context, messages, None)
        if refusal is not None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        yield hello.SerializeToString()
        yield from connection.outgoing()

    def _refusal(self, hello: Hello) -> str | None:
        """Why a stream that starts with `hello` is not one this rank waits for."""
        peer, count = hello.from_rank, self._num_connections
        if hello.protocol != PROTOCOL:
            return f"rank {self.rank} speaks dpipe transport {PROTOCOL}, not {hello.protocol}: install one version"
        if hello.to_rank != self.rank:
            return f"rank {self.rank} listens here, not rank {hello.to_rank}: addresses are mixed up"
        if self._closed or peer not in self._links:
            return f"rank {self.rank} expects no link from rank {peer}"
        if hello.num_connections != count or hello.connection >= count:
            return f"rank {self.rank} has transport.connections = {count}, rank {peer} {hello.num_connections}"
        if self._links[peer].connections[hello.connection].call is not None:
            return f"rank {self.rank} has a link with rank {peer} already: two processes have one number"
        return None

    def _explain(self, peer: int, addresses: Mapping[int, str | None]) -> str:
        """What to check where the link with `peer` did not open."""
        end = self._links[peer].end
        if end.error is not None:
            return f"{end.peer_name}: {end.reason or end.error}"
        if _dials(self.rank, peer, addresses):
            return f"{end.peer_name} did not answer within {self._connect_timeout_s:g} s: {_CHECK}"
        return (
            f"{end.peer_name} has not dialled {addresses[self.rank]} within {self._connect_timeout_s:g} s: see what it "
            "says; that address (node.advertise, node.port) must be reachable from there"
        )


def _dials(rank: int, peer: int, addresses: Mapping[int, str | None]) -> bool:
    """Whether `rank` opens the link with `peer`; raises `JoinError` if neither has an address."""
    lower, higher = sorted((rank, peer))
    if addresses[lower] is None and addresses[higher] is None:
        raise JoinError(
            f"rank {lower} and rank {higher} cannot meet: neither has an address that the other can reach; "
            "set node.advertise on one of them"
        )
    dialler = lower if addresses[higher] is not None else higher
    return rank == dialler


def _hello_of(context: grpc.ServicerContext) -> Hello:
    """What the caller says of itself; one that says nothing is of protocol 0."""
    message: Any = dict(context.invocation_metadata()).get(_HELLO_KEY, b"")
    try:
        return Hello.FromString(message)
    except DecodeError:
        return Hello()


def _reason(error: grpc.RpcError, opened: bool) -> str:
    """What the end of a stream means. Only the end that dialled is told more than that it is over."""
    if not isinstance(error, grpc.Call):
        return "the connection broke"
    match error.code():
        case grpc.StatusCode.CANCELLED:
            return "it broke off the link"
        case grpc.StatusCode.UNAVAILABLE if not opened:
            return f"{error.details()}; {_CHECK}"
    return str(error.details())
