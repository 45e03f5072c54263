"""A tensor as messages: a header, then raw bytes. A header is checked before memory is allocated,
and nothing is ever unpickled.
"""

from typing import Any, NamedTuple, Self, TypeVar

import torch
from google.protobuf.message import DecodeError, Message

from dpipe.errors import TransferError
from dpipe.wire.spec import TensorSpec
from dpipe.wire.text import visible
from dpipe.wire.v1.transport_pb2 import TensorHeader

M = TypeVar("M", bound=Message)

PREFIX_BYTES = 4  # before each message in a stream of bytes: its size, big-endian
MAX_FRAMED_BYTES = 64 << 10  # a header and a greeting have some hundred
_MAX_DIMS = 16
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_OF_NUMPY = (torch.float32, torch.float16, torch.int8, torch.uint8)  # those that are sent most


class Header(NamedTuple):
    """What precedes a tensor's bytes."""

    sequence: int  # the tensor's number on its link
    tag: str
    spec: TensorSpec
    piece: int = 0  # which part of its bytes follows
    whole: bool = False  # all of them follow, in place of a piece

    def encode(self) -> bytes:
        return TensorHeader(
            sequence=self.sequence,
            tag=self.tag,
            shape=self.spec.shape,
            dtype=dtype_name(self.spec.dtype),
            num_bytes=self.spec.num_bytes,
            piece=self.piece,
            whole=self.whole,
        ).SerializeToString()

    @classmethod
    def decode(cls, message: bytes) -> Self:
        """Raises `TransferError` where the bytes are not a header, or announce an impossible
        tensor.
        """
        try:
            header = TensorHeader.FromString(message)
        except DecodeError:
            raise TransferError(
                f"a message of {len(message)} bytes stands where a tensor's header belongs"
            ) from None
        # Here, before memory is taken for it: the number may be anybody's.
        dtype = _DTYPES.get(header.dtype)
        shape = tuple(header.shape)
        sizes_fit = min(shape, default=0) >= 0 and max(shape, default=0) < 1 << 48
        if dtype is None or len(shape) > _MAX_DIMS or not sizes_fit:
            raise TransferError(
                f"a header announces an impossible tensor: {header.dtype!r} {list(shape)[:16]}"
            )
        spec = TensorSpec(shape, dtype)
        num_bytes = spec.num_bytes
        if header.num_bytes != num_bytes:
            raise TransferError(
                f"a header announces {header.num_bytes} bytes for {spec}, which takes {num_bytes}"
            )
        return cls(header.sequence, visible(header.tag), spec, header.piece, header.whole)


def framed(message: bytes) -> bytes:
    """The size of `message`, then `message`."""
    return len(message).to_bytes(PREFIX_BYTES, "big") + message


def framed_size(prefix: bytes) -> int:
    """The size of the message behind `prefix`. Raises `TransferError` above `MAX_FRAMED_BYTES`."""
    size = int.from_bytes(prefix, "big")
    if size > MAX_FRAMED_BYTES:
        raise TransferError(
            f"a message of {size} bytes is announced where at most {MAX_FRAMED_BYTES} make sense"
        )
    return size


def unframed(data: bytes) -> tuple[bytes, memoryview]:
    """The framed message at the start of `data`, and the bytes behind it. Raises `TransferError`
    where `data` is too short.
    """
    end = PREFIX_BYTES + framed_size(data[:PREFIX_BYTES])
    if len(data) < end:
        raise TransferError(
            f"a message of {len(data)} bytes stands where a tensor's header belongs"
        )
    return data[PREFIX_BYTES:end], memoryview(data)[end:]


def dtype_name(dtype: torch.dtype) -> str:
    """The name of `dtype` on the wire. Raises `TransferError` for one that cannot be sent, such as
    a quantized one.
    """
    if dtype not in _NAMES:
        raise TransferError(f"a tensor of {dtype} cannot be sent; one of {', '.join(_DTYPES)}")
    return _NAMES[dtype]


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, not copied; the view keeps its memory alive."""
    assert tensor.is_contiguous(), (tensor.shape, tensor.stride())
    array: Any
    if tensor.dtype in _OF_NUMPY and tensor.numel():
        # The same bytes in half the time: a link makes such a view for each message.
        array = tensor.detach().numpy()
        return memoryview(array).cast("B")
    array = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def tensor_of(body: memoryview, spec: TensorSpec, what: str) -> torch.Tensor:
    """A copy of the bytes, as a tensor. Raises `TransferError` where they are too few or too many.

    `what` names the tensor in that message.
    """
    if len(body) != spec.num_bytes:
        raise TransferError(f"{what} came in {len(body)} bytes, {spec} takes {spec.num_bytes}")
    if not body:
        return spec.empty()
    flat = torch.frombuffer(bytearray(body), dtype=torch.uint8)
    return flat.view(spec.dtype).view(spec.shape)


def message_of(kind: type[M], data: bytes) -> M:
    """Raises `TransferError` on bytes that are no such message."""
    try:
        return kind.FromString(data)
    except DecodeError:
        raise TransferError(
            f"{len(data)} bytes came where a {kind.DESCRIPTOR.name} belongs"
        ) from None
