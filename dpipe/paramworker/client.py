"""A worker's calls to the parameter server, for one stage: each is repeated until it succeeds.

    call --> fails, the server is away --> wait, attend again, push what it lacks --> call again

Every call may be repeated (see server.py), and gradients are kept until the server says that their
step is committed: a server that is killed and started again is a delay and nothing else. An error
that no repetition can mend is raised at once.

    replica 0   push . norms ............... waits for replica 1's gradient --> vote --> pull
    replica 1   push . norms --> vote ...look: started again, push ............. vote --> pull
    server                  ^ killed, started again: the gradients of this step are gone

So a worker that waits for others, and not for the server, looks at it once a second.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import grpc
import torch

from dpipe.dataparallel.base import Traffic
from dpipe.errors import (
    DpipeError,
    JoinError,
    NumericError,
    PeerLost,
    RunAborted,
    TransferError,
    TransferTimeout,
)
from dpipe.paramserver.messages import (
    PLACE_KEY,
    SERVICE,
    attendance,
    parse,
    piece,
    pieces_of,
    vectors_from,
)
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.paramserver.stage_state import StepDecision
from dpipe.wire.message import message_of
from dpipe.wire.rpc import Security, open_channel, token_metadata
from dpipe.wire.text import visible
from dpipe.wire.transfer import Moved
from dpipe.wire.v1 import parameters_pb2 as pb

LOG = logging.getLogger("dpipe")
T = TypeVar("T")
SERVER = "server"  # what traffic calls the other end
_RETRY_S = 0.5  # between two attempts to reach a server that is away
_LOOK_S = 1.0  # between two looks at a server by a worker that asks it nothing
_STOP_S = 10.0  # for a look that is broken off
# It is not up, was closed, or has been started again: it may come back.
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
_ERRORS: Mapping[grpc.StatusCode, type[DpipeError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: JoinError,
    grpc.StatusCode.UNAUTHENTICATED: JoinError,
    grpc.StatusCode.OUT_OF_RANGE: NumericError,
    grpc.StatusCode.DEADLINE_EXCEEDED: TransferTimeout,
}
_NO_PIECE = b"\0\0\0\0"  # a stream that ends before its last message reads as an empty piece

Outbox = Callable[[int], torch.Tensor]  # chunk -> what goes on the wire, the same each time
# (chunk, whether it is values and not a difference, bytes)
Put = Callable[[int, bool, memoryview], None]


class _Away(Exception):  # noqa: N818 - not an error yet: the server may come back
    pass


@dataclass(frozen=True)
class ServerAccess:
    """Where a stage's server is, who calls it, and how long that waits."""

    # HOST:PORT
    address: str
    session: str  # of the run
    replica: int
    rank: int
    security: Security = field(default_factory=Security)
    connections: int = 1  # a stage's chunks take turns over so many
    connect_s: float = 20.0  # for a server that is not up yet
    timeout_s: float = 300.0  # for any answer, and for a server that is away
    part: int = 0  # the tp_rank, where several ranks of a replica share a stage
    # The run's, where a worker that ends before comes back; None: it does not
    num_steps: int | None = None

    @property
    def remedy(self) -> str:
        """What to do where the server stays away."""
        if self.num_steps is None:
            return "start it again with the same run.folder: it goes on where it was"
        return "start it again, or one elsewhere with --run: the run goes on from its copies"

    @property
    def remedy_of_state(self) -> str:
        """What to do where it comes back without what it had."""
        if self.num_steps is None:
            return (
                "start it with the run.folder it had, or go on from the last checkpoint: --resume"
            )
        return "the run goes on from its copies"


def reach(access: ServerAccess) -> None:
    """Raises `JoinError` where no server answers within `connect_s`, or refuses such a worker."""
    # Of no stage and with nothing in it: the server looks at the token and the protocol alone.
    spec = FlatSpec((), 1)
    rule = StepRule((), 0.0, (0.0, 0.0))
    client = StageClient(access, -1, spec, rule)
    try:
        client.reach()
    finally:
        client.close()


