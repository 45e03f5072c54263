"""Messages of any size on a stream whose messages are bounded: each is cut into frames that fit.

message    [.......... 7 MB ..........]
frames     [1|.. 3 MB ..] [1|.. 3 MB ..] [0|. 1 MB .]      1: more follows, 0: the last one
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from dpipe.wire.text import visible

M = TypeVar("M", bound=Message)

METHOD = "/dpipe.wire.v1.Coordinator/Attend"
PROTOCOL = 1
# Each frame is a sign of life: even at 1 Mbit/s they come more often than heartbeats.
FRAME_BYTES = 256 << 10
MAX_BYTES = 512 << 20  # of a message: bounds what a peer can make this process hold

# Parsed, not shown: what is in it is escaped where it is shown.
_JSON_FIELDS = ("shared",)
_LAST = b"\0"
_MORE = b"\1"


def cut(message: Message) -> Iterator[bytes]:
    """The frames of one message."""
    data = message.SerializeToString()
    for start in range(0, len(data) or 1, FRAME_BYTES):
        end = start + FRAME_BYTES
        mark = _MORE if end < len(data) else _LAST
        yield mark + data[start:end]


def assemble(frames: Iterable[bytes], kind: type[M]) -> Iterator[M]:
    """The messages that `cut` has cut, with texts made `visible`. Raises protobuf's `DecodeError`
    on anything else.
    """
    data = bytearray()
    for frame in frames:
        if frame[:1] not in (_LAST, _MORE) or len(data) + len(frame) > MAX_BYTES:
            raise DecodeError(
                f"{len(frame)} bytes are not a frame, or their message exceeds {MAX_BYTES} bytes"
            )
        data += frame[1:]
        if frame[:1] == _LAST:
            message = kind.FromString(bytes(data))
            data.clear()
            _make_visible(message)
            yield message


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
