"""The bytes of one gRPC stream, which a session uses as it does those of a TCP connection.

    session's writer --> write --> messages --> outgoing --> gRPC's thread ===> peer
    session's reader <-- receive <-- what is left of a message <-- gRPC <====== peer

gRPC's thread pulls messages as the network takes them. Either another thread writes, and waits
until the last message was pulled; or the stream is fed: gRPC's own thread writes the next ones when
it finds none, which saves waking a thread for each tensor.

gRPC speaks HTTP/2, which passes the proxies and inspection of real networks. A connection of its
own under each stream: one that breaks, or is held back, concerns no other.
"""

import ctypes
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from threading import Condition, Timer, get_ident
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from dpipe.errors import JoinError, TransferError
from dpipe.session.frames import MessageStream
from dpipe.session.greeting import Greeted
from dpipe.wire.rpc import Security, open_channel, token_metadata
from dpipe.wire.text import visible
from dpipe.wire.v1.transport_pb2 import Greeting, Hello

SECRET_BYTES = 32
_HELLO_KEY = "dpipe-hello-bin"  # "-bin": only then gRPC takes any bytes
_SECRET_KEY = "dpipe-secret-bin"  # noqa: S105 - the header's name, not a secret
_REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
# The most in a message: one that a connection has not brought whole is lost with it, and is no
# sign of life, so that a slow path would seem silent. Each costs, so that those of tensors are
# larger: half a MiB of one, and what stands before it.
_MESSAGE_BYTES = 64 << 10
_BULK_BYTES = (512 << 10) + (4 << 10)
# Numbers of mallopt's parameters: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD.
_MALLOC = {-1: 256 << 20, -2: 16 << 20, -3: 32 << 20}
_LINGER_S = 0.5  # for the last message to leave, before the stream is cancelled
_WAKE_S = 5.0  # poll interval of waits without a deadline of their own


class GrpcStream(MessageStream):
    """See `frames.Stream`. gRPC is to send what `outgoing` gives, at either end."""

    def __init__(self, *, bulk: bool = False) -> None:
        self._most_bytes = _BULK_BYTES if bulk else _MESSAGE_BYTES
        self._changed = Condition()  # guards what is below
        self._messages: deque[bytes] = deque()  # to be sent next
        self._feed: Callable[[], None] | None = None
        self._nudge: Callable[[], None] = lambda: None
        self._puller: int | None = None  # gRPC's thread
        self._ended = False
        self._over = False
        self._closed = False
        self._heard = False  # a message came
        self._linger: Timer | None = None
        self._call: Any = None
        self._channel: grpc.Channel | None = None
        self._incoming: Iterator[bytes] = iter(())

    def carry(
        self, call: Any, incoming: Iterator[bytes], channel: grpc.Channel | None = None
    ) -> None:
        """Be the bytes of `call`, of which messages come as `incoming`; close `channel` with it."""
        self._call = call
        self._incoming = incoming
        self._channel = channel
        # False where it is over already.
        if call.add_callback(self._finish) is False:
            self._finish()

    def feed_by(self, feed: Callable[[], None], nudge: Callable[[], None]) -> None:
        """From now on gRPC's thread calls `feed` when there is nothing to send. It writes here, and
        may wait for something to write, but returns soon after a `nudge`.
        """
        with self._changed:
            self._feed = feed
            self._nudge = nudge
            self._changed.notify_all()

    def outgoing(self) -> Iterator[bytes]:
        """The messages to send; gRPC asks for the next one when the network takes more."""
        self._puller = get_ident()
        while not self._over:
            if self._messages and self._feed is None:
                yield self._pull()
            elif self._messages:
                yield self._messages.popleft()  # nobody waits for room
            elif self._ended:
                return
            elif self._feed is not None:
                self._feed()
            else:
                self._await_message()

    def write(self, *parts: bytes | memoryview) -> None:
        if sum(map(len, parts)) <= self._most_bytes:
            self._put(b"".join(parts))
            return
        for message in _cut(parts, self._most_bytes):
            self._put(message)

    def can_write(self, wait_ms: int = 0) -> bool:
        return not self._messages

    def padding(self, burst_bytes: int) -> int:
        return 0  # the sockets are gRPC's own

    def outruns_loss(self) -> bool:
        return False

    def pace(self, bytes_per_s: float) -> bool:
        return False

    def next_message(self) -> bytes:
        try:
            message = next(self._incoming)
        except StopIteration:
            raise ConnectionError("it closed the connection") from None
        except grpc.RpcError as error:
            raise ConnectionError(why_ended(error)) from None
        if not self._heard:
            with self._changed:
                self._heard = True
                self._changed.notify_all()
        return message

    def confirm(self) -> None:
        """Have the other end hear something: it waits in `await_confirmation`."""
        self._put(b"")

    def await_confirmation(self, timeout_s: float) -> None:
        """Wait until whoever reads here has heard something, or the stream is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._heard or self._over, timeout_s)

    def end(self) -> None:
        with self._changed:
            self._ended = True
            self._wake()

    def shut(self) -> None:
        # Not cancelled yet: gRPC would drop what it has not sent, a farewell too.
        self.end()
        with self._changed:
            if self._over or self._linger is not None:
                return
            self._linger = Timer(_LINGER_S, self.give_up)
            self._linger.daemon = True
            self._linger.start()

    def give_up(self) -> None:
        self._finish()
        self._call.cancel()
        if self._closed and self._channel is not None:
            self._channel.close()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            # `give_up` closes what is `_closed`, and says that it is over before it looks.
            if self._linger is not None and not self._over:
                return
        if self._linger is not None:
            self._linger.cancel()
        self.give_up()

    def _put(self, message: bytes) -> None:
        is_open = not (self._over or self._ended)
        if is_open and self._feed is not None and get_ident() == self._puller:
            return self._messages.append(message)  # nobody has to be woken
        with self._changed:
            # Nobody waits for gRPC's thread while it may wait for who writes.
            while self._messages and self._feed is None and not self._over:
                self._changed.wait(_WAKE_S)
            if self._over or self._ended:
                raise ConnectionError("it closed the connection")
            self._messages.append(message)
            self._wake()

    def _pull(self) -> bytes:
        with self._changed:
            self._changed.notify_all()
            return self._messages.popleft()

    def _await_message(self) -> None:
        with self._changed:
            if not (self._messages or self._ended or self._over or self._feed):
                self._changed.wait(_WAKE_S)

    def _finish(self) -> None:
        """The stream is over: whoever waits is woken."""
        with self._changed:
            self._over = True
            self._wake()

    def _wake(self) -> None:
        """Have gRPC's thread look; with the lock held."""
        self._changed.notify_all()
        if get_ident() != self._puller:
            self._nudge()


