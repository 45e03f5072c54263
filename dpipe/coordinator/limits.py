"""What a rank may send the coordinator, and the coordinator a rank: names from closed lists, sizes
and counts. A rank may be the machine of a stranger, so nothing here comes from the configuration
that it agreed to.

    announced size of a message  > its kind's most bytes       refused before the bytes are taken
    a part of a gather           > its key's most bytes, twice, or too many at once
    an upload                    of another name, too large, or twice
"""

from google.protobuf.message import DecodeError

from dpipe.wire.v1 import coordinator_pb2 as pb

# What a rank may upload once, by name, which becomes a folder of the run; and its most bytes.
UPLOADS = {"trace": 64 << 20}
KEY_CHARACTERS = 200
# Of a rank's part of a gather, by what stands before the key's first slash.
PART_BYTES = {"barrier": 0, "plan": 16 << 20, "checkpoint": 16 << 20}
SHARE_BYTES = 1 << 20  # of any other part; a ballot is one
# Gathers at once that a rank has given its part of, and others have not.
OPEN_GATHERS = 4096
OPEN_BYTES = 32 << 20
WHOLE_BYTES = 448 << 20  # of all parts of one gather
UNREAD_MESSAGES = 10_000  # that wait for a rank to read or acknowledge them
REASON_CHARACTERS = 16 << 10

_ENVELOPE = 4 << 10  # for names and lengths around a payload
# By kind of message. Most of a join is the configuration.
TO_COORDINATOR = {
    "join": 16 << 20,
    "ping": 64,
    "part": max(PART_BYTES.values()) + _ENVELOPE,
    "ask": _ENVELOPE,
    "upload": max(UPLOADS.values()) + _ENVELOPE,
    "failure": 4 * REASON_CHARACTERS + _ENVELOPE,
    "leave": 64,
}
FROM_COORDINATOR = {
    "welcome": 16 << 20,
    "missing": 1 << 20,
    "pong": 64,
    "whole": 512 << 20,
    "abort": 1 << 20,
}


def check(message: pb.ToCoordinator) -> None:
    """Raises `DecodeError` where a message says what no rank may say, or too much of it."""
    kind = message.WhichOneof("kind")
    if kind is None:
        raise DecodeError("a message of no kind")
    refuse_size(kind, message.ByteSize(), TO_COORDINATOR[kind])
    if kind == "part":
        _check_key(message.part.key)
        most = PART_BYTES.get(message.part.key.partition("/")[0], SHARE_BYTES)
        refuse_size(f"part of {message.part.key!r}", len(message.part.payload), most)
    elif kind == "ask":
        _check_key(message.ask.key)
    elif kind == "upload":
        _check_upload(message.upload.kind)
        refuse_size("upload", len(message.upload.payload), UPLOADS[message.upload.kind])


def refuse_size(what: str, num_bytes: int, most: int) -> None:
    """Raises `DecodeError` above `most`."""
    if num_bytes > most:
        raise DecodeError(f"{what} of {num_bytes} bytes; the most is {most}")


def _check_key(key: str) -> None:
    if len(key) > KEY_CHARACTERS:
        raise DecodeError(f"a key of {len(key)} characters; the most is {KEY_CHARACTERS}")


def _check_upload(kind: str) -> None:
    if kind not in UPLOADS:
        raise DecodeError(f"an upload named {kind[:100]!r}; the names are {', '.join(UPLOADS)}")
