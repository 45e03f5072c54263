"""Codecs: wire formats on tensors. `format.py` declares the formats and their sizes.

    name   on the wire                                         |x - decode(encode(x))| at most
    none   as it is                                            0
    bf16   rounded to bfloat16                                 |x| / 256
    fp16   rounded to float16; inf beyond 65504                |x| / 2048; 2^-25 if |x| < 2^-14
    int8   an fp32 scale for each block of INT8_BLOCK values,  max|block| / 254
           then the values as int8, in one uint8 tensor

The bounds do not include the rounding to the tensor's own dtype. Tensors that are not
floating-point (token ids, masks) are sent unchanged. A codec never hides an overflow: values that
are inf or nan before encoding are not finite after decoding.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpipe.choices import function_at
from dpipe.wire.format import FORMATS, INT8_BLOCK, int8_bytes
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
        return tensor.detach().to(self.wire_spec(TensorSpec.of(tensor)).dtype).contiguous()

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        return wire.to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        return TensorSpec(like.shape, self.dtype)


class Int8:
    """Symmetric quantization by block of the flattened tensor.

        [ scale 0 | scale 1 | ... | q q q ... q (block 0) | q q ... (block 1) | ... ]
          4 bytes   4 bytes         1 byte each, x ~ scale * q; the last block may be short

    A block with an inf or a nan in it decodes to nan throughout, a block of values below 1e-36 to
    zeros.
    """

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        flat = tensor.detach().reshape(-1)
        blocks = pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK).float()
        scales = _scales(blocks)
        # A scale of 0 or nan gives nan or inf here; the scale alone says so at the other end.
        rounded = (blocks / scales[:, None]).round_().nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        quantized = rounded.to(torch.int8).view(torch.uint8).view(-1)
        return torch.cat([scales.view(torch.uint8), quantized[: flat.numel()]])

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        num_blocks = _num_blocks(like)
        # In front, where they are aligned: a view as fp32 must begin at a multiple of 4 bytes.
        scales = wire[: 4 * num_blocks].view(torch.float32)
        values = wire[4 * num_blocks :].view(torch.int8)
        padded = pad(values, (0, -values.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)
        flat = (padded * scales[:, None]).view(-1)[: values.numel()]
        return flat.view(like.shape).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        return TensorSpec((int8_bytes(like.num_bytes // like.dtype.itemsize),), torch.uint8)


def _scales(blocks: Tensor) -> Tensor:
    """One scale a block: max|x| / 127; 0 where that is subnormal, nan where it is not finite."""
    # 127, not 128: without -128 the range is symmetric, and rounding has no bias.
    scales = blocks.abs().amax(dim=1) / _INT8_MAX
    scales = torch.where(scales < _SMALLEST_SCALE, 0.0, scales)
    return torch.where(scales.isfinite(), scales, torch.nan)


def _num_blocks(like: TensorSpec) -> int:
    return -(-like.num_bytes // like.dtype.itemsize // INT8_BLOCK)


def bf16() -> Codec:
    return Cast(torch.bfloat16)


def fp16() -> Codec:
    return Cast(torch.float16)


def codec(name: str) -> Codec:
    """The codec of the wire format `name`; raises `ConfigError` on an unknown one."""
    maker = function_at(FORMATS.named(name).codec)
    wire_codec: Codec = maker()
    return wire_codec
