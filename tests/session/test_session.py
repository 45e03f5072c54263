"""A session over pairs of sockets in place of connections."""

import socket
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from dpipe.session.dial import smaller
from dpipe.session.frames import ByteFrames
from dpipe.session.session import LinkSession
from dpipe.session.stream import SocketStream

Ends = tuple[LinkSession, LinkSession]


def attach(ends: Ends) -> None:
    """A new connection; each end learns what the other one has received."""
    received = [end.detach() for end in ends]
    for end, sock, arrived, announced in zip(
        ends, socket.socketpair(), reversed(received), received, strict=True
    ):
        end.attach(ByteFrames(SocketStream(sock)), arrived, announced)


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, there = LinkSession(8.0), LinkSession(8.0)
    yield here, there
    for end in (here, there):
        end.close()
        end.release()


def received(end: LinkSession, num_bytes: int) -> bytes:
    into = bytearray(num_bytes)
    end.read(memoryview(into))
    return bytes(into)


def test_bytes_that_had_not_arrived_are_sent_again_unchanged(ends: Ends) -> None:
    attach(ends)
    memory = bytearray(b"x" * 10_000)
    kept = ends[0].write(b"head", memoryview(memory))
    assert received(ends[1], 4) == b"head"
    assert kept is not None
    kept.own()
    memory[:] = bytes(10_000)
    attach(ends)
    ends[0].send_again()
    assert received(ends[1], 10_000) == b"x" * 10_000


def test_kept_bytes_are_freed_when_they_have_arrived(ends: Ends) -> None:
    attach(ends)
    kept = ends[0].write(b"", memoryview(bytearray(10_000)))
    received(ends[1], 10_000)
    ends[1].write(b"and", memoryview(b"back"))
    received(ends[0], 7)
    assert kept is not None
    assert kept.view is None


@pytest.mark.parametrize("num_bytes", [1, 11, 16 << 10, 100_000])
def test_padding_is_dropped_between_messages(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    attach(ends)
    monkeypatch.setattr(SocketStream, "padding", lambda *_: num_bytes)
    large = bytes(range(256)) * 1_000
    for message in (b"first", large, b"last"):
        writer = threading.Thread(target=ends[0].write, args=(b"", memoryview(message)))
        writer.start()
        assert received(ends[1], len(message)) == message
        writer.join(5)
        ends[0].keep_warm(time.monotonic())
    ends[0].write(b"", memoryview(b"end"))
    assert received(ends[1], 3) == b"end"
    assert ends[1].received == 5 + len(large) + 4 + 3


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The session's time, as its last number."""
    now = [100.0]
    monkeypatch.setattr("dpipe.session.session.time", SimpleNamespace(monotonic=lambda: now[-1]))
    return now


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For bursts of how many bytes a stream was asked what padding they need."""
    bursts: list[int] = []
    monkeypatch.setattr(SocketStream, "padding", lambda _, burst: bursts.append(burst) or 0)
    return bursts


def test_window_is_kept_for_half_a_minute_after_the_last_message(
    ends: Ends, clock: list[float], asked: list[int]
) -> None:
    attach(ends)
    ends[0].keep_warm(clock[-1])
    assert not asked  # nothing was written: there is no window
    ends[0].write(b"", memoryview(b"x"))
    ends[0].keep_warm(clock[-1] + 30)
    ends[0].keep_warm(clock[-1] + 31)
    assert asked == [1]


def test_window_is_kept_for_what_is_written_between_two_pauses(
    ends: Ends, clock: list[float], asked: list[int]
) -> None:
    attach(ends)
    for _ in range(3):
        clock.append(clock[-1] + 0.04)
        ends[0].write(b"", memoryview(bytes(1_000)))
    clock.append(clock[-1] + 0.06)
    ends[0].write(b"", memoryview(b"x"))
    ends[0].keep_warm(clock[-1])
    assert asked == [3_000]


def test_connection_with_an_outdated_greeting_is_refused(ends: Ends) -> None:
    """It announces fewer bytes than have arrived: the rest would arrive twice."""
    attach(ends)
    ends[0].write(b"12345", memoryview(b""))
    received(ends[1], 5)
    here, there = socket.socketpair()
    with here, there, pytest.raises(ConnectionError, match="another connection was quicker"):
        ends[1].attach(ByteFrames(SocketStream(here)), 0, 0)


def test_session_that_is_over_takes_no_connection_and_wakes_its_reader(ends: Ends) -> None:
    attach(ends)
    raised: list[str] = []

    def read() -> None:
        try:
            received(ends[0], 1)
        except ConnectionError as error:
            raised.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    ends[0].close("enough")
    reader.join(5)
    assert raised == ["enough"]
    here, there = socket.socketpair()
    with here, there, pytest.raises(ConnectionError, match="enough"):
        ends[0].attach(ByteFrames(SocketStream(here)), 0, 0)
    with pytest.raises(ConnectionError, match="it broke off the link"):
        received(ends[1], 1)


def test_segments_become_smaller_down_to_what_every_path_takes() -> None:
    assert [smaller(None), smaller(1200), smaller(536)] == [1200, 536, 536]
