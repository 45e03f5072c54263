"""`Coordinator`: one rank's connection to the `CoordinatorServer` in rank 0.

caller ──▶ outbox ──▶ writer                      ══session══▶ server
caller ◀── futures, callbacks ◀── _read (reader)  ◀══session══ server
           _attend_to (clock): pings, and dials again where a stream broke
"""

import json
import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TypeVar, cast

import grpc
from google.protobuf.message import DecodeError

from dpipe.coordinator.base import Coordination, Gathered, name_ranks
from dpipe.coordinator.frame import METHOD, PROTOCOL, assemble
from dpipe.coordinator.limits import FROM_COORDINATOR, REASON_CHARACTERS, check
from dpipe.coordinator.line import GONE_S, Line
from dpipe.errors import DpipeError, JoinError, RunAborted, TransferError
from dpipe.relay.ends import RelayEnds
from dpipe.relay.reach import ways_of
from dpipe.session.frames import MessageFrames
from dpipe.session.greeting import Greeted
from dpipe.session.grpc_stream import Dialling, GrpcStream
from dpipe.session.redial import GREETING_S, dial_again
from dpipe.session.session import LinkSession
from dpipe.session.stops import Stops
from dpipe.wire.rpc import Security
from dpipe.wire.text import visible
from dpipe.wire.v1 import coordinator_pb2 as pb
from dpipe.wire.v1.transport_pb2 import Hello

LOG = logging.getLogger("dpipe")
T = TypeVar("T")

_NO_SECURITY = Security()

_WATCHES = 64  # looks at the stream in `heartbeat_s`
_CLOCK_SAMPLES = 16  # round trips, of which the fastest counts
_FIRST_RETRY_S = 0.02  # ranks that start together miss the coordinator by little
_RETRY_S = 0.5  # between attempts to reach a coordinator that is not up
# Ranks that start together join within a moment of each other: of those nothing is said.
_PATIENCE_S = 1.0
_AGAIN_S = 30.0  # before the same text is reported again
_SLACK_S = 2.0  # beyond the coordinator's own deadline, whose message names who is missing
_STOP_S = 5.0  # for the reading thread, once the call is cancelled
_VERDICT_S = 5.0  # for the cause of an abort; above the coordinator's grace for a symptom
_LEAVE_S = 60.0  # for uploads under way to arrive


class _NotThere(Exception):  # noqa: N818 - not an error yet: the coordinator may still come up
    pass


