import pytest

from dpipe.errors import ConfigError
from dpipe.wire.format import wire_bytes


@pytest.mark.parametrize(
    ("name", "num_values", "value_bytes", "num_bytes"),
    [
        ("none", 1000, 4, 4000),
        ("none", 1000, 2, 2000),
        ("bf16", 1000, 4, 2000),
        ("fp16", 1000, 4, 2000),
        ("int8", 1000, 4, 1000 + 4 * 4),
        ("int8", 256, 4, 256 + 4),
        ("int8", 0, 4, 0),
    ],
)
def test_wire_bytes_counts_values_and_scales(name, num_values, value_bytes, num_bytes) -> None:
    assert wire_bytes(name, num_values, value_bytes) == num_bytes


def test_wire_bytes_refuses_an_unknown_format() -> None:
    with pytest.raises(ConfigError, match="wire format must be one of .*, got 'zip'"):
        wire_bytes("zip", 1)
