"""One rank's end of the two links with a peer: what is expected, arrived, and went wrong.

    recv(like, tag)    --post()-->  receiving[n]  <--arrive()--  header n, then pieces of its bytes
    recv(...).wait()   <----------  complete when posted, header as expected, every piece here

The first of the two makes entry n and the second finds it, so a receive may be posted before or
after the bytes come. Bytes are read straight into the tensor that `wait()` returns. Tensors that
arrived without a posted receive are bounded by `buffer_bytes`: beyond it the reading thread waits,
and TCP holds the sender back.
"""

import time
from collections.abc import Callable
from threading import Condition

import torch

from dpipe.errors import PeerLost, TransferError, TransferTimeout
from dpipe.session.session import Kept
from dpipe.streams import HOST, Mark, Streams
from dpipe.wire.message import Header, byte_view
from dpipe.wire.spec import TensorSpec
from dpipe.wire.staging import Staging
from dpipe.wire.transfer import Moved

_PIECES = 4  # of a tensor, for each connection
_LEAST_PIECE_BYTES = 16 << 10
_WAKE_S = 5.0  # poll interval of waits without a deadline of their own


class _PiecewiseTransfer:
    """A tensor whose bytes move in pieces, on any connection. Guarded by `end.changed`."""

    def __init__(self, end: "LinkEnd", num_pieces: int) -> None:
        self.end = end
        self.num_pieces = num_pieces
        self._missing = num_pieces
        self._start_ns: int | None = None
        self._moved: Moved | None = None

    @property
    def moved(self) -> Moved | None:
        return self._moved

    def done(self) -> bool:
        return self._moved is not None

    def begin(self) -> None:
        """The first bytes of a piece are about to move; the earliest piece sets the time."""
        self._start_ns = self._start_ns or time.perf_counter_ns()

    def _end_piece(self, num_bytes: int) -> bool:
        """Count a piece as moved; true for the last one."""
        self._missing -= 1
        if self._missing:
            return False
        assert self._start_ns is not None
        self._moved = Moved(self._start_ns, time.perf_counter_ns(), num_bytes)
        self.end.changed.notify_all()
        return True


class Sending(_PiecewiseTransfer):
    """A tensor on its way out, in host memory once `ready` has passed; held until its last byte is
    handed over to the connection. What may have to be sent again is `kept` until it has arrived.
    """

    def __init__(self, end: "LinkEnd", header: Header, tensor: torch.Tensor, ready: Mark) -> None:
        super().__init__(end, end.num_pieces(header))
        self.header = header
        self.view: memoryview | None = None
        self.tensor: torch.Tensor | None = tensor
        self._ready = ready
        self._kept: list[Kept] = []

    def await_device(self) -> None:
        self.end.await_device(self._ready, self.header.tag)

    def begin(self) -> None:
        with self.end.changed:
            super().begin()
            # Made here, on the sending thread: the thread that queued the tensor computes.
            if self.view is None:
                assert self.tensor is not None
                self.view = byte_view(self.tensor)

    def leave_whole(self) -> None:
        """Send it in one piece. Before the first of them is sent."""
        self.header = self.header._replace(whole=True)
        self.num_pieces = 1
        self._missing = 1

    def wait(self) -> None:
        self.settle()
        # From here on the caller may change the tensor.
        while self._kept:
            self._kept.pop().own()

    def settle(self) -> None:
        self.end.wait(self, f"to hand over {self.header.tag} to")

    def keep(self, kept: Kept | None) -> None:
        if kept is not None:
            self._kept.append(kept)

    def end_piece(self) -> None:
        with self.end.changed:
            if self._end_piece(self.header.spec.num_bytes):
                # A step's sends are kept until its end; their memory is not.
                self.view = None
                self.tensor = None
                self.end.num_unsent -= 1


