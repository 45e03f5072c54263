"""`FORMATS`: what floating-point tensors look like on a link. Declared here once, without torch.

Configuration, prediction, error feedback and the memory model read a format's properties; none of
them asks for one by name. The bounds of each format's error are in `codec.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dpipe.choices import Choices

INT8_BLOCK = 256  # values that share one fp32 scale


@dataclass(frozen=True)
class Format:
    name: str  # in configuration files
    codec: str  # "package.module:function" that makes its `codec.Codec`
    num_bytes: Callable[[int, int], int]  # (number of values, bytes of each) -> bytes on the wire
    lossy: bool = True  # what is decoded may differ from what was encoded
    # Each value is rounded by itself: copies of a tensor stay equal wherever they are encoded, and
    # torch.distributed can add tensors as they are on the wire.
    elementwise: bool = True
    error_feedback: bool = False  # between replicas the rounding error is carried to the next step
    between_stages: bool = True  # offered as pipeline.wire
    between_replicas: bool = True  # offered as data_parallel.wire


def _as_it_is(num_values: int, value_bytes: int) -> int:
    return num_values * value_bytes


def _two_bytes(num_values: int, value_bytes: int) -> int:
    return num_values * 2


def int8_bytes(num_values: int, value_bytes: int = 4) -> int:
    """One byte a value, and a fp32 scale a block; the last block may be short."""
    num_blocks = -(-num_values // INT8_BLOCK)
    return num_values + 4 * num_blocks


FORMATS: Choices[Format] = Choices(
    "wire format",
    Format("none", "dpipe.wire.codec:AsIs", _as_it_is, lossy=False),
    Format("bf16", "dpipe.wire.codec:bf16", _two_bytes),
    # Gradients between replicas would leave its range: inf beyond 65504.
    Format("fp16", "dpipe.wire.codec:fp16", _two_bytes, between_replicas=False),
    Format(
        "int8",
        "dpipe.wire.codec:Int8",
        int8_bytes,
        elementwise=False,
        error_feedback=True,
    ),
)


def wire_bytes(name: str, num_values: int, value_bytes: int = 4) -> int:
    """Bytes that `num_values` floating-point values of `value_bytes` each take on the wire in
    format `name`.
    """
    return FORMATS.named(name).num_bytes(num_values, value_bytes)
