"""All links of one rank, over connections: who dials, who is refused, opening and closing.

    send --> MeshLink --> connection 0    the next piece of the next tensor,
                     `--> connection 1    to whichever can send
    recv <-- LinkEnd <--- the reader of each connection

A connection carries both directions, so it is enough that one end can be reached. transport.proto
says what is written on it.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Lock
from types import MappingProxyType
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch

from dpipe.errors import JoinError, TransferError
from dpipe.session.dial import dials, local_address
from dpipe.session.uplink import Uplink
from dpipe.streams import HOST, Streams
from dpipe.transport.base import Directory
from dpipe.transport.link import LinkEnd, Receiving, Sending
from dpipe.wire.message import Header, byte_view
from dpipe.wire.rpc import Security
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import Hello

PROTOCOL = 7  # of transport.proto; ranks of another are refused
MAX_LINKS = 64  # that may dial a rank at once
CHECK = (
    "check that it runs, that its node.advertise and node.port are right, that no firewall blocks "
    "the way, and that both ends use TLS with certificates of one authority (node.tls_*), or "
    "neither"
)
CLOSE_S = 5.0  # for the last sends to leave and the peer to answer
WAKE_S = 5.0  # poll interval of waits without a deadline of their own
_NO_SECURITY = Security()
_BY_ADDRESS: Mapping[int, str | None] = MappingProxyType({})


class Token(Enum):
    """What stands in a queue of tensors besides them."""

    LOOK_UP = "look up"  # whoever waits there has something else to see to


class Piece(NamedTuple):
    """A part of a tensor that is sent."""

    sending: Sending
    number: int


class Connection(ABC):
    """One stream of a link: it asks for a piece whenever it can send one."""

    def __init__(self, end: LinkEnd, index: int, num_connections: int, chunk_bytes: int) -> None:
        self.end = end
        self.index = index
        self.bytes_sent = 0
        self.claimed = False  # a stream for it is open, or is being opened
        self.opened = False
        self._num_connections = num_connections
        self._chunk_bytes = chunk_bytes
        self.on_ready: Callable[[], None] = lambda: None
        self.on_change: Callable[[], None] = lambda: None  # who should send
        self._asked = False
        self._queue: SimpleQueue[Piece | Literal[Token.LOOK_UP] | None] = SimpleQueue()

    @property
    def name(self) -> str:
        return f"{self.end.rank}-{self.end.peer}.{self.index}"

    @abstractmethod
    def cancel(self) -> None:
        """End the stream at once. From any thread, also before it is open."""

    @abstractmethod
    def join(self, timeout_s: float) -> None:
        """Wait for the stream's threads."""

    def is_broken(self) -> bool:
        """Whether what is given to it now would have to wait for another stream."""
        return False

    def outruns_loss(self) -> bool:
        """Whether its TCP sends on as fast where packets are lost at random."""
        return False

    def enqueue(self, piece: Piece | None) -> None:
        """Send this piece; None ends the stream."""
        self._queue.put(piece)

    def look_up(self) -> None:
        """Have `next_piece` return to whoever waits in it."""
        self._queue.put(Token.LOOK_UP)

    def open(self) -> None:
        with self.end.changed:
            self.opened = True
            self.end.changed.notify_all()

    def next_piece(self) -> Piece | Literal[Token.LOOK_UP] | None:
        """Ask for a piece to send, and wait for it; None where the stream shall end."""
        if not self._asked:
            self._asked = True
            self.on_ready()
        while True:
            try:
                given = self._queue.get(timeout=WAKE_S)
            except Empty:
                if self.end.error is not None:
                    return None
            else:
                self._asked = given is Token.LOOK_UP
                return given

    def chunks(self, piece: Piece) -> Iterator[memoryview]:
        """The bytes of a piece, in parts; one counts as sent when the next is asked for."""
        sending = piece.sending
        assert sending.view is not None
        view = part(sending.view, piece.number, sending.num_pieces)
        # Also of an empty tensor: by its header it arrives.
        for start in range(0, max(1, len(view)), self._chunk_bytes):
            chunk = view[start : start + self._chunk_bytes]
            yield chunk
            self.bytes_sent += len(chunk)

    def arrive(self, header: Header, least: int) -> tuple[Receiving, memoryview] | None:
        """The tensor after `header`, of number `least` or more, and the memory of its piece; None
        once this end is closing.
        """
        # A connection keeps its order, and alone it carries all.
        misses = header.sequence > least and self._num_connections == 1
        if header.sequence < least or misses:
            raise TransferError(
                f"{self.end.peer_name} sent tensor {header.sequence} where {least} belongs"
            )
        receiving = self.end.arrive(header)
        if receiving is None:
            return None
        assert receiving.tensor is not None
        if header.piece >= receiving.num_pieces:
            raise TransferError(
                f"{self.end.peer_name} sent piece {header.piece} of tensor {header.sequence}, "
                f"which has {receiving.num_pieces}"
            )
        view = byte_view(receiving.tensor)
        return receiving, part(view, header.piece, receiving.num_pieces)