class StageClient:
    """One thread uses it, but for `fail` and `close`, and one of its own while that asks nothing.
    `PeerLost`: the server stays away.
    """

    def __init__(
        self,
        access: ServerAccess,
        stage: int,
        spec: FlatSpec,
        rule: StepRule,
    ) -> None:
        self.stage = stage
        self.spec = spec
        self.rule = rule
        self.traffic: deque[Traffic] = deque()  # what was sent and received, for whoever takes it
        self._access = access
        self._step = 0
        self._num_updates = 0
        self._incarnation = ""  # of the server that was last attended
        self._opened = False
        # by step: gradients that the server may still need, and the decisions that are known
        self._kept: dict[int, Outbox] = {}
        self._decisions: dict[int, StepDecision] = {}
        self._channels: list[grpc.Channel] = []
        # in progress; under the lock, for `fail` comes from other threads
        self._calls: set[Any] = set()
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._error: Exception | None = None
        # held by the thread that talks with the server
        self._turn = threading.RLock()
        self._asked_at = time.monotonic()
        name = f"dpipe-look-{stage}"
        self._looker = threading.Thread(target=self._look_after, name=name, daemon=True)

    def open(
        self,
        step: int,
        num_updates: int,
        vectors: Callable[[], dict[str, torch.Tensor]],
    ) -> None:
        """Attend before `step`; replica 0 brings `vectors` to begin with, the others wait for it.

        Raises `JoinError` where there is no server, or one that does not take this worker.
        """
        self._step = step
        self._num_updates = num_updates

        def begin() -> None:
            self._connect()
            if self._attend(again=False).empty:
                self._load(vectors())

        self._persist(begin, self._access.connect_s, "")
        self._opened = True
        self._looker.start()

    def reach(self) -> None:
        """As `open`, without beginning anything."""
        self._connect()
        self._persist(lambda: self._attend(again=True), self._access.connect_s, "")

    def push(self, step: int, outbox: Outbox) -> None:
        """Send the gradient of `step`, again where needed, until `pull` has seen it committed."""
        self.keep(step, outbox)
        self._repeat(lambda: self._push(step), f"pushing the gradient of step {step}")

    def norms(self, step: int) -> dict[int, float]:
        """By layer, the squared norm of the mean gradient, once all replicas have pushed."""
        what = f"asking for the norms of step {step}"
        answer = self._repeat(lambda: self._unary("Norms", b""), what)
        return dict(message_of(pb.Squares, answer).by_layer)

    def pull(
        self,
        step: int,
        decision: StepDecision,
        put: Put,
        *,
        push: bool = False,
    ) -> None:
        """Bring the decision, take every chunk as it comes, and wait until the step is committed.

        With `push` the gradient that `keep` was given goes out at the same time.
        """
        num_chunks = 0 if decision.factor is None else self.spec.num_chunks
        incoming = _IncomingParameters(num_chunks, put)
        self._repeat(
            lambda: self._pull(step, decision, incoming, push),
            f"pulling the parameters after step {step}",
        )
        self._decisions[step] = decision
        # What is on the server's disk is never asked for again.
        for kept in list(self._kept):
            if kept < incoming.committed:
                del self._kept[kept]
                self._decisions.pop(kept, None)

    def keep(self, step: int, outbox: Outbox) -> None:
        """What `pull(push=True)` will send."""
        self._step = step
        self._kept[step] = outbox

    def fetch(self, step: int) -> dict[str, torch.Tensor]:
        """All vectors as they are before `step`, once every replica has got that far."""
        self._step = step

        def fetch() -> dict[str, torch.Tensor]:
            return vectors_from(self.spec, self._stream("Fetch", b"", 0))

        return self._repeat(lambda: self._translated(fetch), "fetching what it holds")

    def leave(self) -> None:
        """This replica is done with the stage."""
        self._repeat(lambda: self._unary("Leave", b""), "leaving")

    def fail(self, error: Exception) -> None:
        """Give up: what is in progress, and every later call, raises `error`."""
        with self._lock:
            self._error = self._error or error
            calls = list(self._calls)
        self._failed.set()
        _cancel(calls)

    def close(self) -> None:
        self.fail(
            RunAborted(
                f"rank {self._access.rank} has closed its connection to the parameter server"
            )
        )
        if self._looker.ident is not None:
            self._looker.join(_STOP_S)
        for channel in self._channels:
            channel.close()

    # Persistence

    def _look_after(self) -> None:
        """Bring a server that was started again what it lacks, while nobody here asks it."""
        while not self._failed.wait(_LOOK_S):
            if not self._turn.acquire(blocking=False):
                continue
            try:
                quiet_s = time.monotonic() - self._asked_at
                if self._kept and quiet_s > _LOOK_S:
                    self._look()
            except Exception as error:
                self.fail(error)  # whoever asks next hears it
            finally:
                self._turn.release()

    def _look(self) -> None:
        def attend() -> None:
            known = self._incarnation
            self._attend(again=True)
            if self._incarnation != known:
                raise _Away("it was started again")

        self._repeat(attend, "others are waited for")

    def _repeat(self, call: Callable[[], T], what: str) -> T:
        return self._persist(call, self._access.timeout_s, what)

    def _persist(self, call: Callable[[], T], patience_s: float, what: str) -> T:
        """Make the call until it succeeds, for `patience_s` after the server was last seen.

        `what` is in progress there; "" where nothing is, so that there is nothing to come back to.
        """
        with self._turn:
            try:
                return self._persist_in_turn(call, patience_s, what)
            finally:
                self._asked_at = time.monotonic()

    def _persist_in_turn(self, call: Callable[[], T], patience_s: float, what: str) -> T:
        away_since: float | None = None
        while True:
            try:
                # Before each attempt, not once: the server may go away again meanwhile.
                if away_since is not None and what:
                    self._come_back()
                return call()
            except _Away as why:
                if away_since is None:
                    away_since = time.monotonic()
                    LOG.warning("the parameter server at %s is away: %s", self._access.address, why)
                if time.monotonic() - away_since > patience_s:
                    self._give_up(patience_s, what, str(why))
            if self._failed.wait(_RETRY_S):
                assert self._error is not None, "`fail` sets the error before the event"
                raise self._error

    def _give_up(self, patience_s: float, what: str, why: str) -> NoReturn:
        address = self._access.address
        if what:
            raise PeerLost(
                f"rank {self._access.rank} lost the parameter server at {address} while {what}, "
                f"and it did not come back within {patience_s:g} s ({why}); {self._access.remedy}"
            ) from None
        raise JoinError(
            f"rank {self._access.rank} found no parameter server at {address} within "
            f"{patience_s:g} s ({why}); start `dpipe serve` there, or check "
            "data_parallel.address, its --bind and the firewall"
        ) from None

    def _come_back(self) -> None:
        """Attend at a server that was away, and push what it does not have."""
        self._connect()
        standing = self._attend(again=True)
        address = self._access.address
        if standing.empty:
            raise PeerLost(
                f"the parameter server at {address} came back without the state of this run; "
                f"{self._access.remedy_of_state}"
            )
        # As loud as that it was away.
        LOG.warning("the parameter server at %s is back, at step %d", address, standing.step)
        for step in sorted(self._kept):
            if step >= standing.step:
                self._push(step)
                self._decide(step)

    def _decide(self, step: int) -> None:
        """Bring a decision that the server has lost once more: a pull of no chunk."""
        if step in self._decisions:
            decision = self._decisions[step]
            request = _wanted(decision, first=self.spec.num_chunks, stride=1)
            answer = self._stream("Pull", request, 0, step)
            self._translated(lambda: list(answer))

    def _connect(self) -> None:
        # Anew: gRPC waits longer and longer between attempts on a channel that has failed.
        for channel in self._channels:
            channel.close()
        self._channels = []
        address = self._access.address
        for _ in range(self._access.connections):
            channel = open_channel(address, self._access.security, own_connection=True)
            self._channels.append(channel)

    # Calls

    def _attend(self, *, again: bool) -> pb.Standing:
        request = attendance(self.spec, self.rule, self._num_updates, again=again)
        answer = self._unary("Attend", request.SerializeToString())
        standing = message_of(pb.Standing, answer)
        self._incarnation = standing.incarnation
        return standing

    def _load(self, vectors: dict[str, torch.Tensor]) -> None:
        call: Any = self._channels[0].stream_unary(f"/{SERVICE}/Load")
        pieces = pieces_of(self.spec, vectors)
        future = call.future(pieces, **self._options(self._step))
        self._results([self._noted(future)])

    def _push(self, step: int) -> None:
        self._results(self._start_pushes(step))

    def _start_pushes(self, step: int) -> list[Any]:
        """Chunk k goes over connection k mod C."""
        pushes = []
        for connection, channel in enumerate(self._channels):
            call: Any = channel.stream_unary(f"/{SERVICE}/Push")
            chunks = self._chunks(step, connection)
            future = call.future(chunks, **self._options(step))
            pushes.append(self._noted(future))
        return pushes

    def _chunks(self, step: int, connection: int) -> Iterator[bytes]:
        """What gRPC pulls and sends: it comes back for more when the network takes more."""
        for chunk in range(connection, self.spec.num_chunks, self._access.connections):
            wire = self._kept[step](chunk)
            start_ns = time.perf_counter_ns()
            yield piece(pb.Piece(chunk=chunk), wire)
            moved = Moved(start_ns, time.perf_counter_ns(), wire.nbytes)
            self.traffic.append(Traffic(self.stage, SERVER, moved))

    def _pull(
        self,
        step: int,
        decision: StepDecision,
        incoming: "_IncomingParameters",
        push: bool,
    ) -> None:
        """A push that is refused ends the pull, which would wait for it in vain."""
        streams = self._start_pulls(decision, incoming)

        def check(push: Any) -> None:
            if push.code() is not grpc.StatusCode.OK:
                _cancel(streams)

        pushes = self._start_pushes(step) if push else []
        for call in pushes:
            call.add_done_callback(check)
        try:
            self._translated(lambda: incoming.take(streams, self._received))
        except _Away:
            # The reason may be that of a push: raise it first.
            self._results(pushes)
            raise
        self._results(pushes)

    def _received(self, moved: Moved) -> None:
        self.traffic.append(Traffic(self.stage, SERVER, moved, received=True))

    def _start_pulls(
        self, decision: StepDecision, incoming: "_IncomingParameters"
    ) -> list[Iterator[bytes]]:
        """Chunks come over the connections in turn; those that have come do not come again."""
        stride = self._access.connections
        streams = []
        for connection in range(stride):
            # The first that is missing and belongs to this connection.
            first = incoming.next + (connection - incoming.next) % stride
            if decision.factor is None:
                first = self.spec.num_chunks
            request = _wanted(decision, first=first, stride=stride)
            streams.append(self._stream("Pull", request, connection))
        return streams

    def _unary(self, method: str, request: bytes) -> bytes:
        call: Any = self._channels[0].unary_unary(f"/{SERVICE}/{method}")
        future = call.future(request, **self._options(self._step))
        (answer,) = self._results([self._noted(future)])
        return answer

    def _stream(
        self,
        method: str,
        request: bytes,
        connection: int,
        step: int | None = None,
    ) -> Iterator[bytes]:
        call: Any = self._channels[connection].unary_stream(f"/{SERVICE}/{method}")
        options = self._options(self._step if step is None else step)
        stream: Iterator[bytes] = self._noted(call(request, **options))
        return stream

    def _options(self, step: int) -> dict[str, Any]:
        access = self._access
        place = pb.Place(
            session=access.session,
            stage=self.stage,
            replica=access.replica,
            step=step,
            incarnation=self._incarnation,
            part=access.part,
        )
        here = (PLACE_KEY, place.SerializeToString())
        metadata = (*token_metadata(access.security), here)
        return {"metadata": metadata, "timeout": access.timeout_s}

    def _noted(self, call: Any) -> Any:
        """Note a call that has begun, so that `fail` can end it."""
        with self._lock:
            self._calls = {known for known in self._calls if known.is_active()}
            self._calls.add(call)
            failed = self._error is not None
        # `fail` came between the start of the call and this note, and has not seen it.
        if failed:
            call.cancel()
        return call

    def _results(self, calls: list[Any]) -> list[bytes]:
        return self._translated(lambda: [call.result() for call in calls])

    def _translated(self, wait: Callable[[], T]) -> T:
        """What `wait` returns. Errors of gRPC become dpipe's; `_Away` where one may pass."""
        try:
            return wait()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            # A call that `fail` has cancelled says no more than that it was.
            if self._error is not None:
                raise self._error from None
            code = grpc.StatusCode.CANCELLED
            details = "it broke off the call"
            if isinstance(error, grpc.Call):
                code = error.code()
                details = visible(str(error.details()))
        if code in _AWAY:
            raise _Away(details)
        kind = _ERRORS.get(code, TransferError)
        if kind is JoinError and self._opened:
            # The run has begun: no other configuration would mend it.
            kind = TransferError
        raise kind(
            f"rank {self._access.rank}: the parameter server at {self._access.address} says: "
            f"{details}"
        )


