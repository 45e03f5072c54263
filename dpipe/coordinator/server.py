"""`CoordinatorServer`: the streams of all ranks around one `Membership`, in rank 0's process.

rank 1 ══session══ reader thread ──┐   one lock     ┌── outbox ── writer thread ══session══ rank 1
rank 2 ══session══ reader thread ──┼─▶ Membership ──┼── outbox ── writer thread ══session══ rank 2
                   clock thread  ──┘                └── ...

A stream that breaks is dialled again by its rank. Meanwhile a thread looks whether the rank's
process still takes connections: one that died refuses them, where its machine lives.
"""

import hmac
import logging
import math
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial

import grpc
from google.protobuf.message import DecodeError

from dpipe.coordinator.frame import METHOD, PROTOCOL, assemble
from dpipe.coordinator.limits import TO_COORDINATOR, UNREAD_MESSAGES, check
from dpipe.coordinator.line import GONE_S, Line
from dpipe.coordinator.membership import (
    SYMPTOM_GRACE_S,
    Member,
    Membership,
    advertised,
    host_of,
    other_protocol,
)
from dpipe.errors import DpipeError, JoinError, TermLost, TransferError
from dpipe.relay.server import Relay
from dpipe.session.frames import MessageFrames
from dpipe.session.grpc_stream import SECRET_BYTES, GrpcStream, hello_of
from dpipe.session.session import LinkSession
from dpipe.session.stops import Stops
from dpipe.wire.rpc import Security, serve
from dpipe.wire.v1 import coordinator_pb2 as pb
from dpipe.wire.v1.transport_pb2 import Greeting

LOG = logging.getLogger("dpipe")
_NO_SECURITY = Security()
_WATCHES = 64  # looks at each stream in `heartbeat_s`
_LOOK_S = 0.1  # between looks for a rank whose stream broke
_KNOCK_S = 2.0  # for its host to answer one: half a second and more away, behind a busy link
_LAST_WORD_S = 1.0  # for a rank to take what it was told last
_STRANGERS = 16  # streams at once beyond one a rank; each holds a thread
_STOP_S = 2.0  # for streams that are still open, and for each thread


