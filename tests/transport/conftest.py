"""Transports between processes, which are closed at the end of a test."""

from collections.abc import Iterator

import pytest
from ends import End, Make

from dpipe.transport.grpc import GrpcTransport
from dpipe.transport.tcp import TcpTransport


@pytest.fixture(params=[GrpcTransport, TcpTransport])
def kind(request: pytest.FixtureRequest) -> type[End]:
    """Both kinds; a file about one kind overrides this fixture."""
    return request.param


@pytest.fixture
def make(kind: type[End]) -> Iterator[Make]:
    """`make(rank, **options)`: a transport that listens."""
    transports: list[End] = []

    def make_transport(rank: int, **options: object) -> End:
        transports.append(kind(rank, **options))
        return transports[-1]

    yield make_transport
    for transport in transports:
        transport.close()
