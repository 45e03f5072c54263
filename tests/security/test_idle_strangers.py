"""Strangers that connect and say nothing keep nobody out."""

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dpipe.measure.connections import Connections
from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.tcp import TcpTransport

End = Connections | TcpTransport | GrpcTransport
IDLE = 300


@pytest.fixture
def idle() -> Iterator[Callable[[int], None]]:
    """Opens connections to a port."""
    opened: list[socket.socket] = []

    def connect(port: int) -> None:
        for _ in range(IDLE):
            sock = socket.socket()
            opened.append(sock)
            sock.setblocking(False)
            sock.connect_ex(("127.0.0.1", port))

    yield connect
    for sock in opened:
        sock.close()


@pytest.mark.parametrize("kind", [Connections, TcpTransport, GrpcTransport])
def test_peers_meet_though_strangers_wait_at_the_port(
    kind: type[End], idle: Callable[[int], None]
) -> None:
    """A few hundred had the peers of a measurement not answer; a link opened 5 s later."""
    ends = [kind(rank) for rank in range(2)]
    addresses = {end.rank: f"127.0.0.1:{end.port}" for end in ends}

    def meet(end: End) -> object:
        if isinstance(end, Connections):
            return end.open(addresses, 20.0)
        return end.connect(addresses, [1 - end.rank])

    try:
        for end in ends:
            idle(end.port)
        time.sleep(0.5)
        start = time.monotonic()
        with ThreadPoolExecutor(2) as pool:
            reasons = list(pool.map(meet, ends))
        assert not any(reasons)
        assert time.monotonic() - start < 4.0  # before the first of them would be given up
    finally:
        for end in ends:
            end.close()
