"""Fetching copies from a keeper, and sending them."""

import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Self

from dpipe.errors import DpipeError, RunError, TransferError
from dpipe.keeper.copies import PieceCopy, check
from dpipe.keeper.messages import ANSWER, Answer, Offered, Refused, Request, Wanted
from dpipe.keeper.pieces import WHOLE_LAYERS, Pieces
from dpipe.keeper.server import CHUNK_BYTES, PROTOCOL, SILENCE_S, read_exactly, read_framed
from dpipe.session import greeting
from dpipe.session.dial import dial
from dpipe.session.stream import Tls, shut, tune
from dpipe.wire.message import framed
from dpipe.wire.rpc import Security
from dpipe.wire.v1.transport_pb2 import Hello

LOG = logging.getLogger("dpipe")
MAX_COPY_BYTES = 1 << 36  # of one piece; no more memory is taken for what a keeper announces
_CONNECT_S = 10.0


def _nothing() -> None:
    pass


class KeeperClient:
    """A connection with the keeper at `address`. Used by one thread, but for `cancel`.

    Raises `OSError`, `JoinError` or `TransferError` where nobody answers or the token is wrong.
    """

    def __init__(self, address: str, security: Security) -> None:
        deadline = time.monotonic() + _CONNECT_S
        self.address = address
        self._socket: socket.socket = dial(address, _CONNECT_S)
        try:
            tune(self._socket, SILENCE_S, SILENCE_S)
            if security.tls:
                secured = Tls(security).wrap(self._socket, server=False)
                self._socket = secured
                greeting.set_deadline(secured, deadline)
                secured.do_handshake()
            token = security.tokens()[0].encode()
            greeting.call(self._socket, Hello(protocol=PROTOCOL), token, deadline)
            self._socket.settimeout(SILENCE_S)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def cancel(self) -> None:
        """Wake the thread that waits here. From any thread."""
        shut(self._socket)

    def get(self, epoch: int, step: int, piece: int, digests: Sequence[str] = ()) -> PieceCopy:
        """Raises `Refused`, and `TransferError` where what comes is not what its digest says, or
        its digest is none of `digests`; without those the keeper is believed.
        """
        answer = self._ask(Request(get=Wanted(epoch=epoch, step=step, piece=piece)))
        if not 0 < answer.size <= MAX_COPY_BYTES:
            raise TransferError(f"{self.address} announces {answer.size} bytes for piece {piece}")
        if digests and answer.digest not in digests:
            raise TransferError(
                f"{self.address} has another piece {piece} before step {step} than the rank that "
                "trained it"
            )
        copy = PieceCopy(step, piece, read_exactly(self._socket, answer.size))
        if copy.digest != answer.digest:
            raise TransferError(f"piece {piece} from {self.address} arrived damaged")
        return copy

    def put(
        self,
        epoch: int,
        copy: PieceCopy,
        before_chunk: Callable[[], None] = _nothing,
        kept: Sequence[int] = (),
    ) -> None:
        """Returns when the keeper has the copy whole, at once where it had it before; then it
        forgets those of this piece that are not of the steps `kept`. Raises `Refused`, and what
        `before_chunk` raises.
        """
        size = len(copy.content)
        offered = Offered(
            epoch=epoch,
            step=copy.step,
            piece=copy.piece,
            size=size,
            digest=copy.digest,
            kept=tuple(kept),
        )
        if self._ask(Request(put=offered)).held:
            return
        view = memoryview(copy.content)
        for start in range(0, size, CHUNK_BYTES):
            before_chunk()
            self._socket.sendall(view[start : start + CHUNK_BYTES])
        self._hear()

    def _ask(self, request: Request) -> Answer:
        self._socket.sendall(framed(request.model_dump_json().encode()))
        return self._hear()

    def _hear(self) -> Answer:
        try:
            answer = ANSWER.read(read_framed(self._socket))
        except ValueError as error:
            raise TransferError(f"{self.address} does not answer as a keeper: {error}") from None
        if answer.refusal is not None:
            raise Refused(answer.refusal)
        return answer


class Fetching:
    """Copies for an epoch, each from the first of its sources that gives it. Connections are kept
    from one piece to the next; `close` ends them.
    """

    def __init__(
        self,
        epoch: int,
        security: Security,
        on_connect: Callable[[KeeperClient], None],
        pieces: Pieces = WHOLE_LAYERS,
    ) -> None:
        self._epoch = epoch
        self._pieces = pieces
        self._security = security
        self._on_connect = on_connect
        self._clients: dict[str, KeeperClient] = {}
        self._broken: dict[str, str] = {}  # why nothing more is asked there

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for client in self._clients.values():
            client.close()

    def fetch(
        self, step: int, piece: int, sources: Sequence[str], digests: Sequence[str] = ()
    ) -> PieceCopy:
        """`digests` are those of whoever has trained the piece. Raises `RunError` naming one
        that nobody gives, and why.
        """
        reasons = []
        for address in sources:
            if address not in self._broken:
                try:
                    copy = self._client(address).get(self._epoch, step, piece, digests)
                    if not digests:
                        check(copy, self._pieces)  # one that is none must not end the run
                    return copy
                except Refused as refusal:
                    reasons.append(f"{address}: {refusal}")
                    continue
                except (OSError, ValueError, DpipeError) as error:
                    self._broken[address] = str(error) or type(error).__name__
                    LOG.warning(
                        "the keeper at %s is asked no more: %s", address, self._broken[address]
                    )
            reasons.append(f"{address}: {self._broken[address]}")
        why = "; ".join(reasons) or "nobody holds it"
        name = self._pieces.name(piece)
        raise RunError(f"{name} before step {step} cannot be fetched: {why}")

    def _client(self, address: str) -> KeeperClient:
        if address not in self._clients:
            self._clients[address] = KeeperClient(address, self._security)
            self._on_connect(self._clients[address])
        return self._clients[address]
