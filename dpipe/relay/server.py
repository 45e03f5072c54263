"""`Relay`: pairs the streams that two ranks have opened, and passes the bytes of each to the other.

    rank 1 ══messages══▶ handler of rank 2's stream ══▶ rank 2
    rank 1 ◀══ handler of rank 1's stream ◀══messages══ rank 2

Each handler takes a message of the other stream only when gRPC has sent the one before, so that a
slow reader holds up the writer, and the relay keeps one message a direction and gRPC's window.
"""

import hmac
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from threading import Condition
from typing import Any, NoReturn

import grpc

from dpipe.session.grpc_stream import hello_of
from dpipe.wire.v1.transport_pb2 import Hello

METHOD = "/dpipe.wire.v1.Relay/Pass"
PROTOCOL = 1
STREAMS_A_LINK = 32  # at once from either end; each holds a thread
SOMEBODY = b"!"  # to the end that waits: somebody has dialled it
NO_MORE = b""  # this direction ends here
_WAKE_S = 5.0  # poll interval of waits that end with a stream


class Relay:
    """`link_secret(rank, other)` is what these two ranks know, and no other rank."""

    def __init__(self, world_size: int, link_secret: Callable[[int, int], bytes]) -> None:
        self._world_size = world_size
        self._link_secret = link_secret
        self._changed = Condition()  # guards what is below, and the state of all streams
        self._waiting: dict[tuple[int, int], deque[_End]] = defaultdict(deque)  # from, to
        self._num_open: Counter[tuple[int, int]] = Counter()  # streams: from, to

    @property
    def most_streams(self) -> int:
        return self._world_size * (self._world_size - 1) * STREAMS_A_LINK

    def handler(self) -> grpc.GenericRpcHandler:
        accept: grpc.RpcMethodHandler[bytes, bytes] = grpc.stream_stream_rpc_method_handler(
            self._accept
        )
        service, _, method = METHOD.removeprefix("/").partition("/")
        return grpc.method_handlers_generic_handler(service, {method: accept})

    def _accept(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """One stream of a rank; what is yielded goes to it."""
        hello, proof = hello_of(context)
        refusal = self._refusal(hello, proof)
        if refusal:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, refusal)
        if not self._admit(link_of(hello)):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are open")
        end = _End(hello, messages)
        try:
            # False where it is over already.
            if context.add_callback(lambda: self._end(end)) is False:
                self._end(end)
            yield from self._pass(end, context)
        finally:
            with self._changed:
                self._num_open[link_of(hello)] -= 1

    def _refusal(self, hello: Hello, proof: bytes) -> str:
        if hello.protocol != PROTOCOL:
            return f"this relay speaks protocol {PROTOCOL}, not {hello.protocol}"
        ranks = link_of(hello)
        if max(ranks) >= self._world_size or hello.from_rank == hello.to_rank:
            return "there are no such ranks"
        secret = self._link_secret(*ranks)
        if not hmac.compare_digest(proof_of(secret, hello), proof):
            return "this is not a rank of this run"
        return ""

    def _admit(self, link: tuple[int, int]) -> bool:
        with self._changed:
            if self._num_open[link] >= STREAMS_A_LINK:
                return False
            self._num_open[link] += 1
            return True

    def _pass(self, end: "_End", context: grpc.ServicerContext) -> Iterator[bytes]:
        other = self._partner_of(end)
        if other is None:
            return
        if waits(end.hello):
            yield SOMEBODY
        # By this thread, though they are another stream's: only what this one has sent makes room.
        for message in other.said():
            yield message
            if message == NO_MORE:
                break
        else:
            _abort(context)
        with self._changed:
            other.is_passed_on = True
            self._changed.notify_all()

            def is_done() -> bool:
                return end.is_passed_on or end.is_over or other.is_over

            while not self._changed.wait_for(is_done, _WAKE_S):
                pass
        if not end.is_passed_on:
            _abort(context)

    def _partner_of(self, end: "_End") -> "_End | None":
        """The stream that the other rank has opened, or opens while this one lives."""
        own = link_of(end.hello)
        theirs = own[1], own[0]
        with self._changed:
            if self._waiting[theirs] and not end.is_over:
                end.other = self._waiting[theirs].popleft()
                end.other.other = end
                self._changed.notify_all()
                return end.other
            self._waiting[own].append(end)
            while not self._changed.wait_for(lambda: end.other or end.is_over, _WAKE_S):
                pass
            return end.other

    def _end(self, end: "_End") -> None:
        """The stream is over: its rank has ended it, or the way to it broke."""
        own = link_of(end.hello)
        with self._changed:
            end.is_over = True
            if end in self._waiting[own]:
                self._waiting[own].remove(end)
            self._changed.notify_all()


class _End:
    """A stream of one rank to another."""

    def __init__(self, hello: Hello, messages: Iterator[bytes]) -> None:
        self.hello = hello
        self.other: _End | None = None
        self.is_over = False
        self.is_passed_on = False  # all that it said, to its last message
        self._messages = messages

    def said(self) -> Iterator[bytes]:
        """Its messages; ends early where the stream breaks."""
        try:
            yield from self._messages
        except Exception:  # gRPC's own has no type of its own at a server
            return


def link_of(hello: Hello) -> tuple[int, int]:
    return hello.from_rank, hello.to_rank


def waits(hello: Hello) -> bool:
    """Whether this end waits to be dialled: the lower rank dials."""
    return hello.from_rank > hello.to_rank


def proof_of(secret: bytes, hello: Hello) -> bytes:
    """That whoever says `hello` knows the secret of the two ranks."""
    said: Any = hello.SerializeToString(deterministic=True)
    return hmac.digest(secret, b"relay|" + said, "sha256")


def _abort(context: grpc.ServicerContext) -> NoReturn:
    context.abort(grpc.StatusCode.UNAVAILABLE, "the other end has gone")
    raise AssertionError("abort raises")
