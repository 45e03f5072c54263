"""A rank's ends of the links that the relay passes.

    transport --dials--> doorway, a port of this machine ══▶ relay      as the lower rank of a link
    relay ══▶ ear ──dials──▶ this rank's own listener                   as the higher one

Either way the bytes of one local connection go through one gRPC stream, whose flow control holds up
whoever writes faster than the other end reads. A connection that ends, ends its stream, and the
other way round: the relay tells the other rank at once.
"""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import closing, suppress
from functools import partial
from threading import Event, Lock, Thread
from typing import Any

import grpc

from dpipe.relay.server import METHOD, NO_MORE, PROTOCOL, proof_of
from dpipe.session.dial import dial
from dpipe.session.grpc_stream import hello_metadata, why_ended
from dpipe.session.stream import shut
from dpipe.wire.rpc import Security, open_channel
from dpipe.wire.v1.transport_pb2 import Hello

LOG = logging.getLogger("dpipe")
_READ_BYTES = 256 << 10  # the most in a message
_DIAL_S = 5.0  # for this rank's own listener
_ACCEPT_S = 1.0  # poll interval of a doorway
_AGAIN_S = 0.2  # between streams of an ear, where the last one broke
_JOIN_S = 2.0
_EARS = 4  # that wait for a peer: to open one takes round trips, and a link has many connections
_REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED)


class RelayEnds:
    """Of one rank, toward the relay at `address`. `link_secrets` are by the other rank."""

    def __init__(
        self,
        rank: int,
        address: str,
        security: Security,
        link_secrets: Mapping[int, bytes],
        silence_s: float,
    ) -> None:
        self._rank = rank
        self._address = address
        self._security = security
        self._link_secrets = link_secrets
        self._silence_s = silence_s
        self._closed = Event()
        self._lock = Lock()  # guards what is below
        self._calls: set[_Call] = set()
        self._threads: list[Thread] = []

    def doorway(self, peer: int) -> str:
        """Where this process can dial `peer`, as often as it likes, until `close`."""
        listener = socket.create_server(("127.0.0.1", 0))
        listener.settimeout(_ACCEPT_S)
        self._spawn(partial(self._keep_open, listener, peer), f"door-{peer}")
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def listen(self, peer: int, here: str) -> None:
        """From now on `peer` reaches `here`, a `host:port` of this machine, through the relay."""
        for _ in range(_EARS):
            self._spawn(partial(self._answer, peer, here), f"ear-{peer}")

    def close(self) -> None:
        """End all that is open, at once."""
        self._closed.set()
        with self._lock:
            calls = tuple(self._calls)
            threads = tuple(self._threads)
        for call in calls:
            call.cancel()
        for thread in threads:
            thread.join(_JOIN_S)

    def _keep_open(self, listener: socket.socket, peer: int) -> None:
        with closing(listener):
            while not self._closed.is_set():
                with suppress(TimeoutError):
                    sock, _ = listener.accept()
                    self._enter(sock, peer)

    def _enter(self, sock: socket.socket, peer: int) -> None:
        sock.settimeout(None)
        call = self._open(peer)
        self._join_up(call, sock, f"in-{peer}")

    def _answer(self, peer: int, here: str) -> None:
        """Wait for one dialler after the other."""
        while not self._closed.is_set():
            call = self._open(peer)
            sock = self._dialled(call, here)
            if sock is not None:
                self._join_up(call, sock, f"out-{peer}")
            else:
                self._drop(call)
                self._closed.wait(_AGAIN_S)

    def _join_up(self, call: "_Call", sock: socket.socket, name: str) -> None:
        """From now on the bytes of each go to the other."""
        with suppress(InvalidStateError):  # the stream is over: `_deliver` finds out
            call.local.set_result(sock)
        self._spawn(partial(self._deliver, call, sock), name)

    def _dialled(self, call: "_Call", here: str) -> socket.socket | None:
        """A connection with this rank's own listener, once `peer` wants one."""
        try:
            next(call.messages)
            sock = dial(here, _DIAL_S)
        except (StopIteration, OSError, grpc.RpcError) as error:
            _report(error)
            return None
        sock.settimeout(None)
        return sock

    def _open(self, peer: int) -> "_Call":
        hello = Hello(protocol=PROTOCOL, from_rank=self._rank, to_rank=peer)
        proof = proof_of(self._link_secrets[peer], hello)
        # A connection of its own: one that is held back concerns no other.
        channel = open_channel(
            self._address, self._security, own_connection=True, silence_s=self._silence_s
        )
        call = _Call(channel, hello_metadata(self._security, hello, proof))
        with self._lock:
            self._calls.add(call)
        if self._closed.is_set():
            call.cancel()
        return call

    def _deliver(self, call: "_Call", sock: socket.socket) -> None:
        """What comes through the relay, to the local connection, until either ends."""
        try:
            for message in call.messages:
                if message == NO_MORE:
                    sock.shutdown(socket.SHUT_WR)
                else:
                    sock.sendall(message)
        except (OSError, grpc.RpcError) as error:
            _report(error)
        shut(sock)
        self._drop(call)
        sock.close()

    def _drop(self, call: "_Call") -> None:
        call.cancel()
        call.channel.close()
        with self._lock:
            self._calls.discard(call)

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        thread = Thread(target=run, name=f"dpipe-relay-{self._rank}-{name}", daemon=True)
        with self._lock:
            self._threads = [other for other in self._threads if other.is_alive()]
            self._threads.append(thread)
            thread.start()


class _Call:
    """A stream to the relay; it sends what comes from `local`, once that is there."""

    def __init__(self, channel: grpc.Channel, metadata: Any) -> None:
        self.channel = channel
        self.local: Future[socket.socket] = Future()
        dial_relay: Any = channel.stream_stream(METHOD)
        self.messages: Any = dial_relay(self._outgoing(), metadata=metadata)
        # Whoever waits for a connection of a stream that is over is woken.
        if self.messages.add_callback(self.local.cancel) is False:
            self.local.cancel()

    def _outgoing(self) -> Iterator[bytes]:
        with suppress(OSError, CancelledError):
            sock = self.local.result()
            while piece := sock.recv(_READ_BYTES):
                yield piece
        yield NO_MORE

    def cancel(self) -> None:
        self.local.cancel()
        self.messages.cancel()


def _report(error: BaseException) -> None:
    """Where the relay has refused a stream: its other ends and breaks are what links end with."""
    if isinstance(error, grpc.Call) and error.code() in _REFUSED:
        LOG.warning("the coordinator does not relay a link: %s", why_ended(error))  # type: ignore[arg-type]