class Dialling:
    """A stream that was opened to whoever answers `method` at `address`, and has not greeted."""

    def __init__(
        self,
        address: str,
        method: str,
        hello: Hello,
        secret: bytes,
        security: Security,
        *,
        silence_s: float,
        bulk: bool = False,
    ) -> None:
        """`secret` is what the first greeting of a session gave, where the hello resumes."""
        self._hello = hello
        self._secret = secret
        self._stream = GrpcStream(bulk=bulk)
        channel = open_channel(
            address, security, own_connection=True, bulk=bulk, silence_s=silence_s
        )
        # In the metadata: the other end decides about a stream before it reads from it.
        metadata = hello_metadata(security, hello, secret if hello.resumes else b"")
        dial: Any = channel.stream_stream(method)
        self._call = dial(self._stream.outgoing(), metadata=metadata)
        self._stream.carry(self._call, self._call, channel)

    def cancel(self) -> None:
        """Wake who waits in `greet`, which raises."""
        self._call.cancel()

    def greet(self, deadline: float) -> tuple[GrpcStream, Greeted]:
        """Raises as `greeting.call` does, and `OSError` where nobody is; from gRPC's own error,
        where there is one.
        """
        late = Timer(max(0.0, deadline - time.monotonic()), self.cancel)
        late.daemon = True
        late.start()
        try:
            return self._stream, _greeted(self._hello, next(self._call, b""), self._secret)
        except grpc.RpcError as error:
            self._stream.close()
            if time.monotonic() >= deadline:
                raise TimeoutError from error
            raise _refusal(error) from error
        except BaseException:
            self._stream.close()
            raise
        finally:
            late.cancel()


def _cut(parts: Sequence[bytes | memoryview], most_bytes: int) -> Iterator[bytes]:
    """Messages of at most so many bytes; each is copied once."""
    pieces: list[memoryview] = []
    room = most_bytes
    for part in parts:
        left = memoryview(part)
        while left:
            pieces.append(left[:room])
            left = left[room:]
            room -= len(pieces[-1])
            if not room:
                yield b"".join(pieces)
                pieces = []
                room = most_bytes
    if pieces:
        yield b"".join(pieces)


def hello_metadata(security: Security, hello: Hello, secret: bytes) -> Any:
    """What `hello_of` reads at the other end, and the token."""
    metadata: Any = [*token_metadata(security), (_HELLO_KEY, hello.SerializeToString())]
    if secret:
        metadata.append((_SECRET_KEY, secret))
    return metadata


def hello_of(context: grpc.ServicerContext) -> tuple[Hello, bytes]:
    """What the dialler says of itself, and the secret of the session that it goes on with. One that
    says nothing gets protocol 0, and is refused.
    """
    metadata: Any = dict(context.invocation_metadata())
    try:
        return Hello.FromString(metadata.get(_HELLO_KEY, b"")), metadata.get(_SECRET_KEY, b"")
    except DecodeError:
        return Hello(), b""


def _greeted(hello: Hello, message: bytes, secret: bytes) -> Greeted:
    try:
        greeting = Greeting.FromString(message)
    except DecodeError:
        greeting = Greeting()
    # A server of something else may answer any stream.
    if greeting.hello != hello or not (hello.resumes or greeting.secret):
        raise TransferError("it does not answer as one")
    return Greeted(hello, greeting.secret or secret, greeting.received, greeting.stalled)


def _refusal(error: grpc.RpcError) -> Exception:
    """Why no stream was opened."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    why = why_ended(error)
    if code in _REFUSALS:
        return JoinError(why)
    # Any other: a connection that breaks early looks like many things.
    if "Connection refused" in why:
        return ConnectionRefusedError(why)
    return ConnectionError(why)


def why_ended(error: grpc.RpcError) -> str:
    """Why a stream ended. Only the end that dialled learns more than that it did."""
    if not isinstance(error, grpc.Call):
        return "the connection broke"
    return visible(str(error.details()))


def keep_memory() -> None:
    """Have glibc's malloc keep freed memory. gRPC allocates each message twice at either end, and
    to fault in a fresh page costs as much as to copy it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, num_bytes in _MALLOC.items():
        mallopt(parameter, num_bytes)
