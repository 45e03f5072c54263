import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from dpipe.coordinator import frame, limits
from dpipe.wire.v1 import coordinator_pb2 as pb

most = limits.TO_COORDINATOR.__getitem__


def _upload(num_bytes: int) -> pb.ToCoordinator:
    return pb.ToCoordinator(upload=pb.Upload(kind="trace", payload=bytes(num_bytes)))


@pytest.mark.parametrize("num_bytes", [0, 1, 30, 87, 88, 89, 1000])
def test_cut_messages_assemble_to_themselves(monkeypatch, num_bytes):
    monkeypatch.setattr(frame, "FRAME_BYTES", 100)
    messages = [_upload(num_bytes), pb.ToCoordinator(leave=pb.Leave())]
    frames = [piece for message in messages for piece in frame.cut(message)]
    assert max(map(len, frames)) <= 101
    assert list(frame.assemble(frames, pb.ToCoordinator, most)) == messages


def test_cut_marks_all_frames_but_the_last(monkeypatch):
    monkeypatch.setattr(frame, "FRAME_BYTES", 100)
    assert [piece[0] for piece in frame.cut(_upload(250))] == [1, 1, 0]


def test_frames_of_a_step_are_one_grpc_message():
    assert len(list(frame.cut(_upload(frame.FRAME_BYTES - 100)))) == 1
    assert all(len(piece) < 4 << 20 for piece in frame.cut(_upload(10_000_000)))


@pytest.mark.parametrize("garbage", [b"", b"\2abc", b"\0\xff\xff\xff"])
def test_assemble_refuses_what_was_not_cut(garbage):
    with pytest.raises(DecodeError):
        list(frame.assemble([garbage], pb.ToCoordinator, most))


def test_assemble_refuses_the_announced_size_before_the_bytes(monkeypatch):
    monkeypatch.setattr(frame, "FRAME_BYTES", 100)
    pieces_read = []

    def large():
        for piece in frame.cut(_upload(10_000)):
            pieces_read.append(piece)
            yield piece

    with pytest.raises(DecodeError, match="upload of 100.. bytes; the most is 1000"):
        list(frame.assemble(large(), pb.ToCoordinator, lambda kind: 1000))
    assert len(pieces_read) == 1


@pytest.mark.parametrize("announced", [b"\2", b"\x84\x80\x80\x80\x10"])
def test_assemble_takes_no_more_than_was_announced(monkeypatch, announced):
    """2 bytes, and 4 GiB."""
    monkeypatch.setattr(frame, "FRAME_BYTES", 100)
    endless = (b"\1\x2a" + announced + bytes(99 - len(announced)) for _ in range(10**9))
    with pytest.raises(DecodeError, match=r"bytes of a message|the most is"):
        list(frame.assemble(endless, pb.ToCoordinator, most))


def test_assemble_refuses_frames_that_are_not_full(monkeypatch):
    """An endless row of empty frames was read for ever."""
    with pytest.raises(DecodeError, match="1 bytes are not a frame"):
        list(frame.assemble((b"\1" for _ in range(10**9)), pb.ToCoordinator, most))


@given(st.lists(st.binary(max_size=40)))
def test_assemble_of_anything_gives_messages_or_says_what_is_wrong(pieces):
    with contextlib.suppress(DecodeError):
        for message in frame.assemble(pieces, pb.ToCoordinator, most):
            assert isinstance(message, pb.ToCoordinator)


@given(st.integers(0, 200), st.integers(0, 20), st.binary(max_size=20))
def test_assemble_of_a_damaged_message_says_what_is_wrong(num_bytes, position, damage):
    (whole,) = frame.cut(_upload(num_bytes))
    damaged = whole[:position] + damage + whole[position + len(damage) :]
    with contextlib.suppress(DecodeError):
        list(frame.assemble([damaged], pb.ToCoordinator, most))