def part(view: memoryview, index: int, count: int) -> memoryview:
    """One of `count` parts, by the same formula at both ends; they differ by a byte at most."""
    start = len(view) * index // count
    end = len(view) * (index + 1) // count
    return view[start:end]


ConnectionT = TypeVar("ConnectionT", bound=Connection)


class MeshLink(Generic[ConnectionT]):
    """A `LinkEnd` with the connections that carry it."""

    def __init__(
        self,
        end: LinkEnd,
        connections: list[ConnectionT],
        one_outruns_loss: bool = False,
    ) -> None:
        self.end = end
        self.connections = connections
        self._one_outruns_loss = one_outruns_loss
        self._lock = Lock()  # guards what is below
        self._pieces: deque[Piece] = deque()
        self._idle: deque[ConnectionT] = deque()  # those that can send, the longest idle first
        self._ended = False
        for connection in connections:
            connection.on_ready = partial(self._ready, connection)
            connection.on_change = self._look_again
        end.on_broken = self._cancel

    def enqueue(self, sending: Sending | None) -> None:
        """Send this tensor; None ends the connections behind what is queued."""
        with self._lock:
            if sending is None:
                self._ended = True
            else:
                self._pieces += self._cut(sending)
            self._hand_out()

    def _cut(self, sending: Sending) -> list[Piece]:
        # Each piece costs its two ends as much as a message: none for the sake of others.
        if self._one_will_do():
            sending.leave_whole()
        return [Piece(sending, number) for number in range(sending.num_pieces)]

    def _ready(self, connection: ConnectionT) -> None:
        with self._lock:
            self._idle.append(connection)
            self._hand_out()

    def _look_again(self) -> None:
        with self._lock:
            self._hand_out()

    def _hand_out(self) -> None:
        while self._pieces and (connection := self._next_idle()) is not None:
            self._idle.remove(connection)
            connection.enqueue(self._pieces.popleft())
        while self._ended and self._idle and not self._pieces:
            self._idle.popleft().enqueue(None)

    def _next_idle(self) -> ConnectionT | None:
        """Who should send the next piece; None where all who should are busy."""
        asked = self._unbroken()[:1] if self._one_will_do() else self._unbroken()
        return next((each for each in self._idle if each in asked), None)

    def _unbroken(self) -> list[ConnectionT]:
        """All, if all are broken."""
        return [each for each in self.connections if not each.is_broken()] or self.connections

    def _one_will_do(self) -> bool:
        return self._one_outruns_loss and self._unbroken()[0].outruns_loss()

    def wait_open(self, timeout_s: float) -> bool:
        """Whether all connections open within `timeout_s`; gives up at once on an error."""

        def settled() -> bool:
            return self.end.error is not None or all(c.opened for c in self.connections)

        with self.end.changed:
            return self.end.changed.wait_for(settled, timeout_s) and self.end.error is None

    def _cancel(self) -> None:
        for connection in self.connections:
            connection.cancel()