class CoordinatorServer:
    """Listens at `port` from the constructor until `close()`, which must be called after an error
    too: at its end Python waits for the threads of open streams.

    `join_s` bounds the wait for all ranks, counted from the constructor. A rank is lost when its
    stream breaks, at once for a killed process, or when nothing came from it for `heartbeat_s`.
    `on_upload(rank, kind, payload)` is called from a thread of that rank, in the order of its
    uploads, whose kinds are in `limits.py`; where it raises, the run ends with that reason. `gate`
    is called before any message is acted on: it may wait, and raises `TermLost` where nothing may
    be answered any more. Raises `JoinError` where it cannot bind.
    """

    def __init__(
        self,
        world_size: int,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        security: Security = _NO_SECURITY,
        heartbeat_s: float = 40.0,
        join_s: float = 120.0,
        on_upload: Callable[[int, str, bytes], None] | None = None,
        gate: Callable[[], None] = lambda: None,
    ) -> None:
        self._membership = Membership(
            world_size, heartbeat_s=heartbeat_s, join_s=join_s, now=time.monotonic()
        )
        self._lock = threading.Condition()  # guards the membership; notified when a stream ends
        self._heartbeat_s = heartbeat_s
        self._guests: set[_Guest] = set()  # whose streams, or sessions, are open
        self._threads: set[threading.Thread] = set()
        self._on_upload = on_upload
        self._gate = gate
        self._stopped = threading.Event()
        self._clock = threading.Thread(
            target=self._tick,
            args=(min(heartbeat_s / _WATCHES, join_s / 4, SYMPTOM_GRACE_S / 2),),
            name="coordinator clock",
        )
        # One stream a rank for everything: what it says is in order, and where the stream breaks
        # the rank is lost.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._attend
        )
        service, _, method = METHOD.removeprefix("/").partition("/")
        handlers = [grpc.method_handlers_generic_handler(service, {method: handler})]
        relay = Relay(world_size, self._membership.link_secret)
        handlers.append(relay.handler())
        self._most_guests = world_size + _STRANGERS
        self._server = serve(
            handlers,
            bind,
            port,
            security,
            max_workers=self._most_guests + relay.most_streams,
            silence_s=heartbeat_s,
        )
        self.port = self._server.port
        # Behind `serve`: where that cannot bind, there is no thread to end.
        self._clock.start()

    def abort(self, reason: str) -> None:
        """End the run for all ranks; from here on no gather completes."""
        with self._lock:
            self._membership.end(reason)

    def close(self, wait_s: float = 5.0) -> None:
        """Stop listening, after at most `wait_s` for ranks to leave or to hear of an abort."""
        with self._lock:
            if not self._membership.complete:
                self._membership.end("the coordinator (rank 0) stopped before all ranks had joined")
            if not self._lock.wait_for(lambda: not self._guests, wait_s):
                self._membership.end(
                    "the coordinator (rank 0) stopped while other ranks were still at work"
                )
            self._lock.wait_for(lambda: not self._guests, _LAST_WORD_S)
            guests = tuple(self._guests)
        self._stopped.set()
        for guest in guests:
            guest.line.session.close("the coordinator has stopped")
        self._server.stop(_STOP_S)
        self._server.join(2 * _STOP_S)
        with self._lock:
            threads = [self._clock, *self._threads]
        for thread in threads:
            thread.join(_STOP_S)

    def _tick(self, interval_s: float) -> None:
        stops = Stops(interval_s, self._heartbeat_s)
        beat_at = time.monotonic()
        while not self._stopped.wait(interval_s):
            now = time.monotonic()
            stops.tick(now)
            beats = now >= beat_at
            with self._lock:
                self._membership.tick(now)
                guests = tuple(self._guests)
                # A sign of life, also while an upload keeps the reader busy.
                for member in self._membership.members.values() if beats else ():
                    member.tell(pb.FromCoordinator())
            if beats:
                beat_at = now + self._heartbeat_s / 4
            for guest in guests:
                guest.line.session.watch(now, stops)

    # Streams

    def _attend(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream of a rank, its first or another: gRPC's thread writes it."""
        hello, secret = hello_of(context)
        stream = GrpcStream()
        stream.carry(context, frames)
        try:
            if hello.protocol != PROTOCOL:
                raise JoinError(other_protocol(hello.protocol))
            if hello.resumes:
                guest = self._guest_of(hello.from_rank, secret)
                state = guest.detach(hello.received)
            else:
                if self._has_left(hello.from_rank):
                    # As if nobody listened: it dials again until the next coordinator does.
                    context.abort(grpc.StatusCode.UNAVAILABLE, "the run before this one ends")
                if self._is_crowded():
                    context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are open")
                guest = self._new_guest(hello.from_rank, context.peer())
                state = Greeting(secret=guest.line.session.secret)
        except DpipeError as refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(refusal))
        # First: the rank may dial again before gRPC has found out that it sent the greeting.
        if hello.resumes:
            self._go_on(guest, stream, hello.received, state.received)
        else:
            self._begin(guest, stream)
        state.hello.CopyFrom(hello)
        yield state.SerializeToString()
        yield from stream.outgoing()

    def _has_left(self, rank: int) -> bool:
        with self._lock:
            return self._membership.has_left(rank)

    def _is_crowded(self) -> bool:
        """Whether no session may begin now: one whose stream broke is kept a while, with its
        threads, also a stranger's.
        """
        with self._lock:
            return len(self._guests) >= self._most_guests

    def _new_guest(self, rank: int, peer: str) -> "_Guest":
        guest = _Guest(rank, peer, self._heartbeat_s)
        guest.on_break = lambda: self._spawn(partial(self._look_for, guest), "coordinator looks")
        return guest

    def _begin(self, guest: "_Guest", stream: GrpcStream) -> None:
        with self._lock:
            self._guests.add(guest)
        guest.line.start(stream)
        self._spawn(partial(self._read, guest), "coordinator reader")

    def _guest_of(self, rank: int, secret: bytes) -> "_Guest":
        """Who goes on with a session. Raises `JoinError` for anybody else."""
        with self._lock:
            guests = tuple(self._guests)
        for guest in guests:
            is_same = hmac.compare_digest(guest.line.session.secret, secret)
            if is_same and guest.rank == rank:
                return guest
        raise JoinError("this is not the end that opened this stream, or the run is over")

    def _go_on(self, guest: "_Guest", stream: GrpcStream, arrived: int, reported: int) -> None:
        session = guest.line.session
        try:
            session.attach(MessageFrames(stream), arrived, reported)
        except (OSError, DpipeError):
            return stream.give_up()
        LOG.warning(
            "the connection of rank %d with the coordinator broke (%s); it was dialled again and "
            "goes on",
            guest.rank,
            session.why,
        )
        # Not by this thread, which hands to gRPC what that one writes.
        self._spawn(session.send_again, "coordinator sends again")

    def _look_for(self, guest: "_Guest") -> None:
        """End the session of a rank that is gone, before all the time has passed in which it could
        dial again.

            its stream  its process's port  it is gone after
            closed      refuses             GONE_S
            closed      no answer, no port  half a silence: its kernel closed the stream, so the
                                            path is there; whoever lives writes four times in a
                                            silence, notices, and has as long again to dial
            silent      refuses             GONE_S
            silent      no answer, no port  a heartbeat: the path may be cut, or it is stopped
            any         answers             a heartbeat
        """
        session = guest.line.session
        broke_at = time.monotonic()
        while session.awaits_another() and not self._stopped.wait(_LOOK_S):
            answer = _knock(guest.address)
            patience_s = math.inf
            if answer is Knock.REFUSED:
                patience_s = GONE_S
            elif answer is Knock.NOTHING and not (session.fell_silent and guest.member):
                patience_s = session.silence_s / 2
            if time.monotonic() - broke_at > patience_s:
                session.close(f"{session.why}, and nothing listens there any more")
        if self._stopped.is_set():  # one that began while `close` ended the others
            session.close("the coordinator has stopped")

    def _spawn(self, run: Callable[[], None], name: str) -> None:
        thread = threading.Thread(target=run, name=name, daemon=True)
        with self._lock:
            self._threads = {other for other in self._threads if other.is_alive()} | {thread}
            thread.start()

    def _read(self, guest: "_Guest") -> None:
        why = "its process ended or its connection broke"
        try:
            for message in assemble(guest.listen(), pb.ToCoordinator, guest.most_bytes):
                check(message)
                self._gate()
                self._take(message, guest)
                guest.refuse_deaf()
        except (OSError, TermLost):
            pass  # the session is over: `why` says it
        except (DecodeError, TransferError) as error:
            with self._lock:
                if guest.member:
                    self._membership.put_out(guest.member, str(error))
        with self._lock:
            if guest.member:
                self._membership.broken(guest.member, why)
        guest.end()
        with self._lock:
            self._guests.discard(guest)
            self._lock.notify_all()

    def _take(self, message: pb.ToCoordinator, guest: "_Guest") -> None:
        """One message. Outside the lock: pings, which measure time, and uploads, which take it."""
        kind = message.WhichOneof("kind")
        if kind == "ping":
            pong = pb.Pong(sent_ns=message.ping.sent_ns, clock_ns=time.perf_counter_ns())
            guest.line.tell(pb.FromCoordinator(pong=pong))
        elif kind == "upload" and guest.member:
            self._store(guest.member, message.upload)
        else:
            with self._lock:
                self._decide(message, guest, time.monotonic())

    def _decide(self, message: pb.ToCoordinator, guest: "_Guest", now: float) -> None:
        kind = message.WhichOneof("kind")
        if kind == "join" and guest.member is None:
            guest.member = self._membership.join(message.join, guest.peer, guest.line.tell, now)
            return
        if guest.member is None:
            raise DecodeError(f"{kind} from {host_of(guest.peer)} before it joined")
        match kind:
            case "part":
                self._membership.part(guest.member, message.part)
            case "ask":
                self._membership.ask(guest.member, message.ask.key)
            case "failure":
                self._membership.failure(guest.member, message.failure, now)
            case "leave":
                self._membership.leave(guest.member)
            case _:
                raise DecodeError(f"unexpected {kind}")

    def _store(self, member: Member, upload: pb.Upload) -> None:
        if upload.kind in member.uploaded:
            raise DecodeError(f"a second upload named {upload.kind!r}")
        member.uploaded.add(upload.kind)
        if self._on_upload is None:
            return
        member.heard_at = math.inf  # not silent: nothing is read from it meanwhile
        try:
            self._on_upload(member.rank, upload.kind, upload.payload)
        except Exception as error:
            what = repr(error)
            if isinstance(error, DpipeError):
                what = str(error)
            with self._lock:
                self._membership.end(
                    f"rank 0 failed: cannot take {upload.kind!r} from rank {member.rank}: {what}"
                )
        finally:
            member.heard_at = time.monotonic()


