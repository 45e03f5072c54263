"""The contract of moving a tensor to a neighbour. Every transport passes
`tests/transport/test_conformance.py`.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from dpipe.wire.spec import TensorSpec

T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Moved:
    """When a transfer's bytes moved as this end saw it, on this process's `time.perf_counter_ns`
    clock.
    """

    start_ns: int
    end_ns: int
    num_bytes: int


class Pending(Protocol[T_co]):
    """A transfer under way. It holds its buffers until it is done."""

    def wait(self) -> T_co:
        """Block until usable on the caller's current stream; raises `PeerLost` or
        `TransferTimeout`.
        """

    def settle(self) -> None:
        """Block the host until it is done; raises as `wait`. Where `wait` left the host waiting, it
        is.
        """

    def done(self) -> bool: ...

    @property
    def moved(self) -> Moved | None:
        """When the bytes moved; None until done."""


class Transport(Protocol):
    """Moves tensors between ranks. Each directed link is first in, first out.

    `tag` is the text of the action (`1SEND_F4`'s message is tagged alike at both ends by the
    executor); a receive that meets another tag or another spec than it expects raises
    `TransferError` naming both, and the link is dead.
    """

    rank: int

    def send(self, tensor: torch.Tensor, peer: int, tag: str) -> Pending[None]:
        """Queue `tensor` for `peer` and return at once; never blocks compute. The tensor must not
        change until done.
        """

    def recv(
        self, like: TensorSpec, peer: int, tag: str, into: torch.Tensor | None = None
    ) -> Pending[torch.Tensor]:
        """Expect the next tensor from `peer` and return at once.

        `into` is where it shall be, on the CPU, contiguous and of the spec `like`; then `wait`
        gives that. Default: memory of its own, on the transport's device.
        """

    def fail(self, error: Exception) -> None:
        """Give up: every pending and later wait raises `error`, and peers that wait get `PeerLost`
        at once.
        """

    def close(self) -> None:
        """Let what is queued leave, for a bounded time, then close every link. Safe to call twice,
        from any thread.
        """
