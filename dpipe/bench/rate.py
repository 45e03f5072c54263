"""What one link between two processes carries, wherever they are: one of its two ends.

    python -m dpipe.bench.rate 1 ADDRESS0 ADDRESS1 --connections 4   receives, prints Gbit/s
    python -m dpipe.bench.rate 0 ADDRESS0 ADDRESS1 --connections 4   sends

`scripts/link.py` runs it on two hosts of a lab. The receiver alone counts, by its own clock, and
what is under way when the warm-up ends is let through first: no byte that came before the clock was
started is counted.

    rank 0   | T T T T ... L  waits   | T T T T T T T ... L   T: a tensor; L: the last one
    rank 1     takes them all   "through" ^-- first byte  ^-- last byte
"""

import time
from collections import deque
from collections.abc import Sequence

import click
import torch

from dpipe.transport.base import Transport
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.spec import TensorSpec
from dpipe.wire.transfer import Moved, Pending

PORT = 7001
_KINDS: dict[str, type[TcpTransport | GrpcTransport]] = {
    "tcp": TcpTransport,
    "grpc": GrpcTransport,
}
_WORD = TensorSpec((1,), torch.uint8)
_PAYLOAD = TensorSpec((4 << 20,), torch.uint8)
_JOIN_S = 120.0  # in which the other end has started
_UNDER_WAY = 16  # tensors: what a long fat link holds, and some
_AHEAD = 4  # tensors that have a place before they come, as in a run
Coming = deque[Pending[torch.Tensor]]


def send(transport: Transport, warm_up_s: float, seconds: float) -> None:
    """Send to rank 1 for so long, twice: the first time only for TCP to find the link's rate."""
    for duration_s in (warm_up_s, seconds):
        _stream(transport, duration_s)
        transport.recv(_WORD, 1, "through").wait()


def _stream(transport: Transport, duration_s: float) -> None:
    """At least the last tensor."""
    tensor = torch.zeros(_PAYLOAD.shape, dtype=torch.uint8)
    last = torch.ones(_PAYLOAD.shape, dtype=torch.uint8)
    leaving: deque[Pending[None]] = deque()
    deadline = time.monotonic() + duration_s
    while time.monotonic() < deadline:
        sending = transport.send(tensor, 1, "payload")
        leaving.append(sending)
        # Without the bound the sender would queue tensors as fast as Python runs.
        if len(leaving) == _UNDER_WAY:
            oldest = leaving.popleft()
            oldest.settle()
    transport.send(last, 1, "payload")


def receive(transport: Transport) -> float:
    """Gbit/s of payload from rank 0, without the warm-up."""
    coming = _expect(transport)
    _warm_up = _take(transport, coming)
    counted = _take(transport, coming)
    return rate_gbps(counted)


def _expect(transport: Transport) -> Coming:
    return deque(transport.recv(_PAYLOAD, 0, "payload") for _ in range(_AHEAD))


def _take(transport: Transport, coming: Coming) -> list[Moved]:
    """When each tensor of a stretch moved; says that all are through."""
    found: list[Moved] = []
    last = False
    while not last:
        pending = coming.popleft()
        tensor = pending.wait()
        assert pending.moved is not None
        found.append(pending.moved)
        last = bool(tensor[0])
        # Into the memory of the one that has just come: fresh pages would be part of the rate.
        following = transport.recv(_PAYLOAD, 0, "payload", tensor)
        coming.append(following)
    transport.send(_WORD.empty(), 0, "through")
    return found


def rate_gbps(moved: Sequence[Moved]) -> float:
    """What has moved, from the first byte to the last."""
    start_ns = min(m.start_ns for m in moved)
    end_ns = max(m.end_ns for m in moved)
    took_ns = end_ns - start_ns
    num_bytes = sum(m.num_bytes for m in moved)
    return num_bytes * 8 / took_ns  # bits a nanosecond are Gbit a second


@click.command(help=__doc__)
@click.argument("rank", type=click.IntRange(0, 1))
@click.argument("addresses", nargs=2)
@click.option(
    "--kind",
    type=click.Choice(list(_KINDS)),
    default="tcp",
    show_default=True,
)
@click.option(
    "--connections",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
)
@click.option("--seconds", default=5.0, show_default=True)
@click.option("--warm-up", "warm_up_s", default=2.0, show_default=True)
def main(
    rank: int,
    addresses: tuple[str, str],
    kind: str,
    connections: int,
    seconds: float,
    warm_up_s: float,
) -> None:
    transport = _KINDS[kind](
        rank,
        bind=addresses[rank],
        port=PORT,
        connections=connections,
        connect_timeout_s=_JOIN_S,
    )
    click.echo("listening")  # only now may rank 0 be started, which dials
    both = {end: f"{address}:{PORT}" for end, address in enumerate(addresses)}
    try:
        transport.connect(both, {1 - rank})
        if rank == 0:
            send(transport, warm_up_s, seconds)
        else:
            click.echo(receive(transport))
    finally:
        transport.close()


if __name__ == "__main__":
    main()
