"""Any transport behind the delay and the rate of a network profile: for users without root, who
cannot have `tc`.

    send(a) send(b)
       [  slot a  ][  slot b  ]            one slot at a time: all links of a rank share its egress
                  `--- delay ----> inner.send(a)
                              `--- delay ----> inner.send(b)

The sender holds a tensor for its slot and the delay, then gives it to the transport below. That
must be faster than the imitated network: its own time is added. Slots are computed, by the
simulator's `network.Egress`, so that a thread that wakes late delays one tensor and not those
behind it. A GPU's tensor is copied to the host when it is sent, and its slot begins when the copy
is complete.
"""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Thread

import torch

from dpipe.errors import PeerLost, TransferTimeout
from dpipe.network.in_transit import InTransit, refuse_what_needs_tc
from dpipe.network.link import Network
from dpipe.streams import HOST, Mark, Streams
from dpipe.transport.base import Directory, Transport
from dpipe.wire.spec import TensorSpec
from dpipe.wire.staging import Staging
from dpipe.wire.transfer import Moved, Pending

_CLOSE_S = 5.0  # for tensors sent before closing to be given to the transport below
_WAKE_S = 5.0  # poll interval of an idle shaper
_DEVICE_POLL_S = 0.5e-3  # and of one that waits for a device, which wakes nobody