class Coordinator(Coordination):
    """See `base.Coordination`. Made by `join`; every method may be called from any thread."""

    def __init__(
        self,
        address: str,
        join: pb.Join,
        security: Security,
        heartbeat_s: float,
        say: Callable[[str], None],
    ) -> None:
        self.rank: int = join.rank
        self.world_size: int = join.world_size
        self.addresses: dict[int, str | None] = {}
        self.link_secrets: dict[int, bytes] = {}
        self.relayed: tuple[tuple[int, int], ...] = ()
        self._relay_ends: RelayEnds | None = None
        self._address = address
        self._join = join
        self._security = security
        self._heartbeat_s = heartbeat_s
        self._say = say
        self._lock = threading.Lock()  # guards the end of the run against gathers and callbacks
        self._over: RunAborted | None = None
        self._leaving = False
        self._missing: tuple[int, ...] = ()  # ranks that have not joined, while joining
        self._welcome: Future[pb.Welcome] = Future()
        self._verdict: Future[RunAborted] = Future()
        self._gathers: dict[str, Gathered] = {}
        self._callbacks: list[Callable[[RunAborted], None]] = []
        # Round trip and offset in ns.
        self._clock: deque[tuple[int, int]] = deque(maxlen=_CLOCK_SAMPLES)
        self._ponged = threading.Event()
        self._heard_at = time.monotonic()
        self._heard_end = False
        self._why_lost = ""
        self._make_line()

    def _make_line(self) -> None:
        self._dialling: Dialling | None = None  # not answered yet
        self._closing = threading.Event()
        self._broke = threading.Event()
        self._session = LinkSession(
            self._heartbeat_s, may_resume=self._may_resume, on_break=self._broke.set
        )
        name = f"coordination of rank {self.rank}"
        self._line = Line[pb.ToCoordinator](self._session, f"{name}, writer")
        self._reader = _thread(self._read, name)
        self._clock_thread = _thread(self._attend_to, f"{name}, clock")

    def _open(self, deadline: float) -> None:
        """Raises `_NotThere` where nobody answers, and `JoinError` where this rank is refused."""
        try:
            stream, greeted = self._dial(deadline, resumes=False)
        except (OSError, ValueError, DpipeError) as error:
            raise _explain(error, self._address) from None
        self._session.secret = greeted.secret
        self._line.tell(pb.ToCoordinator(join=self._join))
        self._line.start(stream)
        for thread in (self._reader, self._clock_thread):
            thread.start()

    def _may_resume(self) -> bool:
        return not self._closing.is_set() and not self._heard_end

    def _dial(self, deadline: float, *, resumes: bool) -> tuple[GrpcStream, Greeted]:
        dialling = Dialling(
            self._address,
            METHOD,
            Hello(
                protocol=PROTOCOL,
                from_rank=self.rank,
                resumes=resumes,
                received=self._session.received,
            ),
            self._session.secret,
            self._security,
            silence_s=self._heartbeat_s,
        )
        self._dialling = dialling
        if self._closing.is_set():
            dialling.cancel()
        try:
            return dialling.greet(deadline)
        finally:
            self._dialling = None

    @classmethod
    def join(
        cls,
        address: str,
        rank: int,
        world_size: int,
        *,
        shared: dict[str, object],
        advertised: str | None = None,
        security: Security = _NO_SECURITY,
        join_s: float = 120.0,
        heartbeat_s: float = 40.0,
        on_wait: Callable[[str], None] = lambda text: None,
        on_attempt: Callable[["Coordinator"], None] = lambda coordinator: None,
    ) -> "Coordinator":
        """Wait for the coordinator at `address` (`host:port`) to come up, then for all ranks.

        `shared` must be equal on all ranks; `advertised` is where others reach this one; `on_wait`
        is told, from some thread, what this rank waits for; `on_attempt` gets each attempt before
        it begins, the last of which is what this returns, and may let it `give_up`.

        Raises `JoinError` where some rank is missing after `join_s`, and at once where this rank or
        another one is refused.
        """
        text = json.dumps(shared, sort_keys=True)
        join = pb.Join(
            protocol=PROTOCOL, rank=rank, world_size=world_size, advertised=advertised, shared=text
        )
        say = _now_and_then(on_wait)
        deadline = time.monotonic() + join_s
        # Each attempt on a channel of its own: one that has failed waits longer and longer.
        retry_s = _FIRST_RETRY_S
        while True:
            self = cls(address, join, security, heartbeat_s, say)
            try:
                on_attempt(self)
                self._open(deadline)
                self._wait_for_welcome(deadline - time.monotonic())
                return self
            except _NotThere as why:
                over = self._over  # that it was told to give up
                self.close()
                if over:
                    raise over from None
                if time.monotonic() + retry_s > deadline:
                    raise _nobody(address, join_s, str(why)) from None
                say(f"waiting for the coordinator at {address} ({why})")
                time.sleep(retry_s)
                retry_s = min(2 * retry_s, _RETRY_S)
            except BaseException:
                self.close()
                raise

    def _wait_for_welcome(self, timeout_s: float) -> None:
        self._await_all(timeout_s)
        try:
            welcome = self._welcome.result(_SLACK_S)
        except TimeoutError:
            raise JoinError(
                f"gave up waiting at {self._address} for {name_ranks(self._missing)} to join"
            ) from None
        for rank, address in enumerate(welcome.addresses):
            self.addresses[rank] = address.advertised if address.HasField("advertised") else None
        self.link_secrets = dict(enumerate(welcome.link_secrets))
        # As many as the estimate takes, at once: the first spans of a run are on the clock already.
        for _ in range(_CLOCK_SAMPLES):
            self._ponged.clear()
            self._send(_ping())
            # The end of the run sets it once, which may have been before it was cleared.
            if self._over or not self._ponged.wait(self._heartbeat_s) or self._over:
                silent = f"the coordinator at {self._address} let us in and fell silent"
                raise JoinError(str(self._over or silent))

    def _await_all(self, timeout_s: float) -> None:
        """Return once all ranks have joined, or after `timeout_s`; say who is missing, less and
        less often.
        """
        deadline = time.monotonic() + timeout_s
        patience_s = _PATIENCE_S
        while (left_s := deadline - time.monotonic()) > 0:
            with suppress(TimeoutError):
                self._welcome.result(min(left_s, patience_s))
                return
            patience_s = min(2 * patience_s, _AGAIN_S)
            if self._missing:
                ranks = name_ranks(self._missing)
                self._say(f"waiting at {self._address} for {ranks} of {self.world_size} to join")

    @property
    def clock_offset_ns(self) -> int:
        """By the fastest of the last round trips (Mills 1991); pings keep it current as clocks
        drift.
        """
        return min(self._clock.copy())[1]

    def gather(self, key: str, payload: bytes) -> Gathered:
        gathered = Gathered(key, lambda: self._send(pb.ToCoordinator(ask=pb.Ask(key=key))))
        with self._lock:
            # Here, by name: for a second part the coordinator would put this rank out.
            if key in self._gathers:
                raise ValueError(
                    f"rank {self.rank} has already given its part of {key!r}, which is still under "
                    "way"
                )
            self._gathers[key] = gathered
            over = self._over
        if over:
            _settle(gathered.parts, error=over)
        else:
            self._send(pb.ToCoordinator(part=pb.Part(key=key, payload=payload)))
        return gathered

    def routes(self, here: str, peers: Collection[int], timeout_s: float) -> dict[int, str | None]:
        ways = ways_of(self, peers, timeout_s)
        if ways is None:
            return {}
        self.relayed = ways.relayed
        if self.rank == 0:
            for lower, higher in ways.relayed:
                LOG.warning(
                    "rank %d and rank %d cannot dial each other: the coordinator's machine relays "
                    "their link, which is slower than a direct one; make one of them reachable "
                    "(node.advertise, node.port)",
                    lower,
                    higher,
                )
        self._relay_ends = RelayEnds(
            self.rank, self._address, self._security, self.link_secrets, self._heartbeat_s
        )
        return ways.routes(self.rank, self.addresses, here, self._relay_ends)

    def upload(self, kind: str, payload: bytes) -> None:
        if self._over:
            raise self._over
        self._send(pb.ToCoordinator(upload=pb.Upload(kind=kind, payload=payload)))

    def abort(self, reason: str, *, symptom: bool = False) -> RunAborted:
        failure = pb.Failure(reason=reason[:REASON_CHARACTERS], symptom=symptom)
        self._send(pb.ToCoordinator(failure=failure))
        try:
            return self._verdict.result(_VERDICT_S)
        except TimeoutError:
            return RunAborted(f"rank {self.rank} failed: {reason}")

    def on_abort(self, callback: Callable[[RunAborted], None]) -> None:
        with self._lock:
            over = self._over
            if not over:
                self._callbacks.append(callback)
        if over:
            callback(over)

    def give_up(self, error: RunAborted) -> None:
        self._end(error)
        self._hang_up()

    def leave(self) -> None:
        self._leaving = True
        self._send(pb.ToCoordinator(leave=pb.Leave()))
        self._reader.join(_LEAVE_S)
        over = self._over
        self.close()
        if not self._heard_end and not over:
            raise self._lost()

    def close(self) -> None:
        self._leaving = True
        if self._relay_ends is not None:
            self._relay_ends.close()
        self._hang_up()
        for thread in (self._reader, self._clock_thread):
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(_STOP_S)
        self._line.join(_STOP_S)
        self._end(RunAborted(f"rank {self.rank} has closed its line to the coordinator"))

    # The stream

    def _hang_up(self) -> None:
        """Wake whoever dials, reads, writes or attends to the session: it is over."""
        self._closing.set()
        self._broke.set()
        dialling = self._dialling
        if dialling is not None:
            dialling.cancel()
        self._line.tell(None)
        self._session.close()

    def _send(self, message: pb.ToCoordinator) -> None:
        try:
            check(message)
        except DecodeError as error:
            raise ValueError(f"rank {self.rank} may not send this: {error}") from None
        self._line.tell(message)

    def _attend_to(self) -> None:
        """Ping a few times a heartbeat, and keep the session going."""
        interval_s = self._heartbeat_s / _WATCHES
        stops = Stops(interval_s, self._heartbeat_s)
        ping_at = time.monotonic()
        while not self._closing.is_set():
            self._broke.wait(interval_s)
            self._broke.clear()
            now = time.monotonic()
            stops.tick(now)
            self._session.watch(now, stops)
            if now >= ping_at:
                ping_at = now + self._heartbeat_s / 4
                self._line.tell(_ping())
            if stops.silent_s(self._heard_at, now) > self._heartbeat_s:
                self._session.close(f"no sign of life for {self._heartbeat_s:g} s")
            if dial_again(self._session, self._resume, self._closing, GONE_S):
                LOG.warning(
                    "rank %d: the connection with the coordinator broke (%s); it was dialled again "
                    "and goes on, after %.1f s",
                    self.rank,
                    self._session.why,
                    time.monotonic() - now,
                )
                # Not by this thread, which is to dial again where that one breaks, too.
                _thread(self._session.send_again, f"{self._reader.name}, again").start()

    def _resume(self) -> bool:
        reported = self._session.received
        stream, greeted = self._dial(time.monotonic() + GREETING_S, resumes=True)
        try:
            self._session.attach(MessageFrames(stream), greeted.received, reported)
        except BaseException:
            stream.close()
            raise
        return True

    def _read(self) -> None:
        try:
            for message in assemble(
                self._listen(), pb.FromCoordinator, FROM_COORDINATOR.__getitem__
            ):
                self._take(message)
            self._heard_end = True
        except (OSError, DecodeError, TransferError) as error:
            self._why_lost = f": {error}"
        self._line.tell(None)
        if not self._leaving:
            self._end(self._lost())
        # Until the coordinator has heard the last word and hangs up: it must not get lost.
        self._session.skip()

    def _listen(self) -> Iterator[bytes]:
        for frame in self._line.frames():
            self._heard_at = time.monotonic()
            yield frame

    def _take(self, message: pb.FromCoordinator) -> None:
        match message.WhichOneof("kind"):
            case "pong":
                self._note_clock(message.pong, time.perf_counter_ns())
            case "whole":
                self._take_whole(message.whole)
            case "missing":
                self._take_missing(message.missing)
            case "welcome":
                _settle(self._welcome, message.welcome)
            case "abort":
                self._end(RunAborted(message.abort.reason))

    def _note_clock(self, pong: pb.Pong, now_ns: int) -> None:
        # Of a round trip that took as long there as back; the fastest one errs least.
        self._clock.append((now_ns - pong.sent_ns, pong.clock_ns - (pong.sent_ns + now_ns) // 2))
        self._ponged.set()

    def _take_whole(self, whole: pb.Whole) -> None:
        with self._lock:
            gathered = self._gathers.pop(whole.key, None)
        if gathered:
            _settle(gathered.parts, tuple(whole.parts))

    def _take_missing(self, missing: pb.Missing) -> None:
        ranks = tuple(missing.ranks)
        if not missing.key:
            self._missing = ranks
        elif gathered := self._gathers.get(missing.key):
            _settle(gathered.missing, ranks)

    def _lost(self) -> RunAborted:
        return RunAborted(f"lost the coordinator (rank 0 at {self._address}){self._why_lost}")

    def _end(self, error: RunAborted) -> None:
        """The run is over for this rank: every wait raises `error`. The first error stays."""
        with self._lock:
            if self._over:
                return
            self._over = error
            # Taken out under the lock, told outside: a callback may come back to this object.
            gathers = list(self._gathers.values())
            self._gathers = {}
            callbacks = self._callbacks
            self._callbacks = []
        _settle(self._verdict, error)
        _settle(
            self._welcome,
            error=JoinError(f"rank {self.rank} cannot join at {self._address}: {error}"),
        )
        self._ponged.set()
        for gathered in gathers:
            _settle(gathered.parts, error=error)
            _settle(gathered.missing, error=error)
        if self._leaving:
            return
        for callback in callbacks:
            callback(error)


def _thread(run: Callable[[], None], name: str) -> threading.Thread:
    return threading.Thread(target=run, name=name, daemon=True)


def _ping() -> pb.ToCoordinator:
    return pb.ToCoordinator(ping=pb.Ping(sent_ns=time.perf_counter_ns()))


def _settle(future: Future[T], result: T | None = None, *, error: Exception | None = None) -> None:
    """Settle a future, unless it is settled already."""
    with suppress(InvalidStateError):
        if error:
            future.set_exception(error)
        else:
            future.set_result(cast(T, result))


def _now_and_then(say: Callable[[str], None]) -> Callable[[str], None]:
    """`say`, which gets the same text again only after `_AGAIN_S`."""
    said_at: dict[str, float] = {}

    def say_news(text: str) -> None:
        now = time.monotonic()
        if now - said_at.get(text, -math.inf) >= _AGAIN_S:
            said_at[text] = now
            say(text)

    return say_news


def _explain(error: Exception, address: str) -> Exception:
    """Why no stream was opened: a `JoinError`, or `_NotThere` where the coordinator may still come
    up.
    """
    cause = error.__cause__
    if isinstance(error, TimeoutError):
        return _NotThere("no answer")
    if not isinstance(cause, grpc.RpcError):
        return JoinError(f"what listens at {address} is not dpipe's coordinator: {error}")
    assert isinstance(cause, grpc.Call)
    details = visible(cause.details() or "")
    reason = re.sub(r"^(?:[A-Z_]+: )?(?:ipv[46]:\S+: )?", "", details.rpartition("last error: ")[2])
    match cause.code():
        case grpc.StatusCode.UNAUTHENTICATED | grpc.StatusCode.FAILED_PRECONDITION:
            return JoinError(f"the coordinator at {address} refused this rank: {reason}")
        case grpc.StatusCode.UNIMPLEMENTED:
            return JoinError(
                f"what listens at {address} is not dpipe's coordinator; check the port"
            )
        case grpc.StatusCode.UNAVAILABLE if (
            "ssl" in reason.lower() or "certificate" in reason.lower()
        ):
            return JoinError(
                f"no secure connection to the coordinator at {address}: {reason}; check that "
                "node.tls_cert, node.tls_key and node.tls_ca come from one authority on all ranks, "
                "or are set on none"
            )
        case grpc.StatusCode.UNAVAILABLE if "Socket closed" in reason:
            # Not for good, perhaps: a tunnel may be up before the coordinator is.
            return _NotThere(
                "something listens there and hangs up; are node.tls_cert, node.tls_key and "
                "node.tls_ca set on both sides, from one authority?"
            )
        case grpc.StatusCode.CANCELLED:
            return _NotThere("no answer")
        case _:
            return _NotThere(reason)


def _nobody(address: str, join_s: float, why: str) -> JoinError:
    return JoinError(
        f"no coordinator at {address} after {join_s:g} s ({why}); check the address, that rank 0 "
        "is up, that its node.bind can be reached from here, and the firewall"
    )
