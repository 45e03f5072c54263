"""`ControlStream`: an agent's end of the control stream, opened again wherever it breaks.

    tell ──▶ outbox ──▶ gRPC ══stream══▶ coordinator
    on_message ◀── reader thread ◀══stream══

What is told while there is no stream is lost: the agent says it again when it enlists.
"""

import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator

import grpc

from dpipe.elastic.messages import METHOD, TO_AGENT, FromAgent, ToAgent
from dpipe.errors import JoinError
from dpipe.wire.rpc import Security, open_channel, token_metadata
from dpipe.wire.text import visible

LOG = logging.getLogger("dpipe")
_FIRST_RETRY_S = 0.1
_RETRY_S = 1.0
_FOR_GOOD = (
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
)


class ControlStream:
    """Call `run` in a thread; it ends after `close`. The callbacks are called on that thread:
    `on_open` when a stream begins, `on_message` for each message, `on_break` when it ends, and
    `on_refusal` where no other attempt would help.
    """

    def __init__(
        self,
        address: str,
        security: Security,
        *,
        silence_s: float,
        on_open: Callable[[], None],
        on_message: Callable[[ToAgent], None],
        on_break: Callable[[], None],
        on_refusal: Callable[[str], None],
    ) -> None:
        # Tried in turns, where nobody answers: how others call a coordinator may not hold here.
        self._addresses = [address]
        self._security = security
        self._silence_s = silence_s
        self._on_open = on_open
        self._on_message = on_message
        self._on_break = on_break
        self._on_refusal = on_refusal
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._call: grpc.Call | None = None
        self._is_answered = False  # the stream under way, by any message

    def tell(self, message: FromAgent) -> None:
        self._outbox.put(message.model_dump_json().encode())

    @property
    def address(self) -> str:
        return self._addresses[0]

    def move(self, address: str) -> None:
        """Dial that one from here on: whoever listens at the other has been silent."""
        with self._lock:
            self._addresses = [address, self.address]
            call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        self._closed.set()
        self._outbox.put(None)
        with self._lock:
            call = self._call
        if call is not None:
            call.cancel()

    def run(self) -> None:
        retry_s = _FIRST_RETRY_S
        while not self._closed.is_set():
            began_at = time.monotonic()
            self._attend_once()
            # One that lasted is dialled again at once.
            if time.monotonic() - began_at > 2 * _RETRY_S:
                retry_s = _FIRST_RETRY_S
            self._closed.wait(retry_s)
            retry_s = min(2 * retry_s, _RETRY_S)

    def _attend_once(self) -> None:
        address = self.address
        channel = open_channel(
            address, self._security, own_connection=True, silence_s=self._silence_s
        )
        self._is_answered = False
        try:
            self._attend(channel, address)
        except grpc.RpcError as error:
            self._explain(error, address)
        except ValueError as error:
            self._refuse(f"what listens at {address} is not dpipe's coordinator: {error}")
        finally:
            with self._lock:
                self._call = None
                if not self._is_answered and self.address == address:
                    self._addresses.reverse()
            self._outbox.put(None)  # ends the sender of this stream
            channel.close()
            self._on_break()

    def _attend(self, channel: grpc.Channel, address: str) -> None:
        # A new one: what the last stream did not send, `on_open` says again as it is now.
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._outbox = outbox
        self._on_open()
        stub: grpc.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(METHOD)
        call = stub(_until_none(outbox), metadata=token_metadata(self._security))
        with self._lock:
            self._call = call
        # `close` or `move` may have come before there was a call to cancel.
        if self._closed.is_set() or self.address != address:
            call.cancel()
        for content in call:
            self._is_answered = True
            self._on_message(TO_AGENT.read(content))

    def _explain(self, error: grpc.RpcError, address: str) -> None:
        assert isinstance(error, grpc.Call)
        details = visible(error.details() or "")
        if error.code() in _FOR_GOOD:
            self._refuse(f"the coordinator at {address} refused this agent: {details}")
        elif not self._closed.is_set():
            # gRPC puts what happened behind all that it tried.
            reason = re.sub(r"^.*last error: ", "", details)
            LOG.debug("no connection with the coordinator at %s: %s", address, reason)

    def _refuse(self, reason: str) -> None:
        if not self._closed.is_set():
            self._on_refusal(reason)


def _details(error: grpc.RpcError) -> str:
    assert isinstance(error, grpc.Call)
    return error.details() or str(error.code())


def _until_none(outbox: "queue.SimpleQueue[bytes | None]") -> Iterator[bytes]:
    while (message := outbox.get()) is not None:
        yield message


def ask_once(address: str, security: Security, method: str, request: bytes, wait_s: float) -> bytes:
    """One question to the coordinator. Raises `JoinError` where it is not answered."""
    channel = open_channel(address, security)
    try:
        stub: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method)
        answer = stub(
            request, metadata=token_metadata(security), timeout=wait_s, wait_for_ready=True
        )
        return bytes(answer)
    except grpc.RpcError as error:
        details = visible(_details(error))
        raise JoinError(
            f"no answer from a coordinator at {address} ({details}); check the address, that "
            "`dpipe coordinate` is up, and the token"
        ) from None
    finally:
        channel.close()
