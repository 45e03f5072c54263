import logging
import time
from threading import Event, Thread

import pytest

from dpipe.session import uplink as module
from dpipe.session.uplink import Uplink

RATE = 1e6  # bytes a second
LONG = 1_000_000


class Stream:
    """That is paced."""

    def __init__(self, *, is_short: bool = False) -> None:
        self.bytes_per_s: float | None = None
        self._is_short = is_short

    def pace(self, bytes_per_s: float) -> bool:
        self.bytes_per_s = bytes_per_s
        return not self._is_short


class Senders:
    """Threads that ask for turns one after another, and hold theirs until they are told."""

    def __init__(self, uplink: Uplink) -> None:
        self.began: list[int] = []
        self.ends: list[Event] = []
        self._uplink = uplink
        self._threads: list[Thread] = []

    def ask(self, num_bytes: int = LONG) -> None:
        number = len(self._threads)
        asked = len(self._uplink._turns)
        end = Event()
        self.ends.append(end)
        thread = Thread(target=self._send, args=(number, num_bytes, end), daemon=True)
        thread.start()
        self._threads.append(thread)
        # What asks first is on at once, and is known to be before another asks.
        until(lambda: number in self.began or len(self._uplink._turns) > asked > 0)

    def _send(self, number: int, num_bytes: int, end: Event) -> None:
        with self._uplink.turn(num_bytes, Stream()):
            self.began.append(number)
            assert end.wait(10)

    def close(self) -> None:
        for end in self.ends:
            end.set()
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()


def until(happened, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.fixture
def senders():
    senders = Senders(Uplink(RATE))
    yield senders
    senders.close()


def test_long_messages_leave_in_the_order_in_which_they_ask(senders: Senders) -> None:
    for _ in range(3):
        senders.ask()
    for number in range(3):
        until(lambda last=number: len(senders.began) > last)
        time.sleep(0.02)
        assert senders.began == list(range(number + 1))
        senders.ends[number].set()


def test_uplink_is_taken_while_it_is_the_turn_of_a_long_message() -> None:
    uplink = Uplink(RATE)
    with uplink.turn(1000, Stream()):
        assert not uplink.is_taken
    with uplink.turn(LONG, Stream()):
        assert uplink.is_taken
    assert not uplink.is_taken


def test_short_message_waits_for_nobody(senders: Senders) -> None:
    senders.ask()
    senders.ask(num_bytes=1000)
    until(lambda: senders.began == [0, 1])


def test_turn_of_a_connection_that_does_not_move_lapses(
    senders: Senders, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_LATE", 0)
    monkeypatch.setattr(module, "_LEAST_S", 0.1)
    senders.ask()
    senders.ask()
    until(lambda: senders.began == [0, 1])
    # It ends when it may, and takes nobody's turn from him.
    senders.ask()
    senders.ends[0].set()
    monkeypatch.setattr(module, "_LEAST_S", 60.0)
    senders.ends[1].set()
    until(lambda: senders.began == [0, 1, 2])


def test_error_inside_a_turn_ends_it() -> None:
    uplink = Uplink(RATE)
    with pytest.raises(ConnectionError), uplink.turn(LONG, Stream()):
        raise ConnectionError("it broke")
    with uplink.turn(LONG, Stream()):
        pass


def test_connection_is_paced_to_the_uplink_less_acknowledgements() -> None:
    long = Stream()
    with Uplink(RATE).turn(LONG, long):
        assert long.bytes_per_s == 0.99 * RATE
    short = Stream()
    with Uplink(RATE).turn(1000, short):
        assert short.bytes_per_s is None


def test_nothing_waits_or_is_paced_where_links_share_nothing() -> None:
    stream = Stream()
    uplink = Uplink()
    with uplink.turn(1 << 40, stream), uplink.turn(1 << 40, stream):
        assert stream.bytes_per_s is None
        assert not uplink.is_taken


@pytest.mark.parametrize("stream", [Stream(is_short=True), None], ids=["short path", "broken"])
def test_nothing_waits_on_a_short_path_or_for_a_connection_that_broke(
    stream: Stream | None,
) -> None:
    uplink = Uplink(RATE)
    with uplink.turn(LONG, stream), uplink.turn(LONG, stream):
        assert not uplink.is_taken


def test_log_says_once_how_fast_messages_leave(caplog: pytest.LogCaptureFixture) -> None:
    uplink = Uplink(RATE)
    with caplog.at_level(logging.INFO, "dpipe"):
        for _ in range(2):
            with uplink.turn(LONG, Stream()):
                pass
    (said,) = caplog.messages
    assert "at most 0.99 MB a second" in said
