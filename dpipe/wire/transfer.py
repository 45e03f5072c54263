"""Tensors on their way between ranks: what a room asks of the links that it is given."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from dpipe.wire.spec import TensorSpec

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Moved:
    """When the bytes of a transfer moved, as this end saw it, by this process's
    `time.perf_counter_ns`.
    """

    start_ns: int
    end_ns: int
    num_bytes: int


class Pending(Protocol[T_co]):
    """A transfer under way. It holds its buffers until it is done."""

    def wait(self) -> T_co:
        """Block until the result can be used on the caller's current stream, or what was sent may
        change; raises `PeerLost` or `TransferTimeout`.
        """

    def settle(self) -> None:
        """Block the host until the transfer is done; raises as `wait`. What was sent may have to be
        sent again: it must still not change, but where it is never to be, this costs no copy.
        """

    def done(self) -> bool: ...

    @property
    def moved(self) -> Moved | None:
        """When the bytes moved; None until done."""


class Links(Protocol):
    """The links of one rank with its peers. Each directed link is first in, first out."""

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> Pending[None]:
        """Queue `tensor` for `peer` and return at once. It must not change until `wait` of the
        send has returned.
        """

    def recv(
        self, like: TensorSpec, peer: int, tag: str, into: torch.Tensor | None = None
    ) -> Pending[torch.Tensor]:
        """Expect the next tensor from `peer` and return at once.

        `into` is contiguous CPU memory of the spec `like` that the tensor is received into; `wait`
        returns it. By default the tensor is in new memory, on the device of the links.
        """

    def fail(self, error: Exception) -> None:
        """Give up: every pending and later wait raises `error`, and peers that wait get `PeerLost`
        at once.
        """