class Receiving(_PiecewiseTransfer):
    """A tensor on its way in: announced by its header, expected by a receive, or both."""

    def __init__(self, end: "LinkEnd", sequence: int) -> None:
        super().__init__(end, 1)
        self.sequence = sequence
        self.expected: Header | None = None
        self.arrived: Header | None = None
        self.tensor: torch.Tensor | None = None  # in host memory
        self.into: torch.Tensor | None = None  # host memory that the caller asked for

    def done(self) -> bool:
        return super().done() and self.expected in (None, self.arrived)

    def wait(self) -> torch.Tensor:
        self.settle()
        assert self.tensor is not None
        if self.into is None:
            # Only now: what waits for its turn would fill the device, as far as the sender is
            # ahead. The host is ahead of the device, so the copy still runs beside computations.
            return self.end.staging.land(self.tensor)
        if self.tensor is not self.into:  # it arrived before the receive was posted
            self.into.copy_(self.tensor)
            self.tensor = self.into
        return self.into

    def settle(self) -> None:
        assert self.expected is not None
        self.end.wait(self, f"for {self.expected.tag} from")

    def announce(self, header: Header) -> None:
        """The first of its headers has come."""
        self.arrived = header._replace(piece=0, whole=False)
        self.num_pieces = self.end.num_pieces(header)
        self._missing = self.num_pieces

    def is_announced_otherwise(self, header: Header) -> bool:
        """Whether `header` belongs to other pieces than those that have come."""
        same = (self.arrived, self.num_pieces)
        said = (header._replace(piece=0, whole=False), self.end.num_pieces(header))
        return self.arrived is not None and same != said

    def end_piece(self) -> None:
        with self.end.changed:
            assert self.arrived is not None
            self._end_piece(self.arrived.spec.num_bytes)
            self.end.forget(self)

    def check(self) -> TransferError | None:
        """The error to raise where the tensor that arrived is not the one that is expected."""
        expected = self.expected
        arrived = self.arrived
        if expected is None or arrived is None or expected == arrived:
            return None
        return TransferError(
            f"rank {self.end.rank} expected {expected.tag} {expected.spec} from "
            f"{self.end.peer_name}, but {arrived.tag} {arrived.spec} arrived; both ends must run "
            "the same schedule, in the same order, with the same wire format"
        )


