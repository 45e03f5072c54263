"""A worker's line to the parameter server, for one stage: calls that are repeated until they
succeed.

    call --> fails because the server is away --> wait, attend again, push what it does not have --> call again

Every call may be repeated (see server.py), and gradients are kept until the server says that their
step is committed: a server that is killed and started again is a delay and nothing else. What is
wrong for good is raised at once.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
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
    message_of,
    parse,
    piece,
    pieces_of,
    rows_from,
)
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.paramserver.stage_state import StepDecision
from dpipe.wire.rpc import Security, open_channel, token_metadata
from dpipe.wire.transfer import Moved
from dpipe.wire.v1 import parameters_pb2 as pb

LOG = logging.getLogger("dpipe")
T = TypeVar("T")
SERVER = "server"  # what traffic calls the other end
_RETRY_S = 0.5
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
_ERRORS: Mapping[grpc.StatusCode, type[DpipeError]] = {
    grpc.StatusCode.FAILED_PRECONDITION: JoinError,
    grpc.StatusCode.UNAUTHENTICATED: JoinError,
    grpc.StatusCode.OUT_OF_RANGE: NumericError,
    grpc.StatusCode.DEADLINE_EXCEEDED: TransferTimeout,
}

Outbox = Callable[[int], torch.Tensor]  # chunk -> what goes on the wire, the same each time
Put = Callable[[int, bool, memoryview], None]  # (chunk, whole, bytes)


class _Away(Exception):  # noqa: N818 - not an error yet: the server may come back
    pass


@dataclass(frozen=True)
class ServerAccess:
    """Who calls, where, and for how long it waits: for a server that is away, and for any answer.

    `part` says which of its stages' parts it has, where several ranks of a replica hold them
    together.
    """

    address: str
    session: str
    replica: int
    rank: int
    security: Security = field(default_factory=Security)
    connections: int = 1
    connect_s: float = 20.0
    timeout_s: float = 300.0
    part: int = 0


def reach(worker: ServerAccess) -> None:
    """Raises `JoinError` where no parameter server answers within `connect_s`, or one that takes no
    such worker.
    """
    line = StageClient(worker, -1, FlatSpec((), 1), StepRule((), 0.0, (0.0, 0.0)))
    try:
        line.reach()
    finally:
        line.close()


class StageClient:
    """Used by one thread, but for `fail` and `close`. Raises `PeerLost` when the server stays
    away.
    """

    def __init__(self, worker: ServerAccess, stage: int, row: FlatSpec, rule: StepRule) -> None:
        self._worker = worker
        self.stage = stage
        self.row = row
        self.rule = rule
        self._step = 0
        self._incarnation = ""
        self._opened = False
        self._num_updates = 0
        self._kept: dict[int, Outbox] = {}  # by step: gradients that the server may still need
        self._verdicts: dict[int, StepDecision] = {}  # of those steps, as far as they are known
        self._channels: list[grpc.Channel] = []
        self._calls: set[Any] = set()
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._error: Exception | None = None
        self.traffic: deque[Traffic] = deque()

    def open(
        self, step: int, num_updates: int, rows: Callable[[], dict[str, torch.Tensor]]
    ) -> None:
        """Attend before `step`; replica 0 brings what to begin with, the others wait for it.

        Raises `JoinError` where there is no server, or one that does not take this worker.
        """
        self._step = step
        self._num_updates = num_updates

        def begin() -> None:
            self._dial()
            if self._attend(again=False).empty:
                self._load(rows())

        self._persist(begin, self._worker.connect_s, "")

        self._opened = True

    def reach(self) -> None:
        """As `open`, without beginning anything."""
        self._dial()
        self._persist(lambda: self._attend(again=True), self._worker.connect_s, "")

    def push(self, step: int, outbox: Outbox) -> None:
        """Send every chunk of the gradient of `step`; it is kept and sent again until `pull` has
        seen it committed.
        """
        self._step = step
        self._kept[step] = outbox
        self._repeat(lambda: self._push(step), f"pushing the gradient of step {step}")

    def norms(self, step: int) -> dict[int, float]:
        """The squared norm of each layer's mean gradient, once all replicas have pushed."""
        answer = self._repeat(
            lambda: self._unary("Norms", b""), f"asking for the norms of step {step}"
        )
        return dict(message_of(pb.Squares, answer).by_layer)

    def pull(self, step: int, verdict: StepDecision, put: Put, *, push: bool = False) -> None:
        """Bring the verdict, take every chunk as it comes, and wait until the step is committed.

        With `push` the gradient, kept before, goes out at the same time.
        """
        pulled = _IncomingParameters(self.row.num_chunks if verdict.factor is not None else 0, put)
        self._repeat(
            lambda: self._pull(step, verdict, pulled, push),
            f"pulling the parameters after step {step}",
        )
        self._verdicts[step] = verdict
        self._kept = {
            kept: outbox for kept, outbox in self._kept.items() if kept >= pulled.committed
        }
        self._verdicts = {
            kept: known for kept, known in self._verdicts.items() if kept in self._kept
        }

    def keep(self, step: int, outbox: Outbox) -> None:
        """What `pull(push=True)` will send."""
        self._step = step
        self._kept[step] = outbox

    def fetch(self, step: int) -> dict[str, torch.Tensor]:
        """All rows as they are before `step`, once every replica has got that far."""
        self._step = step
        return self._repeat(
            lambda: self._told(lambda: rows_from(self.row, self._stream("Fetch", b"", 0))),
            "fetching what it holds",
        )

    def leave(self) -> None:
        """This replica is done with the stage."""
        self._repeat(lambda: self._unary("Leave", b""), "leaving")

    def fail(self, error: Exception) -> None:
        """Give up: what is under way, and every later call, raises `error`."""
        with self._lock:
            self._error = self._error or error
            calls = list(self._calls)
        self._failed.set()
        for call in calls:
            call.cancel()

    def close(self) -> None:
        self.fail(
            RunAborted(f"rank {self._worker.rank} has closed its line to the parameter server")
        )
        for channel in self._channels:
            channel.close()

    # Persistence

    def _repeat(self, call: Callable[[], T], what: str) -> T:
        return self._persist(call, self._worker.timeout_s, what)

    def _persist(self, call: Callable[[], T], patience_s: float, what: str) -> T:
        """Make the call until it succeeds, for `patience_s` after the server was last seen."""
        away_since: float | None = None
        while True:
            try:
                if away_since is not None and what:
                    self._come_back()
                return call()
            except _Away as why:
                if away_since is None:
                    away_since = time.monotonic()
                    LOG.info("the parameter server at %s is away (%s)", self._worker.address, why)
                if time.monotonic() - away_since > patience_s:
                    self._give_up(patience_s, what, str(why))
            if self._failed.wait(_RETRY_S):
                assert self._error is not None
                raise self._error

    def _give_up(self, patience_s: float, what: str, why: str) -> NoReturn:
        where = self._worker.address
        if what:
            raise PeerLost(
                f"rank {self._worker.rank} lost the parameter server at {where} while {what}, and "
                "it did not come back "
                f"within {patience_s:g} s ({why}); start it again with the same run.folder: it "
                "goes on where it was"
            ) from None
        raise JoinError(
            f"rank {self._worker.rank} found no parameter server at {where} within {patience_s:g} "
            f"s ({why}); start "
            "`dpipe serve` there, or check data_parallel.address, its --bind and the firewall"
        ) from None

    def _come_back(self) -> None:
        """Attend at a server that was away, and push what it does not have."""
        self._dial()
        standing = self._attend(again=True)
        if standing.empty:
            raise PeerLost(
                f"the parameter server at {self._worker.address} came back without the state of "
                "this run; start it "
                "with the run.folder it had, or go on from the last checkpoint: --resume"
            )
        LOG.info(
            "the parameter server at %s is back, at step %d", self._worker.address, standing.step
        )
        for step in sorted(self._kept):
            if step >= standing.step:
                self._push(step)
                self._decide(step)

    def _decide(self, step: int) -> None:
        """Bring the verdict of an earlier step once more, which the server has lost; a pull that
        wants no chunk.
        """
        if (verdict := self._verdicts.get(step)) is not None:
            told = pb.Wanted(
                learning_rate=verdict.learning_rate,
                factor=verdict.factor,
                first=self.row.num_chunks,
            )
            self._told(lambda: list(self._stream("Pull", told.SerializeToString(), 0, step)))

    def _dial(self) -> None:
        for channel in self._channels:
            channel.close()
        dial = partial(
            open_channel, self._worker.address, self._worker.security, own_connection=True
        )
        self._channels = [dial() for _ in range(self._worker.connections)]

    # Calls

    def _attend(self, *, again: bool) -> pb.Standing:
        told = attendance(self.row, self.rule, self._num_updates, again=again)
        standing = message_of(pb.Standing, self._unary("Attend", told.SerializeToString()))
        self._incarnation = standing.incarnation
        return standing

    def _load(self, rows: dict[str, torch.Tensor]) -> None:
        call: Any = self._channels[0].stream_unary(f"/{SERVICE}/Load")
        self._results(
            [self._begun(call.future(pieces_of(self.row, rows), **self._options(self._step)))]
        )

    def _push(self, step: int) -> None:
        self._results(self._start_pushes(step))

    def _start_pushes(self, step: int) -> list[Any]:
        """Chunk k goes over connection k mod C."""
        pushes = []
        for connection, channel in enumerate(self._channels):
            call: Any = channel.stream_unary(f"/{SERVICE}/Push")
            pushes.append(
                self._begun(call.future(self._chunks(step, connection), **self._options(step)))
            )
        return pushes

    def _chunks(self, step: int, connection: int) -> Iterator[bytes]:
        """What gRPC pulls and sends: it comes back for more when the network takes more."""
        for chunk in range(connection, self.row.num_chunks, self._worker.connections):
            wire = self._kept[step](chunk)
            began = time.perf_counter_ns()
            yield piece(pb.Piece(chunk=chunk), wire)
            moved = Moved(began, time.perf_counter_ns(), wire.nbytes)
            self.traffic.append(Traffic(self.stage, SERVER, moved))

    def _pull(
        self, step: int, verdict: StepDecision, pulled: "_IncomingParameters", push: bool
    ) -> None:
        """A push that is refused ends the pull, which would wait for it in vain."""
        streams = self._start_pulls(verdict, pulled)
        pushes = self._start_pushes(step) if push else []
        for call in pushes:
            call.add_done_callback(
                lambda done: None if done.code() is grpc.StatusCode.OK else _cancel(streams)
            )
        try:
            self._told(lambda: pulled.take(streams, self))
        except _Away:
            self._results(pushes)
            raise
        self._results(pushes)

    def _start_pulls(self, verdict: StepDecision, pulled: "_IncomingParameters") -> list[Any]:
        """Chunks come in order, over the connections in turn; of what came before the server went
        away none again.
        """
        stride = self._worker.connections
        streams = []
        for connection in range(stride):
            first = pulled.next + (connection - pulled.next) % stride
            wanted = pb.Wanted(
                learning_rate=verdict.learning_rate,
                factor=verdict.factor,
                first=first,
                stride=stride,
            )
            if verdict.factor is None:
                wanted.first = self.row.num_chunks
            streams.append(self._stream("Pull", wanted.SerializeToString(), connection))
        return streams

    def _unary(self, method: str, request: bytes) -> bytes:
        call: Any = self._channels[0].unary_unary(f"/{SERVICE}/{method}")
        (answer,) = self._results([self._begun(call.future(request, **self._options(self._step)))])
        return answer

    def _stream(
        self, method: str, request: bytes, connection: int, step: int | None = None
    ) -> Iterator[bytes]:
        call: Any = self._channels[connection].unary_stream(f"/{SERVICE}/{method}")
        options = self._options(self._step if step is None else step)
        stream: Iterator[bytes] = self._begun(call(request, **options))
        return stream

    def _options(self, step: int) -> dict[str, Any]:
        worker = self._worker
        place = pb.Place(
            session=worker.session,
            stage=self.stage,
            replica=worker.replica,
            step=step,
            incarnation=self._incarnation,
            part=worker.part,
        )
        metadata = (*token_metadata(worker.security), (PLACE_KEY, place.SerializeToString()))
        return {"metadata": metadata, "timeout": worker.timeout_s}

    def _begun(self, call: Any) -> Any:
        """Note a call, so that `fail` can end it."""
        with self._lock:
            self._calls = {known for known in self._calls if known.is_active()} | {call}
            failed = self._error is not None
        if failed:
            call.cancel()
        return call

    def _results(self, calls: list[Any]) -> list[bytes]:
        return self._told(lambda: [call.result() for call in calls])

    def _told(self, wait: Callable[[], T]) -> T:
        """What `wait` gives; what gRPC says went wrong, as dpipe says it. Raises `_Away` where that
        may pass.
        """
        try:
            return wait()
        except (grpc.RpcError, grpc.FutureCancelledError) as error:
            if self._error is not None:
                raise self._error from None
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.CANCELLED
            details = str(
                error.details() if isinstance(error, grpc.Call) else "it broke off the call"
            )
        if code in _AWAY:
            raise _Away(details)
        kind = _ERRORS.get(code, TransferError)
        if kind is JoinError and self._opened:
            # a run that has begun is not what the user mends by another configuration
            kind = TransferError
        raise kind(
            f"rank {self._worker.rank}: the parameter server at {self._worker.address} says: "
            f"{details}"
        )


class _IncomingParameters:
    """What has come of a pull, over however many calls."""

    def __init__(self, num_chunks: int, put: Put) -> None:
        self.next = 0
        self.committed = 0
        self._num_chunks = num_chunks
        self._put = put

    def take(self, streams: list[Iterator[bytes]], line: StageClient) -> None:
        began = 0
        num_bytes = 0
        while self.next < self._num_chunks:
            head, body = parse(next(streams[self.next % len(streams)], b"\0\0\0\0"))
            began = began or time.perf_counter_ns()
            if head.chunk != self.next or head.HasField("committed"):
                raise TransferError(
                    f"chunk {head.chunk} came from the parameter server where {self.next} was due"
                )
            self._put(head.chunk, head.whole, body)
            num_bytes += len(body)
            self.next += 1
        if num_bytes:
            moved = Moved(began, time.perf_counter_ns(), num_bytes)
            line.traffic.append(Traffic(line.stage, SERVER, moved, received=True))
        ends = [parse(message)[0].committed for stream in streams for message in stream]
        self.committed = max(ends, default=0)


def _cancel(calls: list[Any]) -> None:
    for call in calls:
        call.cancel()
