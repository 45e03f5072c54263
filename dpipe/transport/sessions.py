"""A mesh whose connections break and are dialled again, whatever carries them.

    rank 1 (lower: dials)                            rank 2
    send --> MeshLink --> writer 0 --> session 0 ===> reader 0 --> pieces of the tensor --.
                     `-> writer 1 --> session 1 ===> reader 1 --> its other pieces --------> recv
    recv <-- both readers <-------- both sessions <== both writers <-- MeshLink <-- send

Each connection has two threads, and one while it is opened; over gRPC the writer is a thread of
gRPC's own. The end that has dialled one dials it again: see session/session.py. tcp.py and grpc.py
say how a connection is opened and answered.
"""

import logging
import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from threading import Event, Thread

from dpipe.errors import JoinError, TransferError, TransferTimeout
from dpipe.session.dial import smaller
from dpipe.session.frames import Frames
from dpipe.session.greeting import Greeted
from dpipe.session.lobby import Lobby
from dpipe.session.redial import GREETING_S, dial_again
from dpipe.session.session import LinkSession, reason_of
from dpipe.session.stops import Stops
from dpipe.session.uplink import Uplink
from dpipe.transport.link import LinkEnd
from dpipe.transport.mesh import CHECK, Connection, Mesh, Token
from dpipe.wire.message import PREFIX_BYTES, Header, framed, framed_size
from dpipe.wire.rpc import Security
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

LOG = logging.getLogger("dpipe")
_WATCHES = 160  # looks at each connection in `heartbeat_s`, in which it is to be heard 32 times
_LEAST_KEPT_BYTES = 16 << 20  # by far more than a session lets pass without acknowledging it
_END = bytes(PREFIX_BYTES)  # a header of no bytes: no more tensors


