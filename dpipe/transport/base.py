"""The contract of moving a tensor to a neighbour. Every transport passes
`tests/transport/test_conformance.py`.
"""

from typing import Protocol

from dpipe.wire.transfer import Links


class Transport(Links, Protocol):
    """Moves tensors between ranks. Each directed link is first in, first out.

    `tag` is the text of the action (`1SEND_F4`'s message is tagged alike at both ends by the
    executor); a receive that meets another tag or another spec than it expects raises
    `TransferError` naming both, and the link is dead.
    """

    rank: int

    def close(self) -> None:
        """Let what is queued leave, for a bounded time, then close every link. Safe to call twice,
        from any thread.
        """
