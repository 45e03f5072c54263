"""Whether a GGUF file is as long as its header says, found out before a library reads it.

    magic "GGUF" | version | tensors | keys | key, type, value ... | name, shape, type, offset ...

Readers of GGUF believe its counts: behind the end of the file they find arrays of 2^60 nothings.
Little-endian, as all that is published. Format: https://github.com/ggml-org/ggml (docs/gguf.md).
"""

import mmap
import struct
from pathlib import Path

from dpipe.errors import CheckpointError

_START = struct.Struct("<4sIQQ")
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_STRING = 8
_ARRAY = 9
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # by type
_MOST_DIMENSIONS = 4
_VERSIONS = (2, 3)
_MOST_VALUES = 1 << 23  # of all arrays: the largest vocabularies take some 2^21


def check_gguf(path: Path) -> None:
    """Raises `CheckpointError` for a file that is none, is cut within its header, or has absurd
    counts there. Takes memory and time by the length of the header alone.
    """
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _Header(data).check()
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(
            f"{path} is not a complete GGUF file ({error}): copy or download it again"
        ) from None


class _Header:
    """Walks through the header. Raises `ValueError`, and `struct.error` at the end of the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._at = 0
        self._num_values = 0  # of arrays

    def check(self) -> None:
        magic, version, num_tensors, num_keys = _START.unpack_from(self._data)
        if magic != b"GGUF" or version not in _VERSIONS:
            raise ValueError("it does not begin as one")
        self._skip(_START.size)
        for _ in range(num_keys):
            self._skip_string()
            self._skip_value(self._number(_U32))
        for _ in range(num_tensors):
            self._skip_tensor()

    def _skip_value(self, kind: int) -> None:
        if kind == _STRING:
            self._skip_string()
        elif kind == _ARRAY:
            self._skip_array()
        else:
            self._skip(_size_of(kind))

    def _skip_array(self) -> None:
        kind = self._number(_U32)
        count = self._number(_U64)
        self._num_values += count
        if self._num_values > _MOST_VALUES:
            raise ValueError(f"its arrays have {self._num_values} values")
        if kind != _STRING:
            self._skip(_size_of(kind) * count)
            return
        for _ in range(count):
            self._skip_string()

    def _skip_tensor(self) -> None:
        self._skip_string()
        num_dimensions = self._number(_U32)
        if num_dimensions > _MOST_DIMENSIONS:
            raise ValueError(f"a tensor of {num_dimensions} dimensions")
        # The shape, the type and the offset
        self._skip(_U64.size * num_dimensions + _U32.size + _U64.size)

    def _skip_string(self) -> None:
        self._skip(self._number(_U64))

    def _number(self, form: struct.Struct) -> int:
        (value,) = form.unpack_from(self._data, self._at)
        self._at += form.size
        return int(value)

    def _skip(self, num_bytes: int) -> None:
        self._at += num_bytes
        if self._at > len(self._data):
            raise ValueError("it ends within its header")


def _size_of(kind: int) -> int:
    if kind not in _BYTES:
        raise ValueError(f"a value of type {kind}")
    return _BYTES[kind]
