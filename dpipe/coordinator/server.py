"""`CoordinatorServer`: the streams of all ranks around one `Membership`, in rank 0's process.

rank 1 ══stream══ reader thread ──┐   one lock     ┌── outbox ── gRPC's thread ══stream══ rank 1
rank 2 ══stream══ reader thread ──┼─▶ Membership ──┼── outbox ── gRPC's thread ══stream══ rank 2
                  clock thread  ──┘                └── ...
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator

import grpc
from google.protobuf.message import DecodeError

from dpipe.coordinator.frame import METHOD, assemble, cut
from dpipe.coordinator.limits import TO_COORDINATOR, UNREAD_MESSAGES, check
from dpipe.coordinator.membership import SYMPTOM_GRACE_S, Member, Membership, host_of
from dpipe.errors import DpipeError
from dpipe.wire.rpc import Security, serve
from dpipe.wire.v1 import coordinator_pb2 as pb

MessageQueue = queue.SimpleQueue[pb.FromCoordinator | None]

_NO_SECURITY = Security()
_STRANGERS = 16  # streams at once beyond one a rank; each holds a thread
_STOP_S = 2.0  # for streams that are still open, and for each thread


class CoordinatorServer:
    """Listens at `port` from the constructor until `close()`, which must be called after an error
    too: at its end Python waits for the threads of open streams.

    `join_s` bounds the wait for all ranks, counted from the constructor. A rank is lost when its
    stream breaks, at once for a killed process, or when nothing came from it for `heartbeat_s`.
    `on_upload(rank, kind, payload)` is called from a thread of that rank, in the order of its
    uploads, whose kinds are in `limits.py`; where it raises, the run ends with that reason. Raises
    `JoinError` where it cannot bind.
    """

    def __init__(
        self,
        world_size: int,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        security: Security = _NO_SECURITY,
        heartbeat_s: float = 8.0,
        join_s: float = 120.0,
        on_upload: Callable[[int, str, bytes], None] | None = None,
    ) -> None:
        self._membership = Membership(
            world_size, heartbeat_s=heartbeat_s, join_s=join_s, now=time.monotonic()
        )
        self._lock = threading.Condition()  # guards the membership; notified when a stream ends
        self._num_streams = 0
        self._readers: set[threading.Thread] = set()
        self._on_upload = on_upload
        self._stopped = threading.Event()
        self._clock = threading.Thread(
            target=self._tick,
            args=(min(heartbeat_s / 4, join_s / 4, SYMPTOM_GRACE_S / 2),),
            name="coordinator clock",
        )
        # One stream a rank for everything: what it says is in order, and where the stream breaks
        # the rank is lost.
        handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._attend
        )
        service, _, method = METHOD.removeprefix("/").partition("/")
        handlers = [grpc.method_handlers_generic_handler(service, {method: handler})]
        self._server, self.port = serve(
            handlers, bind, port, security, max_workers=world_size + _STRANGERS
        )
        # Behind `serve`: where that cannot bind, there is no thread to end.
        self._clock.start()

    def close(self, wait_s: float = 5.0) -> None:
        """Stop listening, after at most `wait_s` for ranks to leave or to hear of an abort."""
        with self._lock:
            if not self._membership.complete:
                self._membership.end("the coordinator (rank 0) stopped before all ranks had joined")
            if not self._lock.wait_for(lambda: self._num_streams == 0, wait_s):
                self._membership.end(
                    "the coordinator (rank 0) stopped while other ranks were still at work"
                )
        self._stopped.set()
        self._server.stop(_STOP_S).wait(2 * _STOP_S)
        with self._lock:
            threads = [self._clock, *self._readers]
        for thread in threads:
            thread.join(_STOP_S)

    def _tick(self, interval_s: float) -> None:
        while not self._stopped.wait(interval_s):
            with self._lock:
                self._membership.tick(time.monotonic())
                # A sign of life, also while an upload keeps the reader busy.
                for member in self._membership.members.values():
                    member.tell(pb.FromCoordinator())

    def _attend(self, frames: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One rank's stream: a thread reads it, this generator writes it."""
        # Between the two threads of a stream: whoever tells this rank something never waits for it.
        outbox: MessageQueue = queue.SimpleQueue()
        reader = threading.Thread(
            target=self._read,
            args=(frames, context.peer(), outbox),
            name="coordinator reader",
            daemon=True,
        )
        with self._lock:
            self._num_streams += 1
            self._readers = {other for other in self._readers if other.is_alive()} | {reader}
            reader.start()
        try:
            # No timeout: the reader ends with the stream, by keep-alive at the latest, and puts
            # None.
            while (message := outbox.get()) is not None:
                yield from cut(message)
        finally:
            with self._lock:
                self._num_streams -= 1
                self._lock.notify_all()

    def _read(self, frames: Iterator[bytes], peer: str, outbox: MessageQueue) -> None:
        guest = _Guest(peer, outbox)
        why = "its process ended or its connection broke"
        try:
            for message in assemble(guest.listen(frames), pb.ToCoordinator, guest.most_bytes):
                check(message)
                self._take(message, guest)
                guest.refuse_deaf()
        except grpc.RpcError:
            pass  # the stream broke: `why` says it
        except DecodeError as error:
            with self._lock:
                if guest.member:
                    self._membership.put_out(guest.member, str(error))
        finally:
            with self._lock:
                if guest.member:
                    self._membership.broken(guest.member, why)
            outbox.put(None)

    def _take(self, message: pb.ToCoordinator, guest: "_Guest") -> None:
        """One message. Outside the lock: pings, which measure time, and uploads, which take it."""
        kind = message.WhichOneof("kind")
        if kind == "ping":
            pong = pb.Pong(sent_ns=message.ping.sent_ns, clock_ns=time.perf_counter_ns())
            guest.outbox.put(pb.FromCoordinator(pong=pong))
        elif kind == "upload" and guest.member:
            self._store(guest.member, message.upload)
        else:
            with self._lock:
                self._decide(message, guest, time.monotonic())

    def _decide(self, message: pb.ToCoordinator, guest: "_Guest", now: float) -> None:
        kind = message.WhichOneof("kind")
        if kind == "join" and guest.member is None:
            guest.member = self._membership.join(message.join, guest.peer, guest.outbox.put, now)
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
    """The other end of a stream; `member` once it has joined."""

    def __init__(self, peer: str, outbox: MessageQueue) -> None:
        self.peer = peer
        self.outbox = outbox
        self.member: Member | None = None

    def most_bytes(self, kind: str) -> int:
        """Of a message; one that has not joined has nothing to say that is larger than a join."""
        if self.member is None:
            return min(TO_COORDINATOR["join"], TO_COORDINATOR[kind])
        return TO_COORDINATOR[kind]

    def refuse_deaf(self) -> None:
        """Raises `DecodeError` where it asks on and on, and reads no answer."""
        if self.outbox.qsize() > UNREAD_MESSAGES:
            raise DecodeError(f"more, with {self.outbox.qsize()} answers that it has not read")

    def listen(self, frames: Iterator[bytes]) -> Iterator[bytes]:
        """The frames, each noted as a sign of life, so that a long upload is one too."""
        for frame in frames:
            if self.member:
                self.member.heard_at = time.monotonic()
            yield frame
