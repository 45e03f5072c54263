"""What is made of the samples of a stream, and what the ends of one may not say."""

import socket
from collections.abc import Iterator

import pytest

from dpipe.errors import TransferError
from dpipe.measure import traffic
from dpipe.measure.connections import PeerSockets
from dpipe.measure.notes import Note, NoteKind, Notes
from dpipe.measure.tcp_info import Counts, counts, queued_bytes
from dpipe.measure.traffic import Inflow, Meter, Outflow, PeerTraffic, gbps


def meter(*bytes_a_slice: int) -> Meter:
    """Of slices of a second."""
    made = Meter()
    total = 0
    made.note(0.0, 0)
    for now, num_bytes in enumerate(bytes_a_slice, start=1):
        total += num_bytes
        made.note(float(now), total)
    return made


def test_rate_is_steady_once_four_slices_are_alike_and_none_was_better() -> None:
    assert meter(1, 2, 4, 8, 100, 101, 99, 100).steady_rate() == 100
    assert meter(100, 101, 99).steady_rate() is None, "too few"
    assert meter(1, 100, 101, 90, 100).steady_rate() is None, "not alike"
    assert meter(200, 100, 100, 100, 100).steady_rate() is None, "it was better before"
    assert meter(0, 0, 0, 0, 0).steady_rate() is None, "nothing moved"


def test_rate_that_is_not_steady_is_that_of_the_second_half() -> None:
    assert meter(1, 1, 50, 100, 150, 50).late_rate() == 100
    assert meter().late_rate() == 0
    uneven = Meter()
    for sample in ((0.0, 0), (3.0, 30), (4.0, 130)):
        uneven.note(*sample)
    assert uneven.rates() == [10, 100]
    assert uneven.rate_between(0, 4) == 32.5, "bytes over time, not a mean of rates"
    assert uneven.rate_between(3.5, 4) == 0


def test_rate_that_only_grew_was_not_found() -> None:
    assert meter(1, 2, 4, 8, 16, 32).is_rising()
    assert not meter(1, 2, 4, 8, 16, 17, 16).is_rising()


def test_rates_are_those_of_messages() -> None:
    """Without the headers of packets, which no reader of a file of machines takes off."""
    assert gbps(1e9 / 8) == pytest.approx(1.0)


@pytest.fixture
def sockets() -> Iterator[PeerSockets]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = [socket.create_connection(listener.getsockname()) for _ in range(2)]
        theirs = [listener.accept()[0] for _ in range(2)]
    yield PeerSockets(dict(enumerate(ours)), Notes(ours[0]))
    for sock in (*ours, *theirs):
        sock.close()


def test_kernel_counts_what_was_sent_and_what_is_under_way(sockets: PeerSockets) -> None:
    (sock,) = sockets.data
    assert queued_bytes(sock) == 0
    before = counts([sock])
    sock.sendall(bytes(10_000))
    while queued_bytes(sock):
        pass  # until loopback has acknowledged
    after = counts([sock])
    assert after.acked_bytes - before.acked_bytes == 10_000
    assert after.segments > before.segments
    assert after.lost == 0


@pytest.mark.parametrize("kind", [NoteKind.PING, NoteKind.PONG, NoteKind.DONE, NoteKind.GOT])
def test_note_that_does_not_belong_in_a_stream_is_refused(
    sockets: PeerSockets, kind: NoteKind
) -> None:
    idle = PeerTraffic(1, sockets, None, None)
    with pytest.raises(TransferError, match=f"it sent {kind.name} where no such note belongs"):
        idle.take(Note(kind, 1))


def test_stream_is_not_done_twice_nor_heard_of_before_its_end(sockets: PeerSockets) -> None:
    flow = PeerTraffic(1, sockets, Outflow(sockets.data, 0.001, 1.0), Inflow(sockets.data))
    flow.take(Note(NoteKind.DONE, 10))
    for note in (Note(NoteKind.DONE, 10), Note(NoteKind.GOT, 0)):
        with pytest.raises(TransferError, match="where no such note belongs"):
            flow.take(note)


def test_more_bytes_than_were_sent_are_refused(sockets: PeerSockets) -> None:
    into = Inflow(sockets.data)
    into.sent = 5
    into._received = 6
    with pytest.raises(TransferError, match="6 bytes came of 5 that were sent"):
        into.step(0.0)


@pytest.mark.parametrize("relayed", [False, True])
def test_receipt_of_what_was_not_sent_is_refused(relayed: bool) -> None:
    with pytest.raises(TransferError, match="it says that it has 1 bytes of 0"):
        Outflow([], 0.1, 1.0, relayed=relayed).hear(1)


class Bottomless:
    """A socket to a receiver that is always as fast as the sender."""

    def __init__(self) -> None:
        self.taken = 0

    def send(self, chunk: memoryview) -> int:
        self.taken += len(chunk)
        assert self.taken < 1 << 30, "the step would not have ended"
        return len(chunk)


def test_step_ends_also_where_the_receiver_is_as_fast_as_the_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It did not: a stream over loopback outlasted its time without a look at the clock."""
    monkeypatch.setattr(traffic, "queued_bytes", lambda sock: 0)
    monkeypatch.setattr(traffic, "counts", lambda sockets: Counts(0, 0, 0))
    sockets = [Bottomless(), Bottomless()]
    out = Outflow(sockets, round_trip_s=0.001, lasts_s=1.0)
    assert out.step(0.0) is None
    assert sum(sock.taken for sock in sockets) == traffic._FEWEST_IN_FLIGHT
    assert out.blocked == []
