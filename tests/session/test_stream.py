"""A stream by itself, over a pair of sockets; TLS is tried in test_mesh.py."""

import socket
import threading
from collections.abc import Iterator

import pytest

from dpipe.session.stream import Stream, tune

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


@pytest.fixture
def over_tcp() -> Iterator[Streams]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = Stream(socket.create_connection(listener.getsockname()))
        there = Stream(listener.accept()[0])
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("pause_after", [1, 100_000, 1_999_999])
def test_reader_that_is_woken_for_many_bytes_gets_the_last_few(
    over_tcp: Streams, pause_after: int
) -> None:
    sent, arrived = bytes(range(250)) * 8_000, bytearray(2_000_000)
    reader = threading.Thread(target=over_tcp[1].read, args=[memoryview(arrived)])
    reader.start()
    over_tcp[0].write(sent[:pause_after])
    reader.join(0.05)
    over_tcp[0].write(sent[pause_after:])
    reader.join(3)  # sooner than it looks around by itself
    assert arrived == sent


def test_reader_that_waits_for_many_bytes_hears_of_the_end(over_tcp: Streams) -> None:
    over_tcp[0].write(bytes(1_000))
    over_tcp[0].end()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        over_tcp[1].read(memoryview(bytearray(1 << 20)))


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
