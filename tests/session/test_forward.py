"""gRPC's way through smaller segments; tests/security/test_broken_links.py breaks the path."""

import socket
import threading

import pytest

from dpipe.session.forward import forward

Pair = tuple[socket.socket, socket.socket, str]


def dialled(address: str) -> socket.socket:
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), 5)


def tune_nothing(sock: socket.socket) -> None:
    pass


@pytest.fixture
def forwarded():
    """Both ends of a forwarded connection, and where it was taken."""
    with socket.create_server(("127.0.0.1", 0)) as peer:
        address = forward(f"127.0.0.1:{peer.getsockname()[1]}", 5.0, 536, tune_nothing)
        with dialled(address) as inner, peer.accept()[0] as outer:
            yield inner, outer, address


def test_bytes_pass_both_ways_in_small_segments(forwarded: Pair) -> None:
    inner, outer, _ = forwarded
    for source, sink in ((inner, outer), (outer, inner)):
        sender = threading.Thread(target=source.sendall, args=(bytes(range(256)) * 4000,))
        sender.start()
        got = b""
        while len(got) < 256 * 4000:
            got += sink.recv(1 << 20)
        sender.join()
        assert got == bytes(range(256)) * 4000
    assert outer.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG) <= 536


@pytest.mark.parametrize("first", [0, 1])
def test_end_that_closes_ends_the_other(forwarded: Pair, first: int) -> None:
    forwarded[first].close()
    assert forwarded[1 - first].recv(1) == b""


def test_second_connection_is_not_taken(forwarded: Pair) -> None:
    inner, outer, address = forwarded
    inner.sendall(b"x")
    assert outer.recv(1) == b"x"
    with pytest.raises(ConnectionRefusedError):
        dialled(address)


def test_nobody_there_is_known_before_grpc_dials() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        forward(f"127.0.0.1:{port}", 5.0, 536, tune_nothing)