class _IncomingParameters:
    """What has come of a pull, over however many calls."""

    def __init__(self, num_chunks: int, put: Put) -> None:
        self.next = 0  # the chunk that comes next
        self.committed = 0  # the first step that is not, once all has come
        self._num_chunks = num_chunks
        self._put = put

    def take(self, streams: list[Iterator[bytes]], received: Callable[[Moved], None]) -> None:
        """Take all chunks that are missing, then wait for the end of each stream."""
        start_ns = 0
        num_bytes = 0
        while self.next < self._num_chunks:
            message = next(streams[self.next % len(streams)], _NO_PIECE)
            head, body = parse(message)
            start_ns = start_ns or time.perf_counter_ns()  # waiting for the first is no transfer
            if head.chunk != self.next or head.HasField("committed"):
                raise TransferError(
                    f"chunk {head.chunk} came from the parameter server where {self.next} was due"
                )
            self._put(head.chunk, head.whole, body)
            num_bytes += len(body)
            self.next += 1
        if num_bytes:
            received(Moved(start_ns, time.perf_counter_ns(), num_bytes))
        # The last message of a stream waits for the commit.
        for stream in streams:
            for message in stream:
                head, _ = parse(message)
                self.committed = max(self.committed, head.committed)


def _wanted(decision: StepDecision, *, first: int, stride: int) -> bytes:
    """A request for every `stride`-th chunk from `first` on."""
    wanted = pb.Wanted(
        learning_rate=decision.learning_rate,
        factor=decision.factor,
        first=first,
        stride=stride,
    )
    return wanted.SerializeToString()


def _cancel(calls: list[Any]) -> None:
    for call in calls:
        call.cancel()
