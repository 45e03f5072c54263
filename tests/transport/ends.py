"""Both ends of links between processes, in one process: helpers to address and connect them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from dpipe.transport.mesh import Mesh
from dpipe.wire.spec import TensorSpec

End = Mesh[Any]
Make = Callable[..., End]
SCALAR = TensorSpec((), torch.float32)


def address(end: End) -> str:
    return f"127.0.0.1:{end.port}"


def connect(*ends: End, hidden: tuple[int, ...] = ()) -> None:
    """Connect all pairs; the ranks in `hidden` have no address."""
    addresses = {end.rank: None if end.rank in hidden else address(end) for end in ends}
    with ThreadPoolExecutor(len(ends)) as pool:
        list(pool.map(lambda end: end.connect(addresses, addresses.keys() - {end.rank}), ends))


def connect_between(middle: End, other: End) -> None:
    """Connect rank 1 with rank 2, and with a stranger in place of rank 0 that connects to it."""
    addresses = {0: "127.0.0.1:1", 1: address(middle), 2: address(other)}
    with ThreadPoolExecutor(2) as pool:
        list(
            pool.map(
                lambda end: end.connect(addresses, {1: [0, 2], 2: [1]}[end.rank]), (middle, other)
            )
        )


def assert_link_works(source: End, target: End) -> None:
    source.send(torch.tensor(7.0), target.rank, "check")
    assert target.recv(SCALAR, source.rank, "check").wait().item() == 7.0