class Mesh(ABC, Generic[ConnectionT]):
    """A transport between processes. Opened in two steps, since addresses are known only when all
    ranks listen:

    transport = TcpTransport(rank)           listens on transport.port
    transport.connect(addresses, peers)      opens and checks every link
    ...                                      send, recv
    transport.close()                        its threads may keep a process alive until then
    """

    connection_type: type[ConnectionT]

    def __init__(
        self,
        rank: int,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        security: Security = _NO_SECURITY,
        connections: int = 1,
        one_outruns_loss: bool = False,
        uplink_bytes_per_s: float = math.inf,
        chunk_bytes: int = 1 << 20,
        buffer_bytes: int = 256 << 20,
        congestion_control: str = "auto",
        transfer_timeout_s: float = 300.0,
        connect_timeout_s: float = 20.0,
        heartbeat_s: float = 40.0,
        streams: Streams = HOST,
    ) -> None:
        """Listen; raises `JoinError` where it cannot. A link holds at most `buffer_bytes` that no
        receive has asked for. A peer that cannot be reached for `heartbeat_s` is lost, where
        nobody has heard of its end before. `congestion_control` is TCP's, of transports that can
        set it; `ConfigError` says that this host does not allow it. With `one_outruns_loss` one of
        the `connections` carries all while its TCP takes no loss for congestion. See `Uplink`.
        """
        self.rank = rank
        self._congestion_control = congestion_control
        self._num_connections = connections
        self._one_outruns_loss = one_outruns_loss
        self._uplink = Uplink(uplink_bytes_per_s)
        self._chunk_bytes = chunk_bytes
        self._connect_timeout_s = connect_timeout_s
        self._transfer_timeout_s = transfer_timeout_s
        self._heartbeat_s = heartbeat_s
        self._end_options: dict[str, Any] = {
            "num_connections": connections,
            "buffer_bytes": buffer_bytes,
            "timeout_s": transfer_timeout_s,
            "streams": streams,
        }
        self._links: dict[int, MeshLink[ConnectionT]] = {}
        self._routes: dict[int, str | None] = {}  # where this rank dials; None: the peer does
        self._failing = Lock()  # guards `_failed`: an abort may come before there are links
        self._failed: Exception | None = None
        self._peers_known = Event()  # from then on a dialler can be accepted or refused
        self._claiming = Lock()  # two diallers must not get one connection
        self._closing = Lock()  # a second call waits for the first
        self._closed = False
        self.port = self._listen(bind, port, security)
        self._here = local_address(bind, self.port)

    @abstractmethod
    def _listen(self, bind: str, port: int, security: Security) -> int:
        """Let peers dial from now on. Returns the port: `port`, or a free one for 0."""

    @abstractmethod
    def _dial(self, connection: ConnectionT, address: str, hello: Hello, deadline: float) -> None:
        """Begin to open a stream to `address` and return at once; an error breaks the link."""

    @abstractmethod
    def _stop(self, deadline: float) -> None:
        """End the listener and all that carries streams, open or not."""

    def connect(
        self,
        addresses: Mapping[int, str | None],
        peers: Collection[int],
        routes: Mapping[int, str | None] = _BY_ADDRESS,
    ) -> None:
        """Open and check every link with `peers`, in both directions.

        The lower rank dials the higher one, unless the higher one has no address (it is behind a
        NAT): then the other way round; and unless `routes` says where else a peer is dialled, or
        None for one that dials. All ranks call this at about the same time. Raises
        `JoinError` naming each peer that cannot be reached, its address, and what to check; or the
        error that this rank was told to `fail` with, before or meanwhile.
        """
        for peer in peers:
            self._routes[peer] = routes.get(peer)
            if peer not in routes and dials(self.rank, peer, addresses):
                self._routes[peer] = addresses[peer]
        with self._failing:
            self._raise_if_failed()
            for peer in peers:
                self._links[peer] = self._new_link(peer, addresses[peer])
        # Only now: a dialler that was faster waits in `claim` for the links it belongs to.
        self._peers_known.set()
        # One deadline for all of them, however many there are.
        deadline = time.monotonic() + self._connect_timeout_s
        for peer, route in self._routes.items():
            if route is not None:
                self._dial_all(peer, route, deadline)
        blocked = []
        for peer, link in self._links.items():
            if not link.wait_open(max(0.0, deadline - time.monotonic())):
                blocked.append(self._explain(peer, addresses))
        self._raise_if_failed()
        if blocked:
            raise JoinError("\n  ".join([f"rank {self.rank} cannot open every link:", *blocked]))

    def _new_link(self, peer: int, address: str | None) -> MeshLink[ConnectionT]:
        end = LinkEnd(self.rank, peer, address, **self._end_options)
        count = self._num_connections
        connections = [self._new_connection(end, index) for index in range(count)]
        return MeshLink(end, connections, self._one_outruns_loss)

    def _new_connection(self, end: LinkEnd, index: int) -> ConnectionT:
        return self.connection_type(end, index, self._num_connections, self._chunk_bytes)

    def prepare(self, directory: Directory, peers: Collection[int]) -> None:
        routes = directory.routes(self._here, peers, self._connect_timeout_s)
        self.connect(directory.addresses, peers, routes)

    def rehearse(self, step: Callable[[], None]) -> None:
        """Not needed: receives wait on the host, where they hold up nothing on a device."""

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> Sending:
        link = self._links[peer]
        return link.end.send(tensor, tag, link.enqueue)

    def recv(
        self, like: TensorSpec, peer: int, tag: str, into: torch.Tensor | None = None
    ) -> Receiving:
        return self._links[peer].end.post(like, tag, into)

    def bytes_sent(self, peer: int) -> int:
        """Bytes of tensors handed to the network for `peer` so far."""
        return sum(connection.bytes_sent for connection in self._links[peer].connections)

    def fail(self, error: Exception) -> None:
        """As the contract says; `connect` raises `error` too. `close` is still needed."""
        with self._failing:  # `connect` has made all links, or will make none
            self._failed = error
        for link in self._links.values():
            link.end.break_off(error, failed=True)

    def close(self) -> None:
        """Wait at most 5 s for queued sends to leave, then end every stream and thread."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._peers_known.set()
                self._close(time.monotonic() + CLOSE_S)

    def claim(self, hello: Hello) -> ConnectionT:
        """The connection that a peer with this `hello` has dialled, now taken. Raises `JoinError`
        where this rank waits for no such connection, and waits until it knows that.
        """
        self._peers_known.wait(self._connect_timeout_s)
        with self._claiming:
            refusal = self._refusal(hello)
            if refusal is not None:
                raise JoinError(refusal)
            connection = self._links[hello.from_rank].connections[hello.connection]
            connection.claimed = True
            return connection

    def _raise_if_failed(self) -> None:
        if self._failed is not None:
            raise self._failed

    def _dial_all(self, peer: int, address: str, deadline: float) -> None:
        for connection in self._links[peer].connections:
            connection.claimed = True
            self._dial(connection, address, self.hello(connection), deadline)

    def hello(self, connection: ConnectionT) -> Hello:
        """What this rank says as it dials."""
        return Hello(
            protocol=PROTOCOL,
            from_rank=self.rank,
            to_rank=connection.end.peer,
            connection=connection.index,
            num_connections=self._num_connections,
        )

    def _close(self, deadline: float) -> None:
        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        for link in self._links.values():
            link.end.drain(left())
            link.enqueue(None)
        connections: list[ConnectionT] = []
        for link in self._links.values():
            connections += link.connections
        for connection in connections:
            connection.join(left())
        # Only now: what breaks a link cancels its connections.
        for link in self._links.values():
            link.end.close()
        self._stop(deadline)
        for connection in connections:
            connection.join(left() + 1.0)

    def _refusal(self, hello: Hello) -> str | None:
        """Why this rank does not take a connection; None if it does."""
        peer = hello.from_rank
        count = self._num_connections
        if hello.protocol != PROTOCOL:
            return (
                f"rank {self.rank} speaks dpipe transport {PROTOCOL}, not {hello.protocol}: "
                "install one version"
            )
        if hello.to_rank != self.rank:
            return (
                f"rank {self.rank} listens here, not rank {hello.to_rank}: addresses are mixed up"
            )
        if self._closed or peer not in self._links:
            return f"rank {self.rank} expects no link from rank {peer}"
        if hello.num_connections != count or hello.connection >= count:
            return (
                f"rank {self.rank} has transport.connections = {count}, rank {peer} "
                f"{hello.num_connections}"
            )
        if self._links[peer].connections[hello.connection].claimed:
            return (
                f"rank {self.rank} has a link with rank {peer} already: two processes have one "
                "number"
            )
        return None

    def _explain(self, peer: int, addresses: Mapping[int, str | None]) -> str:
        """What to check where the link with `peer` did not open."""
        end = self._links[peer].end
        if end.error is not None:
            return f"{end.peer_name}: {end.reason or end.error}"
        if self._routes[peer] is not None:
            return f"{end.peer_name} did not answer within {self._connect_timeout_s:g} s: {CHECK}"
        return (
            f"{end.peer_name} has not dialled {addresses[self.rank]} within "
            f"{self._connect_timeout_s:g} s: see what it says; that address (node.advertise, "
            "node.port) must be reachable from there"
        )
