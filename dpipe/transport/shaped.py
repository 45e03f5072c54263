"""Any transport, as slow and as far as a network profile says: for users without root, where `tc`
cannot be had.

    send(a) send(b)
       [  slot a  ][  slot b  ]              one at a time, on all links of the rank: they share its egress
                  `--- delay ----> inner.send(a)
                              `--- delay ----> inner.send(b)

The sender holds a tensor for its slot and the delay, then hands it to the transport below, which
must be faster than what is imitated: its own time comes on top. Slots follow one another on paper
(`topology.Egress`, the simulator's), so a thread that wakes late makes one tensor late, and not all
behind it. What a GPU makes is copied to the host as it is sent, and its slot begins when it is
there: the caller's streams are not this thread's.
"""

import heapq
import math
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from threading import Condition, Thread
from typing import Generic, TypeVar

import torch

from dpipe.errors import PeerLost, ProfileError, TransferTimeout
from dpipe.network.egress import Egress, Sent
from dpipe.network.link import Network
from dpipe.streams import HOST, Mark, Streams
from dpipe.transport.base import Directory, Transport
from dpipe.transport.staging import Staging
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Moved, Pending

_CLOSE_S = 5.0  # for what was sent before closing to be handed over
_WAKE_S = 5.0  # an idle shaper looks around this often
_LOOK_S = 0.5e-3  # and one that waits for a device, which wakes nobody


Item = TypeVar("Item")


class InTransit(Generic[Item]):
    """What one rank has under way: first in its slot, then for the link's delay. It has no clock,
    as `Egress` has none: called with the time, it says what has arrived by then, to the microsecond
    that the simulator says.
    """

    def __init__(self, network: Network, rank: int) -> None:
        self._network = network
        self._rank = rank
        self._egress = Egress[Item](network, rank)
        self._flying: list[tuple[float, int, Sent[Item]]] = []  # a heap by arrival
        self._numbers = count()

    def offer(self, target: int, item: Item, num_bytes: int, now_us: float) -> None:
        self._end_slots(now_us)
        self._egress.offer(target, item, num_bytes, now_us)

    def arrived(self, now_us: float) -> Sent[Item] | None:
        """Take out the next that has arrived by now, with its slot; None where there is none."""
        self._end_slots(now_us)
        if self._flying and self._flying[0][0] <= now_us:
            return heapq.heappop(self._flying)[-1]
        return None

    @property
    def due_us(self) -> float:
        """When something changes next: a slot ends or an item arrives. Infinity where nothing is
        under way.
        """
        slot_us = math.inf if self._egress.due_us is None else self._egress.due_us
        return min(slot_us, self._flying[0][0] if self._flying else math.inf)

    def _end_slots(self, now_us: float) -> None:
        """What has left the interface by now is on its way."""
        while (due_us := self._egress.due_us) is not None and due_us <= now_us:
            sent = self._egress.complete()
            arrival_us = sent.end_us + self._network.link(self._rank, sent.target).delay_us
            heapq.heappush(self._flying, (arrival_us, next(self._numbers), sent))


class ShapedTransport:
    """`inner` behind the links of `network`. What breaks the inner link breaks the shaped one.

    Raises `ProfileError` for a profile with jitter or loss: they cannot be had without `tc`.
    """

    def __init__(
        self,
        inner: Transport,
        network: Network,
        *,
        transfer_timeout_s: float = 300.0,
        streams: Streams = HOST,
    ) -> None:
        _refuse_what_needs_tc(network)
        self.rank = inner.rank
        self.port = inner.port
        self.timeout_s = transfer_timeout_s
        self.changed = Condition()
        self._inner = inner
        self._in_transit = InTransit[_Held](network, inner.rank)
        self._staging = Staging(streams)
        self._unready: list[_Held] = []  # sent, and no slot asked for yet
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
        """Let what was sent arrive, for at most 5 s where the links are whole, then close the
        transport below.
        """
        with self.changed:
            self.changed.wait_for(
                lambda: not self._num_held or self._broken or self._failed, _CLOSE_S
            )
            self._stopped = True
            self.changed.notify_all()
        self._thread.join(_CLOSE_S)
        self._inner.close()

    def error_of(self, peer: int) -> Exception | None:
        """Why nothing can be sent to `peer` any more."""
        closed = (
            PeerLost(f"rank {self.rank} has closed its link with rank {peer}")
            if self._stopped
            else None
        )
        return self._failed or self._broken.get(peer) or closed

    @contextmanager
    def watching(self, peer: int) -> Iterator[None]:
        """Remember an error of the link with `peer`: a tensor that is held must not wait for its
        slot in vain.
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
            with suppress(Exception), self.watching(held.peer):  # whoever waits for it is told
                held.hand_over(self._inner)
            with self.changed:
                self._num_held -= 1
                self.changed.notify_all()

    def _next_arrival(self) -> "_Held | None":
        """Wait for the next tensor whose time has come; None once the transport is closed."""
        with self.changed:
            while not self._stopped:
                now_us = _now_us()
                self._offer_ready(now_us)
                if (sent := self._in_transit.arrived(now_us)) is not None:
                    sent.item.slot = Moved(
                        int(sent.start_us * 1e3), int(sent.end_us * 1e3), sent.item.num_bytes
                    )
                    return sent.item
                most_s = _LOOK_S if self._unready else _WAKE_S
                self.changed.wait(min(most_s, (self._in_transit.due_us - now_us) / 1e6))
        return None

    def _offer_ready(self, now_us: float) -> None:
        """Let what is in host memory queue for its slot; a tensor that is not holds up its own
        link, and no other.
        """
        held_up: set[int] = set()
        for held in tuple(self._unready):
            if held.peer not in held_up and self._staging.done(held.ready):
                self._unready.remove(held)
                self._in_transit.offer(held.peer, held, held.num_bytes, now_us)
            else:
                held_up.add(held.peer)


class _Held:
    """A tensor on its way out, in host memory from `ready` on: held by the shaper, then a transfer
    of the transport below.
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
        self._tensor = (
            None  # a step's sends are waited for at its end: they must not keep all its tensors
        )

    def wait(self) -> None:
        shaper = self._shaper
        with shaper.changed:
            in_time = shaper.changed.wait_for(
                lambda: self.inner or shaper.error_of(self.peer), shaper.timeout_s
            )
            error = None if self.inner else shaper.error_of(self.peer)
        if not in_time:
            error = TransferTimeout(
                f"rank {shaper.rank} has waited {shaper.timeout_s:g} s for its shaped network to "
                f"take {self.tag} to "
                f"rank {self.peer}; the profile's bandwidth is too low for timeouts.transfer, or "
                "too much is sent"
            )
            shaper.fail(error)
        if error is not None:
            raise error
        assert self.inner is not None
        with shaper.watching(self.peer):
            self.inner.settle()

    settle = wait

    def done(self) -> bool:
        return self.inner is not None and self.inner.done()

    @property
    def moved(self) -> Moved | None:
        """The slot in which it left, as the simulator has it; the delay is not in it."""
        return self.slot if self.done() else None


class _Expected:
    """A receive of the transport below, which also learns from it that the peer is lost."""

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


def _refuse_what_needs_tc(network: Network) -> None:
    links = [*network.links.values(), *([network.default] if network.default else [])]
    if any(link.jitter_ms or link.loss_percent for link in links):
        raise ProfileError(
            f"network {network.name!r} has jitter or loss, and the shaped transport imitates delay "
            "and rate alone; "
            "take them out of the profile, or shape the interface itself: python -m netem apply "
            "(needs root)"
        )
