import pytest
from google.protobuf.message import DecodeError

from dpipe.coordinator import frame
from dpipe.wire.v1 import coordinator_pb2 as pb


def _upload(num_bytes: int) -> pb.ToCoordinator:
    return pb.ToCoordinator(upload=pb.Upload(kind="trace", payload=bytes(num_bytes)))


@pytest.mark.parametrize("num_bytes", [0, 1, 30, 87, 88, 89, 1000])
def test_cut_messages_assemble_to_themselves(monkeypatch, num_bytes):
    monkeypatch.setattr(frame, "FRAME_BYTES", 100)
    messages = [_upload(num_bytes), pb.ToCoordinator(leave=pb.Leave())]
    frames = [piece for message in messages for piece in frame.cut(message)]
    assert max(map(len, frames)) <= 101
    assert list(frame.assemble(frames, pb.ToCoordinator)) == messages


def test_cut_marks_all_frames_but_the_last(monkeypatch):
    monkeypatch.setattr(frame, "FRAME_BYTES", 100)
    assert [piece[0] for piece in frame.cut(_upload(250))] == [1, 1, 0]


def test_frames_of_a_step_are_one_grpc_message():
    assert len(list(frame.cut(_upload(frame.FRAME_BYTES - 100)))) == 1
    assert all(len(piece) < 4 << 20 for piece in frame.cut(_upload(10_000_000)))


@pytest.mark.parametrize("garbage", [b"", b"\2abc", b"\0\xff\xff\xff"])
def test_assemble_refuses_what_was_not_cut(garbage):
    with pytest.raises(DecodeError):
        list(frame.assemble([garbage], pb.ToCoordinator))


def test_assemble_bounds_what_it_holds(monkeypatch):
    monkeypatch.setattr(frame, "MAX_BYTES", 1000)
    endless = (b"\1" + bytes(100) for _ in range(10**9))
    with pytest.raises(DecodeError, match="exceeds 1000 bytes"):
        list(frame.assemble(endless, pb.ToCoordinator))
