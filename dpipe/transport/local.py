"""Ranks as threads of one process: no bytes leave it, all else is as on a network."""

from collections.abc import Callable, Collection
from functools import partial
from itertools import permutations

import torch

from dpipe.streams import HOST, Streams
from dpipe.transport.base import Directory
from dpipe.transport.link import LinkEnd, Receiving, Sending
from dpipe.wire.message import byte_view
from dpipe.wire.spec import TensorSpec


class LocalHub:
    """Both ends of all links between `num_ranks` ranks. What breaks one end breaks the other."""

    def __init__(
        self, num_ranks: int, *, transfer_timeout_s: float = 300.0, streams: Streams = HOST
    ) -> None:
        self.num_ranks = num_ranks
        self.ends: dict[tuple[int, int], LinkEnd] = {}
        for pair in permutations(range(num_ranks), 2):
            self.ends[pair] = LinkEnd(*pair, timeout_s=transfer_timeout_s, streams=streams)
        for (rank, peer), end in self.ends.items():
            end.on_broken = partial(self.ends[peer, rank].lose, "it closed the link or failed")

    def transport(self, rank: int) -> "LocalTransport":
        return LocalTransport(self, rank)


class LocalTransport:
    """`send` copies the tensor into the peer's end, and is done when it returns."""

    port = 0

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.rank = rank
        self._hub = hub
        self._peers = [peer for peer in range(hub.num_ranks) if peer != rank]

    def prepare(self, directory: Directory, peers: Collection[int]) -> None:
        """Nothing to do: the hub holds every link."""

    def rehearse(self, step: Callable[[], None]) -> None:
        """Not needed: no receive waits on a device."""

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> Sending:
        # Queued nowhere: this very thread delivers it.
        sending = self._hub.ends[self.rank, peer].send(tensor, tag, lambda _: None)
        _deliver(sending, self._hub.ends[peer, self.rank])
        return sending

    def recv(
        self, like: TensorSpec, peer: int, tag: str, into: torch.Tensor | None = None
    ) -> Receiving:
        return self._hub.ends[self.rank, peer].post(like, tag, into)

    def fail(self, error: Exception) -> None:
        """Every pending and later wait raises `error`; peers get `PeerLost`."""
        for peer in self._peers:
            self._hub.ends[self.rank, peer].break_off(error, failed=True)

    def close(self) -> None:
        for peer in self._peers:
            self._hub.ends[self.rank, peer].close()


def _deliver(sending: Sending, end: LinkEnd) -> None:
    """Copy the bytes to the other end. Threads may come in any order: sends are numbered."""
    sending.await_device()
    sending.begin()
    assert sending.view is not None
    try:
        receiving = end.arrive(sending.header)
    except Exception as error:
        end.break_off(error)  # there this error, and by `on_broken` a lost peer here
        return
    if receiving is not None:
        assert receiving.tensor is not None
        byte_view(receiving.tensor)[:] = sending.view
        receiving.end_piece()
    sending.end_piece()
