import json
import math
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpipe.errors import TransferError
from dpipe.wire.schema import Port, Schema, Shape, Text


@given(st.floats())
def test_float_keeps_its_bits(number: float) -> None:
    """All ranks get the same loss, to the last bit."""
    (read,) = Schema[list[float]](list[float]).parse(json.dumps([number]).encode(), "x", 0)
    if math.isnan(number):
        assert math.isnan(read)
    else:
        assert struct.pack("d", read) == struct.pack("d", number)


class Named(Shape):
    name: Text
    port: Port


@pytest.mark.parametrize(
    ("payload", "why"),
    [
        (b"", "Invalid JSON"),
        (b"\xff", "Invalid JSON"),
        (b"[" * 100_000, "Invalid JSON: recursion limit exceeded"),
        (b'{"name": "a", "port": "1"}', "port: Input should be a valid integer"),
        (b'{"name": "a", "port": true}', "port: Input should be a valid integer"),
        (b'{"name": "a", "port": 65536}', "port: .* less than or equal to 65535"),
        (b'{"name": "a", "port": ' + b"9" * 10_000 + b"}", ".*"),
        (b'{"name": "a"}', "port: Field required"),
        (b'{"name": "a", "port": 1, "\\u001b[2J": 1}', r"\\x1b\[2J: Extra inputs"),
        (json.dumps({"name": "a" * 1001, "port": 1}).encode(), "name: .* at most 1000"),
        (json.dumps(dict.fromkeys(map(str, range(2000)))).encode(), "2002 errors"),
    ],
)
def test_another_shape_names_the_rank(payload: bytes, why: str) -> None:
    expected = f"rank 3 sent {len(payload)} bytes for its name that do not belong there .*{why}"
    with pytest.raises(TransferError, match=expected) as raised:
        Schema[Named](Named).parse(payload, "its name", 3)
    assert str(raised.value).isprintable()
    assert len(str(raised.value)) < 1000


def test_text_cannot_control_the_terminal() -> None:
    payload = b'{"name": "\\u001b[2J", "port": 0}'
    assert Schema[Named](Named).parse(payload, "its name", 3).name == r"\x1b[2J"


@given(st.binary(max_size=60))
def test_any_input_is_parsed_or_refused(payload: bytes) -> None:
    try:
        said = Schema[Named](Named).parse(payload, "its name", 3).name
    except TransferError as error:
        said = str(error)
    assert said.isprintable()
