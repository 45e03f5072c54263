"""The state of one end of a link: no sockets, one thread."""

import threading

import pytest
import torch

from dpipe.errors import PeerLost, TransferError, TransferTimeout
from dpipe.streams import CudaStreams
from dpipe.transport.link import LinkEnd
from dpipe.wire.message import Header
from dpipe.wire.spec import TensorSpec

PAIR = TensorSpec((2,), torch.float32)


def header(sequence: int, tag: str = "x", spec: TensorSpec = PAIR) -> Header:
    return Header(sequence, tag, spec)


def test_tensor_is_done_when_every_piece_is_in() -> None:
    end = LinkEnd(0, 1, num_connections=2)
    like = TensorSpec((3 << 12,), torch.float32)  # 48 KiB: three of the smallest pieces
    pending = end.post(like, "x")
    pieces = [end.arrive(header(0, spec=like)._replace(piece=number)) for number in range(3)]
    assert pieces == [pending, pending, pending]
    seen = []
    for piece in pieces:
        seen.append(pending.done())
        piece.end_piece()
    assert [*seen, pending.done()] == [False, False, False, True]


@pytest.mark.parametrize(
    ("connections", "num_bytes", "pieces"),
    [(1, 1 << 30, 1), (2, 1 << 30, 8), (2, 0, 1), (2, 100_000, 6), (16, 100_000, 6)],
)
def test_tensor_is_cut_into_several_pieces_a_connection(
    connections: int, num_bytes: int, pieces: int
) -> None:
    end = LinkEnd(0, 1, num_connections=connections)
    of_bytes = header(0, spec=TensorSpec((num_bytes,), torch.uint8))
    assert end.num_pieces(of_bytes) == pieces
    assert end.num_pieces(of_bytes._replace(whole=True)) == 1


def test_tensor_that_comes_whole_is_done_at_once() -> None:
    end = LinkEnd(0, 1, num_connections=2)
    like = TensorSpec((3 << 12,), torch.float32)
    pending = end.post(like, "x")
    arrived = end.arrive(header(0, spec=like)._replace(whole=True))
    assert arrived is pending
    arrived.end_piece()
    assert pending.done()


def test_tensor_that_comes_whole_and_in_pieces_is_refused() -> None:
    end = LinkEnd(0, 1, num_connections=2)
    like = TensorSpec((3 << 12,), torch.float32)
    end.arrive(header(0, spec=like))
    with pytest.raises(TransferError, match="disagree on tensor 0"):
        end.arrive(header(0, spec=like)._replace(whole=True))


@pytest.mark.gpu
def test_what_waits_for_its_turn_is_in_host_memory() -> None:
    """However far a sender is ahead, the device holds what is asked for."""
    streams = CudaStreams(torch.device("cuda"))
    end = LinkEnd(0, 1, streams=streams)
    before = torch.cuda.memory_allocated()
    early = end.arrive(header(0))
    early.end_piece()
    posted = end.post(PAIR, "x")
    late = end.post(PAIR, "x")
    end.arrive(header(1)).end_piece()
    assert torch.cuda.memory_allocated() == before
    received = [posted.wait(), late.wait()]
    assert torch.cuda.memory_allocated() > before
    assert {tensor.device for tensor in received} == {streams.device}


def test_connections_that_disagree_on_a_tensor_are_refused() -> None:
    end = LinkEnd(0, 1, num_connections=2)
    end.arrive(header(0, "x"))
    with pytest.raises(TransferError, match="the connections of rank 1 disagree on tensor 0"):
        end.arrive(header(0, "y"))


def test_memory_is_not_allocated_before_there_is_room_or_a_receive() -> None:
    end = LinkEnd(0, 1, buffer_bytes=PAIR.num_bytes)
    first, second = end.arrive(header(0)), []
    reader = threading.Thread(target=lambda: second.append(end.arrive(header(1))))
    reader.start()
    reader.join(0.05)
    assert reader.is_alive()  # the first fills the buffer
    assert end.post(PAIR, "x") is first
    reader.join(5)
    assert end.post(PAIR, "x") is second[0]


def test_reader_that_waits_for_room_ends_with_the_link() -> None:
    end, raised = LinkEnd(0, 1, buffer_bytes=0), []

    def read() -> None:
        try:
            end.arrive(header(0))
        except PeerLost as error:
            raised.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    end.lose("gone")
    reader.join(5)
    assert [str(error) for error in raised] == ["rank 0 lost rank 1: gone"]


def test_closing_end_takes_nothing_in() -> None:
    end = LinkEnd(0, 1, buffer_bytes=0)
    end.drain(0.0)
    assert end.arrive(header(0)) is None


def test_first_error_stays_and_ends_the_carrier_once() -> None:
    ended = []
    end = LinkEnd(0, 1, "10.0.0.5:4000")
    end.on_broken = lambda: ended.append(True)
    end.lose("first")
    end.lose("second")
    assert str(end.error) == "rank 0 lost rank 1 (10.0.0.5:4000): first"
    assert ended == [True]


def test_peer_is_lost_when_its_last_stream_has_ended() -> None:
    end = LinkEnd(0, 1, num_connections=2)
    end.end_stream()
    assert end.error is None
    end.end_stream()
    assert isinstance(end.error, PeerLost)


def test_late_send_raises_timeout_naming_peer_and_action() -> None:
    end = LinkEnd(3, 2, "10.0.0.5:4000", timeout_s=0.01)
    sending = end.send(torch.zeros(2), "3SEND_B7", lambda _: None)
    with pytest.raises(
        TransferTimeout,
        match=r"rank 3 has waited 0.01 s to hand over 3SEND_B7 to rank 2 \(10.0.0.5",
    ):
        sending.wait()


def test_what_has_arrived_can_be_claimed_after_the_peer_is_lost() -> None:
    end = LinkEnd(0, 1)
    end.arrive(header(0)).end_piece()
    end.lose("gone")
    assert end.post(PAIR, "x").wait().shape == (2,)
    with pytest.raises(PeerLost):
        end.post(PAIR, "x")
