"""The parameter server (Li et al. 2014) over gRPC: it holds the stages that workers bring, averages
their gradients, steps, and keeps what it has stepped.

    worker, replica 0 ==push==>  .----------------.
    worker, replica 1 ==push==>  | stage 0: state |       parameters.proto has the conversation
            all      <==pull===  '----------------'

What workers push is averaged in replica order, so a run repeats itself bit for bit. With
`staleness` 0 every worker has the same parameters before each step. With `staleness` s > 0 (stale
synchronous parallel, Ho et al. 2013) a worker may begin step t with the newest parameters there
are, as long as every gradient up to step t - s - 1 is in them: it may be s steps ahead of the
slowest and never more. A step is the mean gradient of all replicas all the same.

Embedded in a rank it keeps nothing: it dies with the run, which has its checkpoints. By itself
(`dpipe serve`) it keeps every step before it acknowledges it, and may be killed and started again
at any time.
"""

import logging
import os
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
    chunk_spec,
    parse,
    piece,
    pieces_of,
    spec_and_rule,
    vectors_from,
)
from dpipe.paramserver.spec import FlatSpec, StepRule
from dpipe.paramserver.stage_server import CallerGone, Session, StageServer
from dpipe.paramserver.stage_state import StageState, StageTensors, StepDecision
from dpipe.wire.codec import codec
from dpipe.wire.message import message_of, tensor_of
from dpipe.wire.rpc import Security, serve
from dpipe.wire.v1 import parameters_pb2 as pb

LOG = logging.getLogger("dpipe")
_OPEN = Security()
_MAX_CALLS = 1024  # at once; each waits in a thread, made when needed
_STOP_S = 2.0  # for answers that are on their way
_POLL_S = 1.0  # how often a waiting call looks whether its caller is still there
_PART = "-part-"  # in the name of a stage's folder
# of a stage: parameters and moments as they are, and those of the step in progress
_VECTORS = 6
_MAX_CHUNKS = 1 << 22  # some bytes each, for whose turn it is


class _Restarted(Exception):  # noqa: N818 - not an error: the caller attends again
    pass