class _Guest:
    """The other end of a session; `member` once it has joined."""

    def __init__(self, rank: int, peer: str, heartbeat_s: float) -> None:
        self.rank = rank  # as it says
        self.peer = peer
        self.member: Member | None = None
        self.on_break: Callable[[], None] = lambda: None
        session = LinkSession(heartbeat_s, on_break=lambda: self.on_break())
        session.secret = secrets.token_bytes(SECRET_BYTES)
        self.line = Line[pb.FromCoordinator](session, "coordinator writer")

    @property
    def address(self) -> str | None:
        """Where its process takes connections, if anywhere."""
        address = None if self.member is None else advertised(self.member.join)
        return None if address is None or address.endswith(":0") else address

    def most_bytes(self, kind: str) -> int:
        """Of a message; one that has not joined has nothing to say that is larger than a join."""
        if self.member is None:
            return min(TO_COORDINATOR["join"], TO_COORDINATOR[kind])
        return TO_COORDINATOR[kind]

    def refuse_deaf(self) -> None:
        """Raises `DecodeError` where it asks on and on, and reads no answer, or acknowledges none:
        those are kept, to be sent again.
        """
        num_unread = self.line.num_unsent + self.line.session.num_kept
        if num_unread > UNREAD_MESSAGES:
            raise DecodeError(f"more, with {num_unread} answers that it has not read")

    def listen(self) -> Iterator[bytes]:
        """The frames, each noted as a sign of life, so that a long upload is one too."""
        for frame in self.line.frames():
            if self.member:
                self.member.heard_at = time.monotonic()
            yield frame

    def detach(self, arrived: int) -> Greeting:
        """Let go of its stream: it dials again, and has received so many bytes."""
        session = self.line.session
        session.check_arrived(arrived)
        return Greeting(received=session.detach(), stalled=session.stalled)

    def end(self) -> None:
        """Let the writer say what is queued, then hang up."""
        self.line.tell(None)
        self.line.wait_for_writer(_LAST_WORD_S)
        self.line.session.close()
        self.line.join(_STOP_S)


class Knock(Enum):
    """What comes of dialling where a process should listen."""

    REFUSED = "its host answers that nobody listens there"
    ANSWERED = "somebody listens"
    NOTHING = "no answer: a firewall drops it, the path is cut, or there is no address"


def _knock(address: str | None) -> Knock:
    if address is None:
        return Knock.NOTHING
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), _KNOCK_S).close()
    except ConnectionRefusedError:
        return Knock.REFUSED
    except (OSError, ValueError, OverflowError):
        return Knock.NOTHING
    return Knock.ANSWERED
