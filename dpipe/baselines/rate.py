"""What one link between two processes carries, wherever they are: one of its two ends.

    python -m dpipe.baselines.rate 1 ADDRESS0 ADDRESS1 --connections 4       receives, and prints Gbit/s of payload
    python -m dpipe.baselines.rate 0 ADDRESS0 ADDRESS1 --connections 4       sends

`scripts/link.py` runs it on two hosts of a lab. What arrives before the warm-up is over is not counted.
"""

import time
from collections import deque

import click
import torch

from dpipe.transport.base import Pending, Transport
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.tcp import TcpTransport
from dpipe.wire.spec import TensorSpec

PORT = 7001
_KINDS: dict[str, type[TcpTransport | GrpcTransport]] = {"tcp": TcpTransport, "grpc": GrpcTransport}
_MORE = TensorSpec((1,), torch.uint8)  # comes before each tensor: 1, or 0 where it was the last
_PAYLOAD = TensorSpec((4 << 20,), torch.uint8)
_JOIN_S = 120.0  # in which the other end has started
_UNDER_WAY = 16  # tensors: what a long fat link holds, and some


def send(transport: Transport, seconds: float) -> None:
    """Send to rank 1 for so long."""
    payload, one = torch.zeros(_PAYLOAD.shape, dtype=torch.uint8), torch.ones(1, dtype=torch.uint8)
    leaving: deque[Pending[None]] = deque()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        transport.send(one, 1, "more")
        leaving.append(transport.send(payload, 1, "payload"))
        if len(leaving) == _UNDER_WAY:
            leaving.popleft().wait()
    transport.send(torch.zeros(1, dtype=torch.uint8), 1, "more").wait()


def receive(transport: Transport, warm_up_s: float) -> float:
    """Gbit/s from rank 0, from the end of the warm-up on."""
    began = start = time.monotonic()
    num_bytes = 0
    while int(transport.recv(_MORE, 0, "more").wait()):
        transport.recv(_PAYLOAD, 0, "payload").wait()
        num_bytes += _PAYLOAD.num_bytes
        if time.monotonic() < began + warm_up_s:
            start, num_bytes = time.monotonic(), 0
    return num_bytes * 8e-9 / (time.monotonic() - start)


@click.command(help=__doc__)
@click.argument("rank", type=click.IntRange(0, 1))
@click.argument("addresses", nargs=2)
@click.option("--kind", type=click.Choice(list(_KINDS)), default="tcp", show_default=True)
@click.option("--connections", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--seconds", default=5.0, show_default=True)
@click.option("--warm-up", "warm_up_s", default=2.0, show_default=True)
def main(rank: int, addresses: tuple[str, str], kind: str, connections: int, seconds: float, warm_up_s: float) -> None:
    transport = _KINDS[kind](rank, bind=addresses[rank], port=PORT, connections=connections, connect_timeout_s=_JOIN_S)
    click.echo("listening")  # only now may rank 0 be started, which dials
    try:
        transport.connect({r: f"{address}:{PORT}" for r, address in enumerate(addresses)}, {1 - rank})
        if rank == 0:
            send(transport, warm_up_s + seconds)
        else:
            click.echo(receive(transport, warm_up_s))
    finally:
        transport.close()


if __name__ == "__main__":
    main()
