import pytest
import torch

from dpipe.errors import TransferError
from dpipe.wire.message import Header, byte_view, framed, unframed
from dpipe.wire.spec import TensorSpec
from dpipe.wire.v1.transport_pb2 import TensorHeader


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64, torch.int64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (4, 128, 256)], ids=str)
def test_header_survives_the_wire(dtype, shape) -> None:
    header = Header(7, "1SEND_F3", TensorSpec(shape, dtype))
    assert Header.decode(header.encode()) == header


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"dtype": "float32", "shape": [2], "num_bytes": 9},
            r"announces 9 bytes for float32\[2\], which takes 8",
        ),
        ({"dtype": "object", "shape": [2], "num_bytes": 8}, "impossible tensor: 'object'"),
        ({"dtype": "", "shape": [], "num_bytes": 0}, "impossible tensor: ''"),
        (
            {"dtype": "float32", "shape": [-2], "num_bytes": 8},
            r"impossible tensor: 'float32' \[-2\]",
        ),
        ({"dtype": "float32", "shape": [0, 1 << 60], "num_bytes": 0}, "impossible tensor"),
        ({"dtype": "float32", "shape": [1] * 17, "num_bytes": 4}, "impossible tensor"),
    ],
    ids=["size", "dtype", "no dtype", "negative", "huge", "many dims"],
)
def test_invalid_header_is_refused_before_allocation(fields, reason) -> None:
    with pytest.raises(TransferError, match=reason):
        Header.decode(TensorHeader(**fields).SerializeToString())


def test_bytes_that_are_no_header_are_refused() -> None:
    with pytest.raises(
        TransferError, match="a message of 3 bytes stands where a tensor's header belongs"
    ):
        Header.decode(b"\xff\xff\xff")


def test_header_of_a_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(TransferError, match="quint8 cannot be sent; one of float64, float32"):
        Header(0, "x", TensorSpec((1,), torch.quint8)).encode()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64], ids=str
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)], ids=str)
def test_byte_view_shares_the_memory_of_a_tensor(dtype, shape) -> None:
    source, target = torch.ones(shape).to(dtype), torch.zeros(shape).to(dtype)
    byte_view(target)[:] = byte_view(source)
    assert torch.equal(source, target)
    assert byte_view(source).nbytes == TensorSpec.of(source).num_bytes


def test_byte_view_keeps_the_memory_alive() -> None:
    view = byte_view(torch.arange(4, dtype=torch.uint8))
    torch.full((4,), 9, dtype=torch.uint8)
    assert bytes(view) == b"\x00\x01\x02\x03"


def test_framed_message_is_found_before_what_follows_it() -> None:
    message, rest = unframed(framed(b"header") + b"bytes")
    assert (message, bytes(rest)) == (b"header", b"bytes")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\0\0", "a message of 2 bytes stands where"),
        (framed(b"header")[:-1], "a message of 9 bytes stands where"),
        (
            b"\xff\xff\xff\xff",
            "a message of 4294967295 bytes is announced where at most 65536 make sense",
        ),
    ],
    ids=["no size", "short", "huge"],
)
def test_bytes_that_are_no_framed_message_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(TransferError, match=message):
        unframed(data)