class ShapedTransport:
    """`inner` behind the links of `network`. An error of an inner link breaks the shaped one.

    Raises `ProfileError` for a profile with jitter, loss or reordering, which need `tc`,
    and for machines whose ranks share an interface, or whose ingress is bounded.
    """

    def __init__(
        self,
        inner: Transport,
        network: Network,
        *,
        transfer_timeout_s: float = 300.0,
        streams: Streams = HOST,
    ) -> None:
        refuse_what_needs_tc(network)
        self.rank = inner.rank
        self.port = inner.port
        self.timeout_s = transfer_timeout_s
        # Guards what is held and what went wrong; notified at each change.
        self.changed = Condition()
        self._inner = inner
        self._in_transit = InTransit[_Held](network, inner.rank)
        self._staging = Staging(streams)
        self._unready: list[_Held] = []  # sent, but not on the host yet: without a slot
        self._num_held = 0
        self._broken: dict[int, Exception] = {}
        self._failed: Exception | None = None
        self._stopped = False
        self._thread = Thread(target=self._run, name=f"dpipe-shape-{self.rank}", daemon=True)
        self._thread.start()

    def prepare(self, directory: Directory, peers: Collection[int]) -> None:
        self._inner.prepare(directory, peers)

    def rehearse(self, step: Callable[[], None]) -> None:
        self._inner.rehearse(step)

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> "_Held":
        held = _Held(self, *self._staging.fetch(tensor), peer, tag)
        with self.changed:
            if (error := self.error_of(peer)) is not None:
                raise error
            self._unready.append(held)
            self._offer_ready(_now_us())
            self._num_held += 1
            self.changed.notify_all()
        return held

    def recv(
        self, like: TensorSpec, peer: int, tag: str, into: torch.Tensor | None = None
    ) -> "_Expected":
        with self.watching(peer):
            return _Expected(self, self._inner.recv(like, peer, tag, into), peer)

    def fail(self, error: Exception) -> None:
        """Every pending and later wait raises `error`; peers get `PeerLost`."""
        with self.changed:
            self._failed = error
            self.changed.notify_all()
        self._inner.fail(error)

    def close(self) -> None:
        """Wait at most 5 s for what was sent to arrive, unless a link is broken; then close the
        transport below.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: not self._num_held or self._broken or self._failed, _CLOSE_S
            )
            self._stopped = True
            self.changed.notify_all()
        # Last: until its thread has ended, this one still gives tensors to it.
        self._thread.join(_CLOSE_S)
        self._inner.close()

    def error_of(self, peer: int) -> Exception | None:
        """Why nothing can be sent to `peer` any more; None if it can."""
        error = self._failed or self._broken.get(peer)
        if error is None and self._stopped:
            error = PeerLost(f"rank {self.rank} has closed its link with rank {peer}")
        return error

    @contextmanager
    def watching(self, peer: int) -> Iterator[None]:
        """Keep an error that the block raises of the link with `peer`: tensors that wait for a slot
        there fail at once.
        """
        try:
            yield
        except Exception as error:
            with self.changed:
                self._broken.setdefault(peer, error)
                self.changed.notify_all()
            raise

    def _run(self) -> None:
        while (held := self._next_arrival()) is not None:
            with suppress(Exception), self.watching(held.peer):  # `held.wait` raises it
                held.hand_over(self._inner)
            with self.changed:
                self._num_held -= 1
                self.changed.notify_all()

    def _next_arrival(self) -> "_Held | None":
        """Wait for the next tensor that is due; None once the transport is closed."""
        with self.changed:
            while not self._stopped:
                now_us = _now_us()
                self._offer_ready(now_us)
                if (sent := self._in_transit.arrived(now_us)) is not None:
                    sent.item.slot = Moved(
                        int(sent.start_us * 1e3), int(sent.end_us * 1e3), sent.item.num_bytes
                    )
                    return sent.item
                most_s = _DEVICE_POLL_S if self._unready else _WAKE_S
                due_s = (self._in_transit.due_us - now_us) / 1e6
                self.changed.wait(min(most_s, due_s))
        return None

    def _offer_ready(self, now_us: float) -> None:
        """Queue for a slot what is in host memory. A tensor that is not delays those behind it on
        its own link, and no others.
        """
        held_up: set[int] = set()
        for held in tuple(self._unready):
            if held.peer not in held_up and self._staging.done(held.ready):
                self._unready.remove(held)
                self._in_transit.offer(held.peer, held, held.num_bytes, now_us)
            else:
                held_up.add(held.peer)


class _Held:
    """A tensor on its way out, in host memory once `ready` has passed: held by the shaper, then a
    transfer of the transport below.
    """

    def __init__(
        self, shaper: ShapedTransport, tensor: torch.Tensor, ready: Mark, peer: int, tag: str
    ) -> None:
        self.peer = peer
        self.tag = tag
        self.num_bytes = tensor.nbytes
        self.ready = ready
        self.slot: Moved | None = None
        self.inner: Pending[None] | None = None
        self._shaper = shaper
        self._tensor: torch.Tensor | None = tensor

    def hand_over(self, transport: Transport) -> None:
        assert self._tensor is not None
        self.inner = transport.send(self._tensor, self.peer, self.tag)
        # A step's sends are kept until its end; their tensors must not be.
        self._tensor = None

    def wait(self) -> None:
        self.settle()
        assert self.inner is not None
        self.inner.wait()

    def settle(self) -> None:
        shaper = self._shaper
        with shaper.changed:
            in_time = shaper.changed.wait_for(
                lambda: self.inner or shaper.error_of(self.peer), shaper.timeout_s
            )
            error = None
            if self.inner is None:
                error = shaper.error_of(self.peer)
        if not in_time:
            error = TransferTimeout(
                f"rank {shaper.rank} has waited {shaper.timeout_s:g} s for its shaped network to "
                f"take {self.tag} to rank {self.peer}; the profile's bandwidth is too low for "
                "timeouts.transfer, or too much is sent"
            )
            shaper.fail(error)
        if error is not None:
            raise error
        assert self.inner is not None
        with shaper.watching(self.peer):
            self.inner.settle()

    def done(self) -> bool:
        return self.inner is not None and self.inner.done()

    @property
    def moved(self) -> Moved | None:
        """Its slot, as in the simulator; without the delay."""
        return self.slot if self.done() else None


class _Expected:
    """A receive of the transport below, which tells the shaper of a lost peer."""

    def __init__(self, shaper: ShapedTransport, inner: Pending[torch.Tensor], peer: int) -> None:
        self._shaper = shaper
        self._inner = inner
        self._peer = peer

    def wait(self) -> torch.Tensor:
        with self._shaper.watching(self._peer):
            return self._inner.wait()

    def settle(self) -> None:
        with self._shaper.watching(self._peer):
            self._inner.settle()

    def done(self) -> bool:
        return self._inner.done()

    @property
    def moved(self) -> Moved | None:
        return self._inner.moved


def _now_us() -> float:
    return time.perf_counter_ns() / 1e3
