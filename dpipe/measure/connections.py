"""The open connections between every two ranks, which have proved to each other who they are.

    rank 0 (lower: dials)                   rank 1
    connection 0 for notes    ==========>   greeting, then silence until a round begins
    connections 1, 2, ...     ==========>   for bytes: as many as may fill so long a link

All are opened before the first round: an address that does not answer costs one deadline, whoever
it belongs to, and no round waits for it. Where the higher rank cannot be dialled, it dials.
"""

import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from threading import BoundedSemaphore, Event, Lock, Thread
from types import MappingProxyType

from dpipe.errors import DpipeError, JoinError
from dpipe.measure.notes import Notes
from dpipe.network.link import MAX_CONNECTIONS, Link
from dpipe.session import greeting
from dpipe.session.dial import dial, dials, local_address
from dpipe.session.listen import open_listener
from dpipe.session.session import reason_of
from dpipe.session.stream import Tls, shut, tune
from dpipe.transport.mesh import PROTOCOL
from dpipe.wire.rpc import Security
from dpipe.wire.text import visible
from dpipe.wire.v1.transport_pb2 import Hello

_NO_SECURITY = Security()
_NOTES = 0  # the number of the connection for notes
_FASTEST_GBPS = 10.0  # a link that shall be filled
_MOST_SOCKETS = 900  # of 1024 files that a process may usually open
_GREETING_S = 5.0  # for a dialler to say who it is
_WAKE_S = 1.0
_DIALLERS = 32  # threads
_STRANGERS = 64  # diallers at once that have not said who they are
_REASON_CHARACTERS = 500
_SILENT_S = 20.0  # after which the kernel breaks a connection whose other end answers nothing


@dataclass
class PeerSockets:
    """The connections with one other rank, by their number."""

    opened: dict[int, socket.socket] = field(default_factory=dict)
    notes: Notes | None = None

    @property
    def complete(self) -> bool:
        return _NOTES in self.opened and len(self.opened) > 1

    @property
    def data(self) -> list[socket.socket]:
        return [sock for number, sock in self.opened.items() if number != _NOTES]


