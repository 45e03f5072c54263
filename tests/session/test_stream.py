"""A stream alone, over a pair of sockets; TLS is tested in test_mesh.py."""

import fcntl
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dpipe.session.stream import _UNSENT_BYTES, SocketStream, keep_little_unsent, tune

Streams = tuple[SocketStream, SocketStream]


def read(stream: SocketStream, view: memoryview) -> None:
    """Fill `view`; each `receive` may also fill the bytes after its first half."""
    filled = 0
    while filled < len(view):
        stream.await_bytes(len(view) - filled)
        half = (len(view) - filled + 1) // 2
        filled += stream.receive(view[filled:][:half], view[filled:][half:])


@pytest.fixture
def streams() -> Iterator[Streams]:
    here, there = map(SocketStream, socket.socketpair())
    yield here, there
    here.close()
    there.close()


def test_parts_arrive_in_order_whatever_the_kernel_takes_at_a_time(streams: Streams) -> None:
    parts = [b"head", b"", bytes(range(256)) * 20_000, b"tail"]
    arrived = bytearray(sum(map(len, parts)))
    writer = threading.Thread(target=streams[0].write, args=parts)
    writer.start()
    read(streams[1], memoryview(arrived))
    writer.join(5)
    assert arrived == b"".join(parts)


def test_large_part_is_given_to_the_kernel_in_pieces(
    streams: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = []
    stream = streams[0]
    real = stream._socket

    def send(view: memoryview) -> int:
        pieces.append(len(view))
        return real.send(view)

    monkeypatch.setattr(stream._window, "write_bytes", 40_000)
    own = SimpleNamespace(sendall=real.sendall, send=send, close=real.close)
    monkeypatch.setattr(stream, "_socket", own)
    stream.write(b"head", bytes(100_000))
    assert pieces == [40_000, 40_000, 20_000]


def test_read_beyond_the_end_raises(streams: Streams) -> None:
    streams[0].write(b"12")
    streams[0].end()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        read(streams[1], memoryview(bytearray(3)))


@pytest.fixture
def over_tcp() -> Iterator[Streams]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        here = SocketStream(socket.create_connection(listener.getsockname()))
        there = SocketStream(listener.accept()[0])
    yield here, there
    here.close()
    there.close()


@pytest.mark.parametrize("pause_after", [1, 100_000, 1_999_999])
def test_reader_that_is_woken_for_many_bytes_gets_the_last_few(
    over_tcp: Streams, pause_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dpipe.session.stream._TRICKLE_MS", 5_000)
    sent, arrived = bytes(range(250)) * 8_000, bytearray(2_000_000)
    reader = threading.Thread(target=read, args=[over_tcp[1], memoryview(arrived)])
    reader.start()
    over_tcp[0].write(sent[:pause_after])
    reader.join(0.05)
    over_tcp[0].write(sent[pause_after:])
    reader.join(3)  # sooner than its own poll
    assert arrived == sent


def test_reader_that_waits_for_many_bytes_takes_what_a_slow_path_has_brought(
    over_tcp: Streams,
) -> None:
    """It waited 5 s for them, and the session thought the connection silent."""
    over_tcp[0].write(b"a few")
    start = time.monotonic()
    over_tcp[1].await_bytes(1 << 20)
    assert time.monotonic() - start < 3.0
    assert over_tcp[1].receive(memoryview(bytearray(1 << 20)), memoryview(b"")) == 5


def test_reader_that_waits_for_many_bytes_is_woken_by_the_end(over_tcp: Streams) -> None:
    over_tcp[0].write(bytes(1_000))
    over_tcp[0].end()
    with pytest.raises(ConnectionError, match="it closed the connection"):
        read(over_tcp[1], memoryview(bytearray(1 << 20)))


def test_shut_wakes_a_reader_here_and_fails_a_writer_there(streams: Streams) -> None:
    reader = threading.Thread(target=streams[0].await_bytes, args=[1])
    reader.start()
    streams[0].shut()
    reader.join(3)  # sooner than its own poll
    assert not reader.is_alive()
    with pytest.raises(BrokenPipeError):
        streams[1].write(b"x")


def test_tuned_socket_sends_at_once_and_notices_a_host_that_is_gone() -> None:
    with socket.socket() as sock:
        tune(sock, silence_s=40, unacknowledged_s=300)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 10
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 300_000


@pytest.mark.skipif(sys.platform != "linux", reason="Linux says what is unsent")
def test_little_unsent_leaves_the_rest_to_another_connection(over_tcp: Streams) -> None:
    """Nobody reads: the other end takes what fills its buffer, and this one a little more."""
    message = bytes(64 << 10)
    keep_little_unsent(over_tcp[0]._socket)
    assert over_tcp[0].can_write()
    while over_tcp[0].can_write(200):
        over_tcp[0]._socket.send(message, socket.MSG_DONTWAIT)
    assert unsent(over_tcp[0]._socket) < len(message) + _UNSENT_BYTES


def unsent(sock: socket.socket) -> int:
    """Bytes that Linux has taken and not sent."""
    siocoutqnsd = 0x894B
    return int.from_bytes(fcntl.ioctl(sock, siocoutqnsd, bytes(4)), sys.byteorder)


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel paces on Linux")
def test_paced_stream_sends_no_faster_and_takes_little_ahead(
    over_tcp: Streams, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = over_tcp
    assert not here.pace(4e6)  # loopback is no slow network
    monkeypatch.setattr("dpipe.session.window._LONG_US", 0)
    assert here.pace(4e6)
    message = bytes(1_000_000)
    # The first ten packets, 640 kB on loopback, leave at once.
    for least_s in (0.0, 0.2):
        reader = threading.Thread(target=read, args=(there, memoryview(bytearray(message))))
        reader.start()
        began = time.monotonic()
        here.write(message)
        taken_s = time.monotonic() - began
        reader.join(5)
        assert taken_s > least_s - 0.1
        assert time.monotonic() - began > least_s


def test_kernel_has_room_for_more_than_a_reader_waits_for(over_tcp: Streams) -> None:
    there = over_tcp[1]
    room = there._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    there._wake_at(512 << 10)
    assert room == there._socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) >= 2 << 20


def test_sockets_take_the_longest_timeouts_of_a_configuration() -> None:
    with socket.socket() as sock:
        tune(sock, silence_s=1e9, unacknowledged_s=1e9)


def test_stream_that_is_given_up_is_reset_past_what_it_has_not_sent(over_tcp: Streams) -> None:
    """The end of a stream would wait behind bytes that the peer does not read or the path
    swallows.
    """
    while over_tcp[0].can_write():
        over_tcp[0].write(bytes(10_000))
    over_tcp[0].give_up()
    over_tcp[0].close()
    with pytest.raises(ConnectionResetError):
        read(over_tcp[1], memoryview(bytearray(100 << 20)))