class LinkEnd:
    """One rank's state of the two directed links with a peer, which live and die together.

    `on_broken` is called once, at the first error: it must end whatever carries the bytes.
    """

    def __init__(
        self,
        rank: int,
        peer: int,
        address: str | None = None,
        *,
        num_connections: int = 1,
        buffer_bytes: float = float("inf"),
        timeout_s: float = 300.0,
        streams: Streams = HOST,
    ) -> None:
        self.rank = rank
        self.peer = peer
        self.peer_name = f"rank {peer}"
        if address is not None:
            self.peer_name += f" ({address})"
        self.staging = Staging(streams)
        # Guards what is below, and the transfers; notified at each change.
        self.changed = Condition()
        self.error: Exception | None = None
        self.reason: str | None = None  # why the peer is lost
        self.on_broken: Callable[[], None] = lambda: None
        self.num_unsent = 0
        self.closing = False
        self._num_connections = num_connections
        self._num_open = num_connections  # those that have not come to their end
        self._buffer_bytes = buffer_bytes
        self._timeout_s = timeout_s
        self._failed = False
        self._num_sent = 0
        self._num_posted = 0
        self._unclaimed_bytes = 0
        self._receiving: dict[int, Receiving] = {}

    def send(self, tensor: torch.Tensor, tag: str, enqueue: Callable[[Sending], None]) -> Sending:
        """Number `tensor` and give it to `enqueue` in that order; `enqueue` must not block."""
        fetched, ready = self.staging.fetch(tensor)
        # One lock around number and queues: every connection carries the tensors in that order.
        with self.changed:
            self._raise_if_broken()
            header = Header(self._num_sent, tag, TensorSpec.of(tensor))
            sending = Sending(self, header, fetched, ready)
            self._num_sent += 1
            self.num_unsent += 1
            enqueue(sending)
        return sending

    def num_pieces(self, header: Header) -> int:
        """Into how many a tensor is cut, at both ends: several a connection, so that one that is
        slower carries fewer.
        """
        if self._num_connections == 1 or header.whole:
            return 1
        most = _PIECES * self._num_connections
        return max(1, min(most, header.spec.num_bytes // _LEAST_PIECE_BYTES))

    def post(self, like: TensorSpec, tag: str, into: torch.Tensor | None = None) -> Receiving:
        """Expect the next tensor. One that has arrived is given even where the peer is lost."""
        with self.changed:
            receiving = self._entry(self._num_posted)
            if not receiving.done():
                self._raise_if_broken()
            self._num_posted += 1
            receiving.expected = Header(receiving.sequence, tag, like)
            receiving.into = into
            if receiving.tensor is not None and receiving.arrived is not None:
                self._unclaimed_bytes -= receiving.arrived.spec.num_bytes
            self.forget(receiving)
            self.changed.notify_all()
        error = receiving.check()
        if error is not None:
            self.break_off(error)
        return receiving

    def arrive(self, header: Header) -> Receiving | None:
        """Where the bytes after `header` belong; None once this end is closing.

        Blocks while the tensor is not expected and does not fit the buffer. Raises what broke the
        link, and `TransferError` where the header is not what was expected.
        """
        with self.changed:
            receiving = self._entry(header.sequence)
            # Each piece has the header in front.
            if receiving.is_announced_otherwise(header):
                raise TransferError(
                    f"the connections of {self.peer_name} disagree on tensor {header.sequence}"
                )
            if receiving.arrived is None:
                receiving.announce(header)
            if (error := receiving.check()) is not None:
                raise error
            if not self._wait_for_room(receiving, header.spec.num_bytes):
                return None
            if receiving.tensor is None:
                self._allocate(receiving, header.spec)
            receiving.begin()
        return receiving

    def _allocate(self, receiving: Receiving, spec: TensorSpec) -> None:
        receiving.tensor = receiving.into
        if receiving.tensor is None:
            receiving.tensor = self.staging.empty(spec)
        if receiving.expected is None:
            self._unclaimed_bytes += spec.num_bytes

    def forget(self, receiving: Receiving) -> None:
        """Drop the entry of a tensor that is complete and was asked for."""
        if receiving.done() and receiving.expected is not None:
            del self._receiving[receiving.sequence]

    def wait(self, transfer: Sending | Receiving, what: str) -> None:
        """Block until `transfer` is done. Raises what broke the link; a timeout breaks it too."""
        # Without the lock: most have come by the time that they are asked for.
        if transfer.done() and not self._failed:
            return
        with self.changed:
            in_time = self.changed.wait_for(
                lambda: self.error is not None or transfer.done(), self._timeout_s
            )
        if not in_time:
            self.break_off(
                TransferTimeout(
                    f"rank {self.rank} has waited {self._timeout_s:g} s {what} {self.peer_name}; "
                    "the peer is slower or the network worse than timeouts.transfer allows, or "
                    "the peer waits for something else"
                )
            )
        # A lost peer takes nothing back that has come; where this rank has failed, all is over.
        if self._failed or not transfer.done():
            self._raise_if_broken()

    def await_device(self, ready: Mark, tag: str) -> None:
        """Wait until the device has reached `ready`; a timeout breaks the link, and raises."""
        try:
            self.staging.block(ready, self._timeout_s)
        except TimeoutError as late:
            error = TransferTimeout(
                f"rank {self.rank} cannot send {tag} to {self.peer_name}: {late}"
            )
            self.break_off(error)
            raise error from None

    def break_off(self, error: Exception, *, failed: bool = False) -> None:
        """End the link: waits raise `error`; if done, only where this rank has `failed`."""
        with self.changed:
            first = self.error is None
            # Why this rank has failed stands above what the link saw of it.
            if first or failed:
                self.error = error
                self._failed = failed
            self.changed.notify_all()
        if first:
            self.on_broken()

    def lose(self, reason: str) -> None:
        """The peer is gone, or has answered that this end is closing."""
        self.reason = self.reason or reason  # the first: the others follow from it
        if self.closing:
            self.close()
        else:
            self.break_off(PeerLost(f"rank {self.rank} lost {self.peer_name}: {reason}"))

    def close(self) -> None:
        self.break_off(PeerLost(f"rank {self.rank} has closed its link with {self.peer_name}"))

    def end_stream(self) -> None:
        """One connection came to its end in order; after the last one the peer is gone."""
        with self.changed:
            self._num_open -= 1
        if not self._num_open:
            self.lose("it closed the link")

    def drain(self, timeout_s: float) -> None:
        """Receive no more, and wait for sends to be handed over while link and time allow."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
            self.changed.wait_for(lambda: self.error is not None or not self.num_unsent, timeout_s)

    def _entry(self, sequence: int) -> Receiving:
        if sequence not in self._receiving:
            self._receiving[sequence] = Receiving(self, sequence)
        return self._receiving[sequence]

    def _wait_for_room(self, receiving: Receiving, num_bytes: int) -> bool:
        if receiving.expected is not None and self.error is None:
            return not self.closing  # as for most: each message comes by here

        def settled() -> bool:
            fits = self._unclaimed_bytes + num_bytes <= self._buffer_bytes
            posted = receiving.expected is not None or receiving.tensor is not None
            return posted or fits or self.closing or self.error is not None

        # No deadline at this end: the sender, which is held back, has one.
        while not self.changed.wait_for(settled, _WAKE_S):
            continue
        self._raise_if_broken()
        return not self.closing

    def _raise_if_broken(self) -> None:
        if self.error is not None:
            raise self.error
