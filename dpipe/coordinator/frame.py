"""Messages of any size on a stream whose messages are bounded: each is cut into frames that fit.

message    [.......... 7 MB ..........]
frames     [1|.. 3 MB ..] [1|.. 3 MB ..] [0|. 1 MB .]      1: more follows, 0: the last one
"""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from dpipe.coordinator.limits import refuse_size
from dpipe.wire.text import visible

M = TypeVar("M", bound=Message)

METHOD = "/dpipe.wire.v1.Coordinator/Attend"
PROTOCOL = 3
# Each frame is a sign of life: even at 1 Mbit/s they come more often than heartbeats.
FRAME_BYTES = 256 << 10

# Parsed, not shown: what is in it is escaped where it is shown.
_JSON_FIELDS = ("shared",)
_LENGTH_DELIMITED = 2  # protobuf's wire type of a field that is a message
_VARINT_BYTES = 10
_LAST = b"\0"
_MORE = b"\1"


def cut(message: Message) -> Iterator[bytes]:
    """The frames of one message."""
    data = message.SerializeToString()
    for start in range(0, len(data) or 1, FRAME_BYTES):
        # An empty message, which the clock sends, is a frame as well.
        end = start + FRAME_BYTES
        mark = _MORE if end < len(data) else _LAST
        yield mark + data[start:end]


def assemble(
    frames: Iterable[bytes], kind: type[M], most_bytes: Callable[[str], int]
) -> Iterator[M]:
    """The messages that `cut` has cut, with texts made `visible`.

    A message begins with its kind and size. `most_bytes(kind)` bounds the size, and so what a peer
    can make this process hold. Raises protobuf's `DecodeError` on anything else.
    """
    data = bytearray()
    size = 0
    for frame in frames:
        _check_frame(frame)
        begins = not data
        data += frame[1:]
        if begins:
            size = _announced_size(data, kind, most_bytes)
        is_last = frame[:1] == _LAST
        if len(data) > size or (is_last and len(data) < size):
            raise DecodeError(f"{len(data)} bytes of a message of {size}")
        if is_last:
            message = kind.FromString(bytes(data))
            data.clear()
            _make_visible(message)
            yield message


def _check_frame(frame: bytes) -> None:
    mark = frame[:1]
    is_full = len(frame) == 1 + FRAME_BYTES
    is_part = len(frame) <= FRAME_BYTES and mark == _LAST
    if mark not in (_LAST, _MORE) or not (is_full or is_part):
        raise DecodeError(f"{len(frame)} bytes are not a frame")


def _announced_size(data: bytearray, kind: type[M], most_bytes: Callable[[str], int]) -> int:
    """The bytes of the message that `data` begins, which is one field, or empty."""
    if not data:
        return 0
    tag, start = _varint(data, 0)
    content_bytes, start = _varint(data, start)
    field = kind.DESCRIPTOR.fields_by_number.get(tag >> 3)
    if field is None or tag & 7 != _LENGTH_DELIMITED:
        raise DecodeError(f"a message of no kind that {kind.DESCRIPTOR.name} has")
    size = start + content_bytes
    refuse_size(field.name, size, most_bytes(field.name))
    return size


def _varint(data: bytearray, start: int) -> tuple[int, int]:
    """Protobuf's number at `start`, and where it ends."""
    value = 0
    for position, byte in enumerate(data[start : start + _VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return value, start + position + 1
    raise DecodeError("a message without kind and size")


def _make_visible(message: Message) -> None:
    for field, value in message.ListFields():
        if isinstance(value, str):
            if field.name not in _JSON_FIELDS:
                setattr(message, field.name, visible(value))
        elif isinstance(value, Message):
            _make_visible(value)
        elif field.message_type is not None:
            for part in value:
                _make_visible(part)
