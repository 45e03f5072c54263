"""A gRPC stream alone, with a call that goes nowhere; links over it are tested in
tests/transport/test_conformance.py and tests/security/test_broken_links.py.
"""

import threading
from collections.abc import Callable

import pytest

from dpipe.session.grpc_stream import GrpcStream


class Call:
    """gRPC's end of a stream."""

    def __init__(self) -> None:
        self.cancelled = False
        self.callbacks: list[Callable[[], None]] = []

    def add_callback(self, callback: Callable[[], None]) -> bool:
        self.callbacks.append(callback)
        return True

    def cancel(self) -> None:
        self.cancelled = True

    def end(self) -> None:
        for callback in self.callbacks:
            callback()


class Channel:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def carried() -> tuple[GrpcStream, Call, Channel]:
    stream, call, channel = GrpcStream(bulk=True), Call(), Channel()
    stream.carry(call, iter(()), channel)
    return stream, call, channel


@pytest.mark.parametrize("sizes", [[0], [12, 1], [12, 100, 1 << 20], [12, 3_000_000, 0, 5]])
def test_parts_leave_in_order_in_messages_of_bounded_size(carried, sizes: list[int]) -> None:
    stream, _, _ = carried
    parts = [bytes([number]) * size for number, size in enumerate(sizes)]

    def write() -> None:
        stream.write(*parts)
        stream.end()

    writer = threading.Thread(target=write)
    writer.start()
    messages = list(stream.outgoing())
    writer.join(5)
    assert b"".join(messages) == b"".join(parts)
    assert max(map(len, messages), default=0) <= 516 << 10
    assert len(messages) <= 1 + sum(sizes) // (516 << 10)


def test_close_ends_at_once_what_is_over(carried) -> None:
    """A thread held the channel open for another half second."""
    stream, call, channel = carried
    stream.shut()
    call.end()
    stream.close()
    assert channel.closed
    assert stream._linger is not None
    assert stream._linger.finished.is_set()


def test_close_lets_the_last_message_leave(carried) -> None:
    stream, call, channel = carried
    stream.shut()
    stream.close()
    assert not channel.closed
    assert not call.cancelled
    stream.give_up()
    assert channel.closed
    assert call.cancelled


def test_a_fed_stream_is_written_by_the_thread_that_pulls(carried) -> None:
    """Another thread between a tensor and gRPC's own was woken for each."""
    stream, _, _ = carried
    feeders = []
    nudges = []

    def feed() -> None:
        feeders.append(threading.get_ident())
        # More than one message: a thread that waited for itself would wait for ever.
        stream.write(bytes(1 << 20))
        if len(feeders) == 2:
            stream.end()

    stream.feed_by(feed, lambda: nudges.append(None))
    messages = list(stream.outgoing())
    assert sum(map(len, messages)) == 2 << 20
    assert feeders == [threading.get_ident()] * 2
    assert not nudges


@pytest.mark.parametrize("what", ["write", "end", "over"])
def test_the_feeding_thread_is_nudged_by_what_others_do(carried, what: str) -> None:
    stream, call, _ = carried
    waits, nudged = threading.Event(), threading.Event()

    def feed() -> None:
        waits.set()
        assert nudged.wait(5)
        nudged.clear()

    stream.feed_by(feed, nudged.set)
    messages: list[bytes] = []
    puller = threading.Thread(target=lambda: messages.extend(stream.outgoing()))
    puller.start()
    assert waits.wait(5)
    if what == "write":
        stream.write(b"beat")
        stream.end()
    elif what == "end":
        stream.end()
    else:
        call.end()
    puller.join(5)
    assert not puller.is_alive()
    assert messages == ([b"beat"] if what == "write" else [])