class SessionConnection(Connection):
    """A session, with a thread that reads and something that writes."""

    def __init__(
        self,
        end: LinkEnd,
        index: int,
        num_connections: int,
        chunk_bytes: int,
        *,
        heartbeat_s: float,
        kept_bytes: float,
        uplink: Uplink,
    ) -> None:
        super().__init__(end, index, num_connections, chunk_bytes)
        self.session = LinkSession(
            heartbeat_s,
            most_kept_bytes=kept_bytes,
            may_resume=self._may_resume,
            on_break=self._broke,
        )
        self._uplink = uplink
        self.on_break: Callable[[], None] = lambda: None  # of the end that dials
        self.segment: int | None = None  # bytes; None for what the path takes
        self._threads: list[Thread] = []

    def is_broken(self) -> bool:
        return self.session.stream is None

    def outruns_loss(self) -> bool:
        stream = self.session.stream
        return stream is not None and stream.outruns_loss()

    def start(self, frames: Frames) -> None:
        self.session.attach(frames, 0, 0)
        self.spawn("read", self._read)
        self.begin_writing()
        self.open()

    def begin_writing(self) -> None:
        """From now on, write what is queued; on later connections too."""
        self.spawn("write", self._write)

    def send_again(self) -> None:
        """On a connection that has taken the place of another: write what that one has lost."""
        self.session.send_again()

    def spawn(self, verb: str, run: Callable[[], None]) -> None:
        thread = Thread(target=run, name=f"dpipe-{verb}-{self.name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def cancel(self) -> None:
        self.enqueue(None)
        self.session.close()

    def join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if not any(thread.is_alive() for thread in self._threads):
            self.session.release()

    def _broke(self) -> None:
        self.on_change()
        self.on_break()

    def _may_resume(self) -> bool:
        return self.end.error is None and not self.end.closing

    def _write(self) -> None:
        for _ in self.writing():
            while not self.session.has_room():
                self.session.await_room()

    def writing(self) -> Iterator[None]:
        """All that is ever written. Stops behind each chunk, and to look up."""
        try:
            while (piece := self.next_piece()) is not None:
                if piece is Token.LOOK_UP:
                    yield
                    continue
                sending = piece.sending
                sending.await_device()
                lead = framed(sending.header._replace(piece=piece.number).encode())
                num_bytes = sending.header.spec.num_bytes // sending.num_pieces
                with self._uplink.turn(num_bytes, self.session.stream):
                    sending.begin()
                    for chunk in self.chunks(piece):
                        sending.keep(self.session.write(lead, chunk))
                        lead = b""
                        yield
                sending.end_piece()
            # Said, because the kernel ends the stream of a process that dies as well.
            self.session.write(_END, memoryview(b""))
            self.session.end()
        except OSError as error:
            self.end.lose(f"the connection broke: {reason_of(error)}")
        except TransferTimeout:
            pass  # the device never gave the bytes; `await_device` has broken the link

    def _read(self) -> None:
        session = self.session
        try:
            least = 0
            while True:
                header = self._read_header()
                if header is None:
                    return self.end.end_stream()
                arrived = None if self.end.closing else self.arrive(header, least)
                if arrived is None:
                    # To the peer's end of the stream: a socket that is closed with bytes unread
                    # resets the connection, and the peer loses what it was sent last.
                    session.skip()
                    return self.end.end_stream()
                receiving, piece = arrived
                session.read(piece)
                receiving.end_piece()
                # Alone, a connection brings each tensor once.
                least = header.sequence + (self._num_connections == 1)
        except OSError as error:
            self._end_or_lose(f"the connection broke: {reason_of(error)}")
        except Exception as error:  # this end found it wrong: wait() raises it
            self.end.break_off(error)

    def _end_or_lose(self, reason: str) -> None:
        # As this end closes, a connection that has said all may be gone before the others have: to
        # lose the link would cut them short.
        if self.end.closing and self.session.has_ended:
            self.end.end_stream()
        else:
            self.end.lose(reason)

    def _read_header(self) -> Header | None:
        prefix = bytearray(PREFIX_BYTES)
        self.session.read(memoryview(prefix))
        if prefix == _END:
            return None
        message = bytearray(framed_size(bytes(prefix)))
        self.session.read(memoryview(message))
        return Header.decode(bytes(message))


@dataclass(frozen=True)
class Called:
    """A connection that was dialled, and whose other end has greeted."""

    frames: Frames
    greeted: Greeted
    confirm: Callable[[], None]  # that the state of a session that goes on was heard


class SessionMesh(Mesh[SessionConnection]):
    """Opens connections, and opens them again. Its `_listen` begins with `_open_lobby`."""

    connection_type: type[SessionConnection] = SessionConnection
    look_s = math.inf  # how often connections are looked at, at the least

    @abstractmethod
    def _call(
        self,
        connection: SessionConnection,
        address: str,
        hello: Hello,
        secret: bytes,
        deadline: float,
    ) -> AbstractContextManager[Called]:
        """Dial `address` and greet whoever is there; closed where the block raises. Raises as
        `greeting.call` does, and `OSError` and `ValueError` where nobody is.
        """

    def _open_lobby(self, security: Security) -> None:
        self._security = security
        self._lobby = Lobby()
        self._stopping = Event()
        self._watcher = Thread(target=self._watch, name=f"dpipe-watch-{self.rank}", daemon=True)
        self._watcher.start()

    def _close_lobby(self, deadline: float) -> None:
        self._stopping.set()
        self._watcher.join(max(0.0, deadline - time.monotonic()) + 1.0)
        self._lobby.close(deadline + 1.0)

    def _new_connection(self, end: LinkEnd, index: int) -> SessionConnection:
        count = self._num_connections
        return self.connection_type(
            end,
            index,
            count,
            self._chunk_bytes,
            heartbeat_s=self._heartbeat_s,
            # Sent and not acknowledged, as much as a peer may send that is not asked for.
            kept_bytes=max(_LEAST_KEPT_BYTES, self._end_options["buffer_bytes"] / count),
            uplink=self._uplink,
        )

    # Dialling

    def _dial(
        self, connection: SessionConnection, address: str, hello: Hello, deadline: float
    ) -> None:
        first = partial(self._dial_first, connection, address, hello, deadline)
        again = partial(self._dial_again, connection, address)
        name = f"dpipe-dial-{connection.name}"
        connection.on_break = lambda: self._lobby.spawn(again, name)
        self._lobby.spawn(first, name)

    def _dial_first(
        self, connection: SessionConnection, address: str, hello: Hello, deadline: float
    ) -> None:
        end = connection.end
        token = self._security.tokens()[0].encode()
        try:
            with self._call(connection, address, hello, token, deadline) as called:
                connection.session.secret = called.greeted.secret
                connection.start(called.frames)
        except TimeoutError:
            pass  # `connect`, which has the same deadline, says what to check
        except (OSError, ValueError) as error:
            end.lose(f"{reason_of(error)}; {CHECK}")
        except JoinError as refusal:
            end.lose(str(refusal))
        except TransferError as error:
            end.break_off(TransferError(f"{end.peer_name} is no dpipe transport: {error}"))

    def _dial_again(self, connection: SessionConnection, address: str) -> None:
        session = connection.session
        broke_at = time.monotonic()
        made_smaller = session.stalled
        if made_smaller:
            connection.segment = smaller(connection.segment)

        def resume() -> bool:
            nonlocal made_smaller
            if self._resume(connection, address, may_stall=made_smaller):
                return True
            made_smaller = True
            connection.segment = smaller(connection.segment)
            return False

        if dial_again(session, resume, self._stopping, session.silence_s / 2):
            self._log_resumed(connection, broke_at)
            connection.send_again()

    def _resume(self, connection: SessionConnection, address: str, *, may_stall: bool) -> bool:
        """Go on with the session on a new connection, unless it would stall as the last one."""
        session = connection.session
        hello = self.hello(connection)
        hello.resumes = True
        hello.received = session.received
        deadline = time.monotonic() + GREETING_S
        with self._call(connection, address, hello, session.secret, deadline) as called:
            greeted = called.greeted
            if greeted.stalled and not may_stall:
                called.frames.stream.close()
                return False
            called.confirm()
            session.attach(called.frames, greeted.received, hello.received)
        return True

    # Being dialled

    def _connection_of(self, hello: Hello) -> SessionConnection | None:
        link = self._links.get(hello.from_rank)
        if link is None or hello.connection >= len(link.connections):
            return None
        return link.connections[hello.connection]

    def _detach(self, connection: SessionConnection, hello: Hello) -> Greeting:
        """Let go of a connection whose other end dials again, and has proved its secret. Returns
        what has arrived here. Raises `DpipeError` where this end does not go on.
        """
        end = connection.end
        if end.error is not None or end.closing:
            raise JoinError(f"rank {self.rank} has given up its link with rank {end.peer}")
        session = connection.session
        session.check_arrived(hello.received)
        return Greeting(received=session.detach(), stalled=session.stalled)

    def _log_resumed(self, connection: SessionConnection, broke_at: float) -> None:
        LOG.warning(
            "rank %d: connection %d with %s broke (%s); it was opened again and continues, after "
            "%.1f s",
            self.rank,
            connection.index,
            connection.end.peer_name,
            connection.session.why,
            time.monotonic() - broke_at,
        )

    def _watch(self) -> None:
        """Notice connections that have fallen silent, and keep this end's from being so."""
        interval_s = self._heartbeat_s / _WATCHES
        stops = Stops(interval_s, self._heartbeat_s)
        while not self._stopping.wait(min(interval_s, self.look_s)):
            now = time.monotonic()
            stops.tick(now)
            for link in tuple(self._links.values()):
                for connection in link.connections:
                    connection.session.watch(now, stops)
                    connection.session.keep_warm(now)
