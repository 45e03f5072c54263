"""The contract of moving a tensor to a neighbour. Every transport passes
`tests/transport/test_conformance.py`.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from dpipe.wire.schema import Schema, T
from dpipe.wire.transfer import Links


class Directory(Protocol):
    """Where the transports of all ranks learn of each other: the coordinator."""

    @property
    def addresses(self) -> Mapping[int, str | None]:
        """`host:port` of each rank; None for one that cannot be dialled."""

    def routes(
        self, here: str, peers: Collection[int], timeout_s: float
    ) -> Mapping[int, str | None]:
        """Where this rank, which listens at `here`, dials those of `peers` that it does not dial at
        their addresses; None for one that dials it. All ranks call it.
        """

    def share(self, key: str, value: Any, timeout_s: float, schema: Schema[T]) -> list[T]:
        """Every rank's JSON value of `key`, by rank, each of `schema`."""


class Transport(Links, Protocol):
    """Moves tensors between ranks. Each directed link is first in, first out.

    `tag` is the text of the action (`1SEND_F4`'s message is tagged alike at both ends by the
    executor); a receive that meets another tag or another spec than it expects raises
    `TransferError` naming both, and the link is dead.
    """

    @property
    def rank(self) -> int: ...

    @property
    def port(self) -> int:
        """Where peers dial this rank; 0 where nothing listens."""

    def prepare(self, directory: Directory, peers: Collection[int]) -> None:
        """Open and check the links with `peers`; all ranks call it at about the same time.

        Raises `JoinError` naming each peer that cannot be reached, or the error that this rank was
        told to `fail` with.
        """

    def rehearse(self, step: Callable[[], None]) -> None:
        """Before the first step. `step` goes through one as it will be run; a transport that needs
        this calls it, and moves nothing meanwhile.
        """

    def close(self) -> None:
        """Let what is queued leave, for a bounded time, then close every link. Safe to call twice,
        from any thread.
        """
