"""A link that stumbles does not end a run: connections between two ranks are cut, reset, swallowed
and delayed by a proxy, and every byte arrives once and in order.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from fakes.broken_path import BrokenPath

from dpipe.transport.tcp import TcpTransport
from dpipe.wire.spec import TensorSpec

LARGE = TensorSpec((1_000_000,), torch.int64)


@contextmanager
def linked(
    *,
    connections: int = 1,
    heartbeat_s: float = 8.0,
    reset_after: float = float("inf"),
    seed: int = 0,
) -> Iterator[tuple[TcpTransport, TcpTransport, BrokenPath]]:
    """Rank 0 dials rank 1 through a path that can break."""
    ends = [TcpTransport(rank, connections=connections, heartbeat_s=heartbeat_s) for rank in (0, 1)]
    with BrokenPath(ends[1].port, reset_after=reset_after, seed=seed) as path:
        addresses = {0: None, 1: path.address}
        other = threading.Thread(target=ends[1].connect, args=(addresses, [0]))
        other.start()
        try:
            ends[0].connect(addresses, [1])
            other.join()
            yield ends[0], ends[1], path
        finally:
            closing = [threading.Thread(target=end.close) for end in ends]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()


def numbered(number: int, size: int = LARGE.shape[0]) -> torch.Tensor:
    return torch.arange(number, number + size)


@pytest.mark.parametrize("connections", [1, 3])
def test_link_goes_on_after_a_reset_amid_a_message(connections: int) -> None:
    with linked(connections=connections) as (first, second, path):
        path.delay_s = 0.001
        sends = [first.send(numbered(i), 1, str(i)) for i in range(10)]
        for i in range(10):
            assert torch.equal(second.recv(LARGE, 0, str(i)).wait(), numbered(i))
            if i in (2, 5):
                path.reset()
        for send in sends:
            send.wait()
        assert path.num_connections >= 2 * connections