@dataclass(frozen=True)
class _StageSpec:
    """What a worker said of its stage when it attended; the stage need not be loaded yet."""

    spec: FlatSpec
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
        """`snapshots` reads and writes in `folder`: both are given, or none."""
        self._folder = folder
        self._snapshots = snapshots
        # Of this process: what a worker has sent to the one before, this one does not have.
        self._incarnation = secrets.token_hex(8)
        # Guards what is below; notified as stages come and are left.
        self._changed = threading.Condition()
        # By stage and part. Before it listens: who calls finds what was kept.
        self._stages = dict(self._recovered())
        # of all that have attended, also of those that are not loaded yet
        self._known: dict[Session, _StageSpec] = {}
        for server in self._stages.values():
            state = server.state
            known = _StageSpec(state.spec, state.rule, state.num_updates)
            self._known[server.session] = known
        self._run: str | None = None  # the last run to attend
        self._closed = False
        try:
            generic = [grpc.method_handlers_generic_handler(SERVICE, self._handlers())]
            self._server = serve(generic, bind, port, security, _MAX_CALLS)
        except BaseException:
            self._close_stages(_Restarted("the parameter server could not listen"))
            raise
        self.port = self._server.port

    def _handlers(self) -> "dict[str, grpc.RpcMethodHandler[bytes, bytes]]":
        one_for_one = {"Attend": self._attend, "Norms": self._norms, "Leave": self._leave}
        one_for_many = {"Load": self._load, "Push": self._push}
        many_for_one = {"Pull": self._pull, "Fetch": self._fetch}
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {}
        for name, call in one_for_one.items():
            handlers[name] = grpc.unary_unary_rpc_method_handler(partial(_answer, call))
        for name, read in one_for_many.items():
            handlers[name] = grpc.stream_unary_rpc_method_handler(partial(_answer, read))
        for name, stream in many_for_one.items():
            handlers[name] = grpc.unary_stream_rpc_method_handler(partial(_stream, stream))
        return handlers

    @property
    def standing(self) -> dict[int, int]:
        """By stage, the step that comes next; of parts, that of the one furthest behind."""
        steps: dict[int, int] = {}
        with self._changed:
            for server in self._in_use():
                stage = server.session.stage
                step = server.state.step
                steps[stage] = min(step, steps.get(stage, step))
        return steps

    @property
    def failure(self) -> RunError | None:
        """Why a stage cannot go on here; its workers hear it when they call."""
        with self._changed:
            for server in self._stages.values():
                if server.failure is not None:
                    return server.failure
        return None

    def wait_until_left(self, timeout_s: float) -> bool:
        """Waits for every replica of every stage to say that it is done; whether all have."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._all_left() and time.monotonic() < deadline:
                self._changed.wait(min(_POLL_S, timeout_s))
            return self._all_left()

    def close(self) -> None:
        """Stop listening. Workers that are not done expect the server back, and wait for it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # The grace lets an answer arrive that is on its way, as to the last worker's Leave.
        self._server.stop(_STOP_S)
        self._close_stages(_Restarted("the parameter server was closed"))
        if self._all_left():
            for server in self._in_use():
                server.forget_who_left()
        self._server.join(2 * _STOP_S)

    def _all_left(self) -> bool:
        servers = self._in_use()
        return bool(servers) and all(server.is_left_by_all for server in servers)

    def _in_use(self) -> list[StageServer]:
        """Those of the last run to attend: one before it, cut otherwise, may have left some."""
        servers = list(self._stages.values())
        if self._run is None:
            return servers
        return [server for server in servers if server.session.name == self._run]

    def _close_stages(self, why: Exception) -> None:
        for server in self._stages.values():
            server.close(why)

    def _recovered(self) -> Iterator[tuple[tuple[int, int], StageServer]]:
        if self._folder is None:
            return
        assert self._snapshots is not None, "a folder goes with what reads and writes in it"
        for folder in sorted(self._folder.glob("stage-*")):
            kept = recover(folder, self._snapshots)
            if kept is None:
                continue
            state, journal = kept
            stage, _, part = folder.name.removeprefix("stage-").partition(_PART)
            session = Session(journal.session, int(stage), int(part or 0))
            LOG.info("%s of run %s goes on at step %d", session.what, session.name, state.step)
            yield session.slot, StageServer(session, state, journal)

    # What workers call. Each may be called again: what has happened does not happen again.

    def _attend(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        attendance = message_of(pb.Attendance, request)
        place = _place(context)
        if attendance.protocol != PROTOCOL:
            raise JoinError(
                f"it speaks protocol {PROTOCOL}, the worker {attendance.protocol}: install one "
                "version of dpipe"
            )
        session = _session(place)
        spec, rule = spec_and_rule(attendance)
        _refuse_large(spec, session)
        stage = _StageSpec(spec, rule, attendance.num_updates)
        begins = not attendance.again
        with self._changed:
            if begins:
                self._make_room(session, stage)
            # One that neither begins nor is known only looks whether this server can be reached.
            if begins or self._has(session):
                self._run = session.name
            self._check_same(session, stage)
            # Replica 0 brings the parameters; the others have nothing to push before.
            while begins and place.replica > 0 and not self._has(session):
                if self._closed or not context.is_active():
                    raise CallerGone
                self._changed.wait(_POLL_S)
            return self._standing_of(session)

    def _load(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        session = _session(place)
        with self._changed:
            if session not in self._known:
                raise TransferError("parameters came from a worker that has not attended")
            stage = self._known[session]
        # Without the lock: it takes as long as the network.
        vectors = vectors_from(stage.spec, messages)
        needed = StageTensors.zeros(0, lossy=stage.rule.lossy_parameters).by_name()
        if set(vectors) != set(needed):
            raise TransferError(f"{sorted(vectors)} came where {sorted(needed)} belong")
        tensors = StageTensors(**vectors)
        state = StageState(
            stage.spec,
            stage.rule,
            tensors,
            step=place.step,
            num_updates=stage.num_updates,
        )
        with self._changed:
            # A load that is repeated must not undo the steps since the first.
            if not self._has(session):
                journal = self._new_journal(session, state)
                self._stages[session.slot] = StageServer(session, state, journal)
                self._changed.notify_all()
            return self._standing_of(session)

    def _push(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        server = self._stage(place)
        coder = codec(server.state.rule.wire)
        for message in messages:
            head, body = parse(message)
            values_spec = chunk_spec(server.state.spec, head.chunk)
            what = f"chunk {head.chunk} of replica {place.replica}'s gradient of step {place.step}"
            wire = tensor_of(body, coder.wire_spec(values_spec), what)
            # In the caller's thread; under the stage's lock it is only added.
            values = coder.decode(wire, values_spec)
            server.add(place.step, place.replica, head.chunk, values)
        standing = pb.Standing(step=server.state.step, incarnation=self._incarnation)
        return standing.SerializeToString()

    def _norms(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        server = self._stage(place)
        squares = server.norms(place.step, _watched(context, server))
        return pb.Squares(by_layer=squares).SerializeToString()

    def _pull(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        place = _place(context)
        wanted = message_of(pb.Wanted, request)
        server = self._stage(place)
        caller = _watched(context, server)
        factor = wanted.factor if wanted.HasField("factor") else None
        decision = StepDecision(wanted.learning_rate, factor)
        server.decide(place.step, place.replica, decision)
        stride = max(1, wanted.stride)
        for chunk in range(wanted.first, server.state.spec.num_chunks, stride):
            outgoing = server.give(place.step, place.replica, chunk, caller)
            head = pb.Piece(chunk=chunk, whole=outgoing.whole)
            yield piece(head, outgoing.wire)
        yield piece(pb.Piece(committed=server.committed(place.step, caller)))

    def _fetch(self, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        place = _place(context)
        server = self._stage(place)
        vectors = server.fetch(place.step, _watched(context, server))
        yield from pieces_of(server.state.spec, vectors)

    def _leave(self, request: bytes, context: grpc.ServicerContext) -> bytes:
        place = _place(context)
        self._stage(place).leave(place.replica)
        with self._changed:
            self._changed.notify_all()
            return self._standing_of(_session(place))

    # Which run a stage belongs to: the newest. An older one is over, or hears so when it calls.

    def _make_room(self, session: Session, stage: _StageSpec) -> None:
        """Let a new `session` have its stage: other runs lose all parts of it."""
        if session in self._known:
            return
        for other in self._known:
            # A rank that was stopped for long, and does not know yet that it is out.
            if session.is_behind(other):
                raise JoinError(f"run {session.name} has gone on without this worker: {other.name}")
        kept = {}
        for other, spec in self._known.items():
            is_another_stage = other.stage != session.stage or other.name == session.name
            # An earlier epoch may have been cut into more stages.
            if is_another_stage and not other.is_behind(session):
                kept[other] = spec
        kept[session] = stage
        self._known = kept
        # Also its other parts: a run that is cut otherwise may never bring them.
        for server in list(self._stages.values()):
            old = server.session
            if old not in self._known:
                del self._stages[old.slot]
                LOG.warning("%s of run %s gives way to run %s", old.what, old.name, session.name)
                server.close(JoinError(f"another run ({session.name}) has taken its place"))

    def _check_same(self, session: Session, stage: _StageSpec) -> None:
        """Raises `JoinError` where another replica has described the stage otherwise."""
        known = self._known.get(session)
        if known is None:
            return
        difference = known.spec.difference(stage.spec)
        if difference is not None:
            raise JoinError(
                f"the replicas of {session.what} do not fit each other: this one has {difference}"
            )
        if known.rule != stage.rule:
            raise JoinError(
                f"the replicas of {session.what} do not agree: {stage.rule} here, {known.rule} "
                "there"
            )

    def _has(self, session: Session) -> bool:
        server = self._stages.get(session.slot)
        return server is not None and server.session == session

    def _standing_of(self, session: Session) -> bytes:
        standing = pb.Standing(empty=True, incarnation=self._incarnation)
        if self._has(session):
            standing.empty = False
            standing.step = self._stages[session.slot].state.step
        return standing.SerializeToString()

    def _stage(self, place: pb.Place) -> StageServer:
        # What it pushed to the server before this one is lost: it has to attend, and push again.
        if place.incarnation != self._incarnation:
            raise _Restarted("it was started again")
        session = _session(place)
        with self._changed:
            if not self._has(session):
                raise JoinError(
                    f"it holds no {session.what} of run {session.name}; has another run taken over?"
                )
            return self._stages[session.slot]

    def _new_journal(self, session: Session, state: StageState) -> Journal | None:
        if self._folder is None:
            return None
        assert self._snapshots is not None, "a folder goes with what reads and writes in it"
        part = f"{_PART}{session.part}" if session.part else ""
        name = f"stage-{session.stage}{part}"
        journal = Journal(self._folder / name, self._snapshots, session.name)
        journal.begin(state)
        return journal


def _refuse_large(spec: FlatSpec, session: Session) -> None:
    """Raises `TransferError` for a stage that this machine cannot hold: before any of it is."""
    # Fp32, whatever the workers compute in.
    needed = _VECTORS * 4 * spec.length
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > has or spec.num_chunks > _MAX_CHUNKS:
        raise TransferError(
            f"{session.what} takes {needed / 1e9:,.1f} GB here, in {spec.num_chunks} chunks; this "
            f"machine has {has / 1e9:,.1f} GB for {_MAX_CHUNKS} at most: share the stages out "
            '(data_parallel.servers = "per-stage"), or raise data_parallel.chunk_bytes'
        )


def _watched(context: grpc.ServicerContext, server: StageServer) -> grpc.ServicerContext:
    """A caller that goes away wakes the thread that waits for it."""
    context.add_callback(server.wake)
    return context


def _place(context: grpc.ServicerContext) -> pb.Place:
    """Who calls, and at which step."""
    metadata: dict[str, Any] = dict(context.invocation_metadata())
    return message_of(pb.Place, bytes(metadata.get(PLACE_KEY, b"")))


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
    """Tell the caller what is wrong, in a code that `client.py` makes the same error of."""
    # The caller broke off in the middle of what it sent.
    if isinstance(error, grpc.RpcError):
        context.abort(grpc.StatusCode.CANCELLED, "the call was broken off")
    code = _CODES.get(type(error), grpc.StatusCode.INTERNAL)
    # A mistake of dpipe's: the caller gets a line of text, so the traceback must stay here.
    if code is grpc.StatusCode.INTERNAL and not isinstance(error, RunError):
        LOG.error("a call failed", exc_info=error)
    context.abort(code, str(error) or type(error).__name__)
