"""What a rank may send the coordinator: names from closed lists, and bounds. A rank may be the
machine of a stranger, so nothing here comes from the configuration that it agreed to.
"""

from google.protobuf.message import DecodeError

# What a rank may upload, by name, which becomes a folder of the run; and its most bytes.
UPLOADS = {"trace": 128 << 20}


def refuse_upload(kind: str) -> None:
    """Raises `DecodeError` for a kind of upload that dpipe does not have."""
    if kind not in UPLOADS:
        raise DecodeError(f"an upload named {kind[:100]!r}; the names are {', '.join(UPLOADS)}")
