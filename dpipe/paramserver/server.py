"""The parameter server (Li et al. 2014) over gRPC: it holds the stages that workers bring, sums,
steps, and keeps them.

    worker, replica 0 ==push==>  .--------.              protos/dpipe/wire/v1/parameters.proto has the conversation
    worker, replica 1 ==push==>  | shelf  | master, journal    master.py the arithmetic
    worker, replica 2 ==push==>  | stage 0|                    journal.py what survives a kill
            all      <==pull===  '--------'                    shelf.py  who waits for whom

What workers push is averaged in replica order, so a run repeats itself bit for bit. With
`staleness` 0 every worker has the same parameters before each step. With `staleness` s > 0 (stale
synchronous parallel, Ho et al. 2013) a worker may begin step t with the newest parameters there
are, as long as every gradient up to step t - s - 1 is in them: it may be s steps ahead of the
slowest and never more. A step is the mean gradient of all replicas all the same.

Embedded in a rank it keeps nothing: it dies with the run, which has its checkpoints. By itself
(`dpipe serve`) it keeps every step before it says so (journal.py), and may be killed and started
again at any time.
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import grpc

from dpipe.errors import JoinError, NumericError, RunError, TransferError, TransferTimeout
from dpipe.paramserver.journal import Journal, Snapshots, recover
from dpipe.paramserver.messages import (
    PLACE_KEY,
    PROTOCOL,
    SERVICE,
    message_of,
    parse,
    piece,
    pieces_of,
    row_and_rule,
    rows_from,
    tensor_of,
    values_spec,
)
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.paramserver.stage_server import CallerGone, Session, StageServer
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision
from dpipe.wire.codec import codec
from dpipe.wire.rpc import Security, serve
from dpipe.wire.v1 import parameters_pb2 as pb

LOG = logging.getLogger("dpipe")
_OPEN = Security()
_MAX_CALLS = 1024  # at once; each waits in a thread, made when needed
_STOP_S = 2.0
_LOOK_S = 1.0
_PART = "-part-"  # in the name of a folder


class _Restarted(Exception):  # noqa: N818 - not an error: the caller attends again
    pass


@dataclass(frozen=True)
class _StageSpec:
    """What a worker said of its stage when it attended; the row itself may not have been loaded
    yet.
    """

    row: FlatSpec
    rule: StepRule
    num_updates: int


class ParameterServer:
    """Listens from the constructor on, at `port`, until `close`. Raises `JoinError` where it cannot
    bind.

    With a `folder`, each stage keeps its journal in `folder/stage-N`, further parts of it in
    `folder/stage-N-part-P`, and what is there is taken up again; raises `CheckpointError` where
    that is damaged.
    """

    def __init__(
        self,
        *,
        bind: str = "127.0.0.1",
        port: int = 0,
        security: Security = _OPEN,
        folder: Path | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        self._folder = folder
        self._snapshots = snapshots
        self._incarnation = secrets.token_hex(8)
        self._changed = threading.Condition()
        self._shelves = dict(self._recovered())
        masters = ((shelf.session, shelf.master) for shelf in self._shelves.values())
        self._known = {session: _StageSpec(m.row, m.rule, m.num_updates) for session, m in masters}
        self._run: str | None = None  # the last to attend
        self._closed = False
        calls: dict[str, Callable[..., Any]] = {
            "Attend": self._attend,
            "Norms": self._norms,
            "Leave": self._leave,
        }
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            **{
                name: grpc.unary_unary_rpc_method_handler(partial(_answer, call))
                for name, call in calls.items()
            },
            "Load": grpc.stream_unary_rpc_method_handler(partial(_answer, self._load)),
            "Push": grpc.stream_unary_rpc_method_handler(partial(_answer, self._push)),
            "Pull": grpc.unary_stream_rpc_method_handler(partial(_stream, self._pull)),
            "Fetch": grpc.unary_stream_rpc_method_handler(partial(_stream, self._fetch)),
        }
        try:
            generic = [grpc.method_handlers_generic_handler(SERVICE, handlers)]
            self._server, self.port = serve(generic, bind, port, security, _MAX_CALLS)
        except BaseException:
            self._close_shelves(_Restarted("the parameter server could not listen"))
            raise

    @property
    def standing(self) -> dict[int, int]:
        """By stage, the step that comes next; of parts that of the one furthest behind."""
        steps: dict[int, int] = {}
        with self._changed:
            for shelf in self._in_use():
                stage = shelf.session.stage
                step = shelf.master.step
                steps[stage] = min(step, steps.get(stage, step))
        return steps

    @property
    def failure(self) -> RunError | None:
        """Why a stage cannot go on here; its workers are told when they call."""
        with self._changed:
            return next((shelf.failure for shelf in self._shelves.values() if shelf.failure), None)

    def wait_until_left(self, timeout_s: float) -> bool:
        """Whether every replica of every stage has said that it is done; waits for it."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._all_left() and time.monotonic() < deadline:
                self._changed.wait(min(_LOOK_S, timeout_s))
            return self._all_left()

    def close(self) -> None:
        """Stop listening. Workers that are not done take it for a server that comes back, and wait
        for it.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        stopped = self._server.stop(
            _STOP_S
        )  # an answer that is on its way, to the last worker's Leave, arrives
        self._close_shelves(_Restarted("the parameter server was closed"))
        if self._all_left():
            for shelf in self._in_use():
                shelf.forget_who_left()
        stopped.wait(2 * _STOP_S)

    def _all_left(self) -> bool:
        shelves = self._in_use()
        return bool(shelves) and all(shelf.is_left_by_all for shelf in shelves)

    def _in_use(self) -> list[StageServer]:
        """Those of the last run to attend: one before it, cut into more stages or parts, may have
        left some behind.
        """
        return [
            shelf for shelf in self._shelves.values() if self._run in (None, shelf.session.name)
        ]

    def _close_shelves(self, why: Exception) -> None:
        for shelf in self._shelves.values():
            shelf.close(why)

    def _recovered(self) -> Iterator[tuple[tuple[int, int], StageServer]]:
        for folder in sorted(self._folder.glob("stage-*")) if self._folder is not None else ():
            assert self._snapshots is not None, (
                "a folder needs something that reads and writes in it"
            )
            if (found := recover(folder, self._snapshots)) is not None:
                (master, journal) = found
                (stage, _, part) = folder.name.removeprefix("stage-").partition(_PART)
                session = Session(journal.session, int(stage), int(part or 0))
                LOG.info("%s of run %s goes on at step %d", session.what, session.name, master.step)
                yield session.slot, StageServer(session, master, journal)

    # What workers call. Each may be called again: what has happened does not happen again.

    def _attend(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        told = message_of(pb.Attendance, request)
        place = _place(context)
        if told.protocol != PROTOCOL:
            raise JoinError(
                f"it speaks protocol {PROTOCOL}, the worker {told.protocol}: install one version "
                "of dpipe"
            )
        session = _session(place)
        known = _StageSpec(*row_and_rule(told), told.num_updates)
        with self._changed:
            if not told.again or self._has(
                session
            ):  # else it only looks whether this server can be reached
                self._run = session.name
            if not told.again:
                self._make_room(session, known)
            self._check_same(session, known)
            while not told.again and place.replica > 0 and not self._has(session):
                self._check_open(context)
                self._changed.wait(_LOOK_S)
            return self._standing_of(session)

    def _load(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        session = _session(place)
        with self._changed:
            if session not in self._known:
                raise TransferError("a row was sent by a worker that has not attended")
            known = self._known[session]
        rows = rows_from(known.row, messages)
        needed = StageTensors.zeros(0, lossy=known.rule.lossy_parameters).rows()
        if set(rows) != set(needed):
            raise TransferError(f"rows {sorted(rows)} came where {sorted(needed)} belong")
        master = StageState(
            known.row,
            known.rule,
            StageTensors(**rows),
            step=place.step,
            num_updates=known.num_updates,
        )
        with self._changed:
            if not self._has(session):
                self._shelves[session.slot] = StageServer(
                    session, master, self._begun(session, master)
                )
                self._changed.notify_all()
            return self._standing_of(session)

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        shelf = self._shelf(place)
        coder = codec(shelf.master.rule.wire)
        row = shelf.master.row
        for message in messages:
            head, body = parse(message)
            like = values_spec(row, head.chunk)
            what = f"chunk {head.chunk} of replica {place.replica}'s gradient of step {place.step}"
            values = coder.decode(tensor_of(body, coder.wire_spec(like), what), like)
            shelf.add(place.step, place.replica, head.chunk, values)
        return pb.Standing(
            step=shelf.master.step, incarnation=self._incarnation
        ).SerializeToString()

    def _norms(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        squares = self._shelf(place).norms(place.step, _watched(context, self._shelf(place)))
        return pb.Squares(by_layer=squares).SerializeToString()

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        place = _place(context)
        wanted = message_of(pb.Wanted, request)
        shelf = self._shelf(place)
        caller = _watched(context, shelf)
        factor = wanted.factor if wanted.HasField("factor") else None
        shelf.decide(place.step, place.replica, StepDecision(wanted.learning_rate, factor))
        for chunk in range(wanted.first, shelf.master.row.num_chunks, max(1, wanted.stride)):
            given = shelf.give(place.step, place.replica, chunk, caller)
            yield piece(pb.Piece(chunk=chunk, whole=given.whole), given.wire)
        yield piece(pb.Piece(committed=shelf.committed(place.step, caller)))

    def _fetch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        place = _place(context)
        shelf = self._shelf(place)
        yield from pieces_of(shelf.master.row, shelf.fetch(place.step, _watched(context, shelf)))

    def _leave(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        self._shelf(place).leave(place.replica)
        with self._changed:
            self._changed.notify_all()
            return self._standing_of(_session(place))

    # Which run a stage belongs to. The newest one has it: an older one is over, or is told.

    def _make_room(self, session: Session, known: "_StageSpec") -> None:
        """Let `session` have its stage, where it has not got it yet: all parts of it that another
        run has.
        """
        if session in self._known:
            return
        self._known = {
            s: what
            for s, what in self._known.items()
            if s.stage != session.stage or s.name == session.name
        }
        self._known[session] = known
        for old in [shelf for shelf in self._shelves.values() if shelf.session not in self._known]:
            del self._shelves[old.session.slot]
            LOG.warning(
                "%s of run %s gives way to run %s", old.session.what, old.session.name, session.name
            )
            old.close(JoinError(f"another run ({session.name}) has taken its place"))

    def _check_same(self, session: Session, told: "_StageSpec") -> None:
        if (known := self._known.get(session)) is None:
            return
        if (what := known.row.difference(told.row)) is not None:
            raise JoinError(
                f"the replicas of {session.what} do not fit each other: this one has {what}"
            )
        if known.rule != told.rule:
            raise JoinError(
                f"the replicas of {session.what} do not agree: {told.rule} here, {known.rule} there"
            )

    def _has(self, session: Session) -> bool:
        return session.slot in self._shelves and self._shelves[session.slot].session == session

    def _standing_of(self, session: Session) -> bytes:
        step = self._shelves[session.slot].master.step if self._has(session) else 0
        standing = pb.Standing(
            empty=not self._has(session), step=step, incarnation=self._incarnation
        )
        return standing.SerializeToString()

    def _shelf(self, place: pb.Place) -> StageServer:
        if place.incarnation != self._incarnation:
            raise _Restarted("it was started again")
        session = _session(place)
        with self._changed:
            if not self._has(session):
                raise JoinError(
                    f"it holds no {session.what} of run {session.name}; has another run taken over?"
                )
            return self._shelves[session.slot]

    def _begun(self, session: Session, master: StageState) -> Journal | None:
        if self._folder is None:
            return None
        assert self._snapshots is not None
        name = (
            f"stage-{session.stage}{_PART}{session.part}"
            if session.part
            else f"stage-{session.stage}"
        )
        journal = Journal(self._folder / name, self._snapshots, session.name)
        journal.begin(master)
        return journal

    def _check_open(self, context: grpc.ServicerContext) -> None:
        if self._closed or not context.is_active():
            raise CallerGone


def _watched(context: grpc.ServicerContext, shelf: StageServer) -> grpc.ServicerContext:
    """A caller that goes away wakes the thread that waits for it."""
    context.add_callback(shelf.wake)
    return context


def _metadata(context: grpc.ServicerContext, key: str) -> bytes:
    found: Any = dict(context.invocation_metadata()).get(key, b"")
    return bytes(found)


def _place(context: grpc.ServicerContext) -> pb.Place:
    return message_of(pb.Place, _metadata(context, PLACE_KEY))


def _session(place: pb.Place) -> Session:
    return Session(place.session, place.stage, place.part)


def _answer(call: Callable[..., bytes], request: Any, context: grpc.ServicerContext) -> bytes:
    try:
        return call(request, context)
    except Exception as error:
        return _abort(error, context)


def _stream(
    call: Callable[..., Iterator[bytes]], request: Any, context: grpc.ServicerContext
) -> Iterator[bytes]:
    try:
        yield from call(request, context)
    except Exception as error:
        _abort(error, context)


_CODES = {
    _Restarted: grpc.StatusCode.ABORTED,
    CallerGone: grpc.StatusCode.CANCELLED,
    JoinError: grpc.StatusCode.FAILED_PRECONDITION,
    TransferError: grpc.StatusCode.INVALID_ARGUMENT,
    NumericError: grpc.StatusCode.OUT_OF_RANGE,
    TransferTimeout: grpc.StatusCode.DEADLINE_EXCEEDED,
}


def _abort(error: Exception, context: grpc.ServicerContext) -> NoReturn:
    """Tell the caller what is wrong, in a code that `client.py` turns back into an error of the
    same kind.
    """
    if isinstance(error, grpc.RpcError):  # the caller broke off in the middle of what it sent
        context.abort(grpc.StatusCode.CANCELLED, "the call was broken off")
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, RunError):
        LOG.error("a call failed", exc_info=error)
    context.abort(code, str(error) or type(error).__name__)
