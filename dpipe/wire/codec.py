"""Codecs: wire formats on tensors. `format.py` declares the formats and their sizes.

    name   on the wire                                         |x - decode(encode(x))| at most
    none   as it is                                            0
    bf16   rounded to bfloat16                                 |x| / 256
    fp16   rounded to float16; inf beyond 65504                |x| / 2048; 2^-25 if |x| < 2^-14
    int8   an fp32 scale for each block of INT8_BLOCK values,  max|block| / 254
           then the values as int8, in one uint8 tensor
    int6   zero points and scales of blocks of INT_BLOCK       range / 126
    int4   values, then codes of so many bits                  range / 30
    int3   (`int_blocks.py`)                                   range / 14
    int2                                                       range / 6
    top16  the 16 largest of 256 values, bf16 (`top_k.py`)     |x| / 256, or |x|: it is 0
    rank32 two thin matrices, bf16 (`low_rank.py`)             in norm 1.01 |x|
    rank8
    e3m0   a power of two of its block's largest value         |x| / 2.9, or max|block| / 128
           (`exponents.py`)
    top64  the 64 largest of 4,096 values (`sparse.py`)        in norm 1.01 |x|

The range of a block is its largest value less its smallest, and up to 1 % of the larger of both
more, as zero points and scales are bf16. With options behind a name, see `options.py`.

The bounds do not include the rounding to the tensor's own dtype. Tensors that are not
floating-point (token ids, masks) are sent unchanged. A codec never hides an overflow: values that
are inf or nan before encoding are not finite after decoding.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from dpipe.choices import function_at
from dpipe.wire.format import FORMATS, INT8_BLOCK, OPTIONS, int8_bytes
from dpipe.wire.packed import PackedCodec, blocks_of, in_cache
from dpipe.wire.spec import TensorSpec

_INT8_MAX = 127
# A smaller scale is a subnormal number, which has too few bits to keep the bound.
_SMALLEST_SCALE = torch.finfo(torch.float32).smallest_normal


class Codec(Protocol):
    def encode(self, tensor: Tensor) -> Tensor:
        """The contiguous tensor to send, on the same device; may share memory with `tensor`."""

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        """The tensor of shape and dtype `like` that `wire` encodes."""

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        """The spec of what `encode` returns for a tensor of spec `like`: what a receive expects."""


class AsIs:
    """Sends the tensor's own bytes."""

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        return wire

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        return like


@dataclass(frozen=True)
class Cast:
    """Rounds each value to `dtype`."""

    dtype: torch.dtype

    def encode(self, tensor: Tensor) -> Tensor:
        spec = self.wire_spec(TensorSpec.of(tensor))
        rounded = tensor.detach().to(spec.dtype)
        return rounded.contiguous()

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        return wire.to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        return TensorSpec(like.shape, self.dtype)


class Int8(PackedCodec):
    """Symmetric quantization by block of the flattened tensor.

        [ scale 0 | scale 1 | ... | q q q ... q (block 0) | q q ... (block 1) | ... ]
          4 bytes   4 bytes         1 byte each, x ~ scale * q; the last block may be short

    A block with an inf or a nan in it decodes to nan throughout, a block of values below 1.5e-36 to
    zeros.
    """

    def num_bytes(self, num_values: int) -> int:
        return int8_bytes(num_values)

    def pack(self, flat: Tensor) -> Tensor:
        blocks = blocks_of(flat, INT8_BLOCK)
        scales = _scales(blocks)

        quantized = torch.empty(blocks.shape, dtype=torch.int8, device=flat.device)
        for part in in_cache(blocks):
            # A scale of 0 or nan gives nan or inf here; the scale alone says so at the other end.
            scaled = blocks[part].float() / scales[part, None]
            rounded = scaled.round_()
            quantized[part] = rounded.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)

        codes = quantized.view(-1)[: flat.numel()]
        return torch.cat([scales.view(torch.uint8), codes.view(torch.uint8)])

    def unpack(self, wire: Tensor, num_values: int) -> Tensor:
        num_blocks = -(-num_values // INT8_BLOCK)
        # In front, where they are aligned: a view as fp32 must begin at a multiple of 4 bytes.
        first_code = 4 * num_blocks
        scales = wire[:first_code].view(torch.float32)
        codes = wire[first_code:].view(torch.int8)
        return blocks_of(codes, INT8_BLOCK) * scales[:, None]


def _scales(blocks: Tensor) -> Tensor:
    """One scale a block: max|x| / 127; 0 where that is subnormal, nan where it is not finite."""
    # 127, not 128: without -128 the range is symmetric, and rounding has no bias.
    largest = torch.maximum(blocks.amax(dim=1), -blocks.amin(dim=1))
    scales = largest.float() / _INT8_MAX
    scales = torch.where(scales < _SMALLEST_SCALE, 0.0, scales)
    return torch.where(scales.isfinite(), scales, torch.nan)


def bf16() -> Codec:
    return Cast(torch.bfloat16)


def fp16() -> Codec:
    return Cast(torch.float16)


def codec(name: str, *, remembers: bool = True) -> Codec:
    """The codec of the wire format `name`; raises `ConfigError` on an unknown one. Without
    `remembers` it is the same for every tensor, whatever it has sent before.
    """
    form = FORMATS.named(name)
    wire_codec: Codec = function_at(form.codec)()
    _, *options = name.split("+")
    for option in OPTIONS.values():
        # What goes by samples treats those that it does not know alike.
        is_used = remembers or option.by_sample or not option.remembers
        if is_used and option.name in options:
            wire_codec = function_at(option.codec)(wire_codec)
    return wire_codec