class Connections:
    """Of one rank with all others. It listens from the constructor until `close()`."""

    def __init__(
        self,
        rank: int,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        security: Security = _NO_SECURITY,
    ) -> None:
        """Raises `JoinError` where it cannot listen."""
        self.rank = rank
        self.peers: dict[int, PeerSockets] = {}
        self._security = security
        self._tls = Tls(security) if security.tls else None
        self._lock = (
            Lock()
        )  # guards `peers`, `_closed` and `_sealed` against the threads that greet
        self._sealed = False
        self._closed = Event()
        self._expecting = Event()  # from then on it is known who may dial
        self._world_size = 0
        self._link_secrets: Mapping[int, bytes] = {}
        self._strangers = BoundedSemaphore(_STRANGERS)
        self._listener = open_listener(bind, port)
        self.port = int(self._listener.getsockname()[1])
        self.here = local_address(bind, self.port)
        self._greeters = ThreadPoolExecutor(_DIALLERS, f"dpipe-greet-{rank}")
        self._accepting = Thread(target=self._accept, name=f"dpipe-accept-{rank}", daemon=True)
        self._accepting.start()

    def open(
        self,
        addresses: Mapping[int, str | None],
        timeout_s: float,
        link_secrets: Mapping[int, bytes] = MappingProxyType({}),
        routes: Mapping[int, str | None] = MappingProxyType({}),
    ) -> dict[int, str]:
        """Dial all that this rank has to dial, within `timeout_s`; returns why the others are not
        there, by rank. The connections of ranks that dial this one come meanwhile. Each proves that
        it knows `link_secrets` of the other, by rank, besides the token: no third rank can.
        `routes` are those of `Coordination`.
        """
        self._world_size = len(addresses)
        self._link_secrets = link_secrets
        self._expecting.set()
        deadline = time.monotonic() + timeout_s
        targets, reasons = self._to_dial(addresses, routes)
        with ThreadPoolExecutor(_DIALLERS, f"dpipe-dial-{self.rank}") as pool:
            first = {}
            for peer, address in targets.items():
                first[peer] = pool.submit(self._first, peer, address, deadline)
            more = []
            for peer, opened in first.items():
                count, reasons[peer] = opened.result()
                for number in range(1, count + 1):
                    one = pool.submit(self._dial, peer, number, targets[peer], deadline)
                    more.append((peer, one))
            for peer, one in more:
                reasons[peer] = reasons[peer] or one.result()
        return {peer: reason for peer, reason in reasons.items() if reason}

    def _to_dial(
        self, addresses: Mapping[int, str | None], routes: Mapping[int, str | None]
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Whom this rank dials, and where; and why it cannot meet some others at all."""
        targets = {}
        reasons = {}
        for peer, address in addresses.items():
            if peer == self.rank:
                continue
            if peer in routes:
                route = routes[peer]
                if route is not None:
                    targets[peer] = route
                continue
            try:
                if dials(self.rank, peer, addresses):
                    targets[peer] = address or ""
            except JoinError as neither_has_an_address:
                reasons[peer] = str(neither_has_an_address)
        return targets, reasons

    def seal(self) -> None:
        """All that could be opened has been: take no more connections, and make these ready for
        use. Half of a pair's connections are none.
        """
        with self._lock:
            self._sealed = True
        for peer, sockets in list(self.peers.items()):
            if not sockets.complete:
                self.drop(peer)
                continue
            sockets.notes = Notes(sockets.opened[_NOTES])
            for sock in sockets.data:
                sock.setblocking(False)

    def drop(self, peer: int) -> None:
        """Close what is open with `peer`."""
        with self._lock:
            gone = self.peers.pop(peer, None)
        for sock in [] if gone is None else gone.opened.values():
            shut(sock)
            sock.close()

    def interrupt(self) -> None:
        """Let every wait on a connection end with an error. From any thread."""
        with self._lock:
            for peer in self.peers.values():
                for sock in peer.opened.values():
                    shut(sock)

    def close(self) -> None:
        with self._lock:
            self._closed.set()
        self._expecting.set()
        shut(self._listener)
        self._accepting.join(2 * _WAKE_S)
        self._listener.close()
        self._greeters.shutdown(cancel_futures=True)
        for peer in list(self.peers):
            self.drop(peer)

    # Dialling

    def _first(self, peer: int, address: str, deadline: float) -> tuple[int, str]:
        """Open the connection for notes; how many for bytes are to follow, or why none can."""
        began = time.monotonic()
        reason = self._dial(peer, _NOTES, address, deadline)
        if reason:
            return 0, reason
        # A handshake and a greeting take three round trips, and four with TLS.
        round_trip_ms = (time.monotonic() - began) * 1e3 / 3
        wanted = Link(round_trip_ms / 2, _FASTEST_GBPS).connections
        most = max(1, _MOST_SOCKETS // self._world_size - 1)
        return min(wanted, most, MAX_CONNECTIONS), ""

    def _dial(self, peer: int, number: int, address: str, deadline: float) -> str:
        """Open one connection; "" or why it could not be."""
        hello = Hello(
            protocol=PROTOCOL,
            from_rank=self.rank,
            to_rank=peer,
            connection=number,
        )
        try:
            raw = dial(address, max(0.001, deadline - time.monotonic()))
            with self._secured(raw, deadline, server=False) as sock:
                greeting.call(sock, hello, self._secrets_of(peer)[0], deadline)
                self._keep(peer, number, sock)
        except TimeoutError:
            return f"rank {peer} at {address} does not answer"
        except (OSError, ValueError, DpipeError) as error:
            # A peer may say what it likes, and as long as it likes.
            return visible(f"rank {peer} at {address}: {reason_of(error)}"[:_REASON_CHARACTERS])
        return ""

    # Being dialled

    def _accept(self) -> None:
        while not self._closed.is_set():
            if not self._strangers.acquire(timeout=_WAKE_S):
                continue
            try:
                raw, _ = self._listener.accept()
                self._greeters.submit(self._answer, raw)
            except (OSError, RuntimeError):  # nobody dialled, or this end is closing
                self._strangers.release()
                self._closed.wait(0.01)

    def _answer(self, raw: socket.socket) -> None:
        deadline = time.monotonic() + _GREETING_S
        try:
            with self._secured(raw, deadline, server=True) as sock:
                dialler = greeting.answer(sock, self._secrets_for, deadline)
                try:
                    # Before the dialler hears of it: what it counts as open is open here too.
                    self._admit(dialler.hello, sock)
                except JoinError as refusal:
                    greeting.refuse(sock, str(refusal), deadline)
                    raise
                greeting.welcome(sock, dialler, deadline)
        except (OSError, ValueError, DpipeError):
            pass  # a stranger, told so if it greeted
        finally:
            self._strangers.release()

    def _secrets_for(self, hello: Hello) -> tuple[bytes, ...]:
        """Of which the dialler has to prove one."""
        self._expecting.wait(_GREETING_S)  # from then on they are known here
        return self._secrets_of(hello.from_rank)

    def _secrets_of(self, peer: int) -> tuple[bytes, ...]:
        link_secret = self._link_secrets.get(peer, b"")
        return tuple(token.encode() + link_secret for token in self._security.tokens())

    def _admit(self, hello: Hello, sock: socket.socket) -> None:
        refusal = self._refusal(hello)
        if refusal:
            raise JoinError(refusal)
        self._keep(hello.from_rank, hello.connection, sock)

    def _refusal(self, hello: Hello) -> str:
        self._expecting.wait(_GREETING_S)
        if hello.protocol != PROTOCOL or hello.resumes:
            return f"rank {self.rank} speaks dpipe transport {PROTOCOL}: install one version"
        if hello.to_rank != self.rank:
            return f"rank {self.rank} listens here, not rank {hello.to_rank}"
        if hello.from_rank == self.rank or not 0 <= hello.from_rank < self._world_size:
            return f"rank {self.rank} knows no rank {hello.from_rank}"
        if not 0 <= hello.connection <= MAX_CONNECTIONS:
            return f"rank {self.rank} takes no connection {hello.connection}"
        return ""

    # Both

    @contextmanager
    def _secured(
        self, raw: socket.socket, deadline: float, *, server: bool
    ) -> Iterator[socket.socket]:
        """`raw`, with TLS where it is on; closed where the block raises."""
        sock = raw
        try:
            tune(raw, _SILENT_S, _SILENT_S)
            with suppress(OSError):
                # Cubic ends its slow start at a hint of queueing (HyStart), and then needs minutes
                # to fill a long link; what is in flight is bounded by `traffic.py` anyway.
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
            if self._tls is not None:
                sock = self._tls.wrap(raw, server=server)
            if isinstance(sock, ssl.SSLSocket):
                greeting.set_deadline(sock, deadline)
                sock.do_handshake()
            yield sock
        except BaseException:
            sock.close()
            raise

    def _keep(self, peer: int, number: int, sock: socket.socket) -> None:
        """Raises `JoinError` for a connection that there is already, or where this end closes."""
        with self._lock:
            sockets = self.peers.setdefault(peer, PeerSockets())
            if self._sealed or self._closed.is_set() or number in sockets.opened:
                raise JoinError(
                    f"rank {self.rank} takes no further connection {number} with rank {peer}"
                )
            sockets.opened[number] = sock
