"""`FORMATS`: what floating-point tensors look like on a link. Declared here once, without torch.

Configuration, prediction, error feedback and the memory model read a format's properties; none of
them asks for one by name. The bounds of each format's error are in `codec.py`.

Between stages each link has a format of its own in each direction (`HopFormats`):

    stage 0 --forward[0]--> stage 1 --forward[1]--> stage 2
            <-backward[0]--         <-backward[1]--
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, Self

from dpipe.choices import Choices
from dpipe.errors import ConfigError

INT8_BLOCK = 256  # values that share one fp32 scale
INT_BLOCK = 64  # values of fewer bits that share a scale and a zero point, both bf16

TOP_BLOCK = 256  # values of which the KEPT_VALUES largest are sent
KEPT_VALUES = 16

SPARSE_BLOCK = 4096  # values of which the SPARSE_KEPT largest are sent, by size in groups
SPARSE_KEPT = 64
SPARSE_GROUPS = 4
_PLACE_BITS = 12
EXPONENT_BLOCK = 128  # values that share a bf16 scale

# (number of values, bytes of each) -> bytes on the wire
NumBytes = Callable[[int, int], int]

_TYPICAL_ROW = 1024  # of a matrix whose shape nobody has said, to compare formats


@dataclass(frozen=True)
class Format:
    name: str  # in configuration files
    codec: str  # "package.module:function" that makes its `codec.Codec`
    num_bytes: NumBytes
    lossy: bool = True  # what is decoded may differ from what was encoded
    # Each value is rounded by itself: copies of a tensor stay equal wherever they are encoded, and
    # torch.distributed can add tensors as they are on the wire.
    elementwise: bool = True
    error_feedback: bool = False  # between replicas the rounding error is carried to the next step
    between_stages: bool = True  # offered as pipeline.wire
    between_replicas: bool = True  # offered as data_parallel.wire
    # (rows, columns) -> bytes, of a format that depends on the shape: then `num_bytes` assumes one
    matrix_bytes: Callable[[int, int], int] | None = None
    block: int = 0  # values that share a scale; 0: none do, or no option looks at them
    remembers: bool = False  # what is sent depends on what was sent before, which no checkpoint has
    by_sample: bool = False  # and that is what was sent of the same sample


def _as_it_is(num_values: int, value_bytes: int) -> int:
    return num_values * value_bytes


def _two_bytes(num_values: int, value_bytes: int) -> int:
    return num_values * 2


def int8_bytes(num_values: int, value_bytes: int = 4) -> int:
    """One byte a value, and a fp32 scale a block; the last block may be short."""
    num_blocks = -(-num_values // INT8_BLOCK)
    return num_values + 4 * num_blocks


def padded_to_block(num_values: int) -> int:
    return -(-num_values // INT_BLOCK) * INT_BLOCK


def int_blocks_bytes(bits: int, num_values: int, value_bytes: int = 4) -> int:
    """Whole blocks of `bits` a value, with 4 bytes of range each: 64 values of 4 bits take 36."""
    num_padded = padded_to_block(num_values)
    return num_padded * bits // 8 + 4 * num_padded // INT_BLOCK


def _int_blocks(bits: int) -> Format:
    return Format(
        f"int{bits}",
        f"dpipe.wire.int_blocks:int{bits}",
        partial(int_blocks_bytes, bits),
        elementwise=False,
        error_feedback=True,
        block=INT_BLOCK,
    )


def exponents_bytes(num_values: int, value_bytes: int = 4) -> int:
    """Half a byte a value, and two bytes a block, in whole blocks."""
    num_blocks = -(-num_values // EXPONENT_BLOCK)
    return num_blocks * (EXPONENT_BLOCK // 2 + 2)


def sparse_bytes(num_values: int, value_bytes: int = 4) -> int:
    """Of each value that is sent its sign and its place; and a size for each group, in bf16."""
    num_blocks = -(-num_values // SPARSE_BLOCK)
    value_bits = SPARSE_KEPT * (1 + _PLACE_BITS)
    return num_blocks * (value_bits // 8 + 2 * SPARSE_GROUPS)


def top_k_bytes(num_values: int, value_bytes: int = 4) -> int:
    """Of each value that is sent two bytes, and one for its place."""
    num_blocks = -(-num_values // TOP_BLOCK)
    return num_blocks * KEPT_VALUES * 3


def rank_of(rank: int, num_rows: int, num_columns: int) -> int:
    """A matrix has no more directions than rows or columns."""
    return min(rank, num_rows, num_columns)


def low_rank_bytes(rank: int, num_rows: int, num_columns: int) -> int:
    return 2 * (num_rows + num_columns) * rank_of(rank, num_rows, num_columns)


def _low_rank(rank: int) -> Format:
    def typical_bytes(num_values: int, value_bytes: int) -> int:
        return low_rank_bytes(rank, -(-num_values // _TYPICAL_ROW), _TYPICAL_ROW)

    return Format(
        f"rank{rank}",
        f"dpipe.wire.low_rank:rank{rank}",
        typical_bytes,
        elementwise=False,
        between_replicas=False,
        matrix_bytes=partial(low_rank_bytes, rank),
        remembers=True,
    )


def _as_many(num_bytes: NumBytes, num_values: int, value_bytes: int) -> int:
    return num_bytes(num_values, value_bytes)


def _with_outliers(num_bytes: NumBytes, num_values: int, value_bytes: int) -> int:
    """Of each block of INT_BLOCK values one in bf16, and a byte for its place."""
    num_padded = padded_to_block(num_values)
    return num_bytes(num_padded, value_bytes) + 3 * num_padded // INT_BLOCK


@dataclass(frozen=True)
class FormatOption:
    """What can be added to the name of a format between stages: "int4+hadamard"."""

    name: str
    codec: str  # "package.module:Class" that wraps a `codec.Codec`
    goes_with: Callable[[Format], bool]
    num_bytes: Callable[[NumBytes, int, int], int] = _as_many  # given the format's own
    remembers: bool = False  # what it sent before: not of passes that only evaluate
    by_sample: bool = False  # what it sent of the same sample before; goes with no other option


# In this order they are put around a codec, in whatever order they are named.
OPTIONS: Choices[FormatOption] = Choices(
    "option of a wire format",
    FormatOption("hadamard", "dpipe.wire.options:Hadamard", lambda form: form.block == INT_BLOCK),
    FormatOption(
        "outlier",
        "dpipe.wire.options:Outlier",
        lambda form: form.block > 0,
        num_bytes=_with_outliers,
    ),
    FormatOption(
        "feedback",
        "dpipe.wire.options:Feedback",
        lambda form: form.lossy,
        remembers=True,
    ),
    FormatOption(
        "delta",
        "dpipe.wire.deltas:Deltas",
        lambda form: form.between_stages and not form.elementwise and not form.remembers,
        remembers=True,
        by_sample=True,
    ),
)


class Formats(Choices[Format]):
    """Formats by name; with options behind it, "int4+hadamard", a name is known as well."""

    def named(self, name: str) -> Format:
        """Raises `ConfigError` naming what is known, and for an option that does not go with it."""
        base, *options = name.split("+")
        form = super().named(base)
        for option in options:
            if not OPTIONS.named(option).goes_with(form):
                raise ConfigError(
                    f'wire format {name!r:.200}: the option "{option}" does not go with "{base}"'
                )
        if len(set(options)) < len(options):
            raise ConfigError(f"wire format {name!r:.200} names an option twice")
        by_sample = False
        for option in options:
            by_sample |= OPTIONS.named(option).by_sample
        if by_sample and len(options) > 1:
            raise ConfigError(
                f"wire format {name!r:.200}: what a sample has changed by is rounded by the format "
                'alone; leave all options but "delta" out'
            )
        num_bytes = form.num_bytes
        for option in options:
            num_bytes = partial(OPTIONS.named(option).num_bytes, num_bytes)
        return replace(
            form,
            name=name,
            num_bytes=num_bytes,
            between_replicas=form.between_replicas and not options,
            remembers=form.remembers or any(OPTIONS.named(each).remembers for each in options),
            by_sample=by_sample,
        )

    def __getitem__(self, name: str) -> Format:
        try:
            return self.named(name)
        except ConfigError:
            raise KeyError(name) from None


FORMATS = Formats(
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
        block=INT8_BLOCK,
    ),
    _int_blocks(6),
    _int_blocks(4),
    _int_blocks(3),
    _int_blocks(2),
    Format(
        "top16",
        "dpipe.wire.top_k:TopK",
        top_k_bytes,
        elementwise=False,
        between_replicas=False,
    ),
    _low_rank(32),
    _low_rank(8),
    Format(
        "e3m0",
        "dpipe.wire.exponents:Exponents",
        exponents_bytes,
        elementwise=False,
        error_feedback=True,
        between_stages=False,
    ),
    Format(
        "top64",
        "dpipe.wire.sparse:Sparse",
        sparse_bytes,
        elementwise=False,
        error_feedback=True,
        between_stages=False,
    ),
)


def wire_bytes(name: str, num_values: int, value_bytes: int = 4) -> int:
    """Bytes that `num_values` floating-point values of `value_bytes` each take on the wire in
    format `name`.
    """
    return FORMATS.named(name).num_bytes(num_values, value_bytes)


class HopFormats(NamedTuple):
    """The names of the formats between stages; hop s is between stages s and s + 1."""

    forward: tuple[str, ...]  # of activations
    backward: tuple[str, ...]  # of their gradients

    @classmethod
    def alike(cls, name: str, num_hops: int) -> Self:
        return cls((name,) * num_hops, (name,) * num_hops)

    @property
    def lossy(self) -> bool:
        return any(form.lossy for form in self._all())

    @property
    def remembers(self) -> bool:
        return any(form.remembers for form in self._all())

    @property
    def by_sample(self) -> bool:
        return any(form.by_sample for form in self._all())

    def _all(self) -> Iterator[Format]:
        # Each once: most of a hundred hops have the same.
        for name in {*self.forward, *self.backward}:
            yield FORMATS.named(name)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the matrix that a tensor is: its last dimension is a row."""
    row = shape[-1] if shape else 1
    return (math.prod(shape) // row if row else 0), row


@dataclass(frozen=True)
class MessageSize:
    """What a layer passes on for one micro-batch, by size."""

    # (shape, bytes of a value) of each floating-point tensor; their gradients are alike
    tensors: tuple[tuple[tuple[int, ...], int], ...] = ()
    other_bytes: int = 0  # of integers, which go forward alone, as they are

    def sliced(self, num_slices: int) -> "MessageSize":
        """Of one of so many slices of its sequences."""
        tensors = []
        for shape, value_bytes in self.tensors:
            tensors.append((sliced_shape(shape, num_slices), value_bytes))
        return MessageSize(tuple(tensors), self.other_bytes // num_slices)

    def activation_bytes(self, name: str) -> int:
        return self.gradient_bytes(name) + self.other_bytes

    def gradient_bytes(self, name: str) -> int:
        matrix_bytes = FORMATS.named(name).matrix_bytes
        total = 0
        for shape, value_bytes in self.tensors:
            num_values = math.prod(shape)
            if matrix_bytes is None:
                total += wire_bytes(name, num_values, value_bytes)
            else:
                total += matrix_bytes(*matrix_shape(shape))
        return total


def sliced_shape(shape: tuple[int, ...], num_slices: int) -> tuple[int, ...]:
    """Of one of so many slices along the sequence: of [B, T, ...] the second dimension is cut, of a
    replayed message, which is a flat row of values, the only one.
    """
    lengths = list(shape)
    lengths[sliced_dimension(len(shape))] //= num_slices
    return tuple(lengths)


def sliced_dimension(num_dimensions: int) -> int:
    """The dimension of a tensor along which its sequences are cut."""
    return min(1, num_dimensions - 1)


def sizes_on_hops(
    messages: Sequence[MessageSize], formats: HopFormats
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Bytes forward and backward over each hop, whose message is given."""
    forward = zip(messages, formats.forward, strict=True)
    backward = zip(messages, formats.backward, strict=True)
    return (
        tuple(message.activation_bytes(name) for message, name in forward),
        tuple(message.gradient_bytes(name) for message, name in backward),
    )
