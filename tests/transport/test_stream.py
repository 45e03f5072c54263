"""A stream by itself, over a pair of sockets; TLS is tried in test_mesh.py."""

import socket
import threading
from collections.abc import Iterator

import pytest

from dpipe.transport.stream import Stream, tune

Streams = tuple[Stream, Stream]


@pytest.fixture
def streams() -> Iterator[Streams]:
    here, there = map(Stream, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_parts_arrive_in_order_whatever_the_kernel_takes_at_a_time(streams: Streams) -> None:
    parts = [b"head", b"", bytes(range(256)) * 20_000, b"tail"]
    arrived = bytearray(sum(map(len, parts)))
    writer = threading.Thread(target=streams[0].write, args=parts)
    writer.start()
    streams[1].read(memoryview(arrived))
    writer.join(5)
    assert arrived == b"".join(parts)


def test_read_beyond_the_end_raises(streams: Streams) -> None:
    streams[0].write(b"12")
    streams[0].end()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        streams[1].read(memoryview(bytearray(3)))


def test_skip_returns_when_the_peer_ends(streams: Streams) -> None:
    streams[0].write(bytes(100_000))
    streams[0].end()
    streams[1].skip()


def test_shut_wakes_a_reader_here_and_fails_a_writer_there(streams: Streams) -> None:
    reader = threading.Thread(target=streams[0].skip)
    reader.start()
    streams[0].shut()
    reader.join(5)
    assert not reader.is_alive()
    with pytest.raises(BrokenPipeError):
        streams[1].write(b"x")


def test_tuned_socket_sends_at_once_and_notices_a_host_that_is_gone() -> None:
    with socket.socket() as sock:
        tune(sock)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
