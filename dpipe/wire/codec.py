"""Codecs: what a floating-point tensor looks like on the wire. The sizes are those of
`wire/format.py`.

    name   on the wire                                            |x - decode(encode(x))| at most
    none   as it is                                               0
    bf16   rounded to bfloat16                                    |x| / 256
    fp16   rounded to float16; inf beyond 65504                   |x| / 2048, or 2^-25 where |x| < 2^-14
    int8   a fp32 scale for each block of INT8_BLOCK values,      max|block| / 254
           then the values as int8, in one uint8 tensor

The bounds leave out the rounding of the tensor's own dtype. Tensors of other dtypes (token ids,
masks) always cross as they are. A codec hides no overflow: what is inf or nan before it is not
finite after it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpipe.wire.format import INT8_BLOCK, wire_bytes
from dpipe.wire.spec import TensorSpec

_INT8_MAX = 127
_SMALLEST_SCALE = torch.finfo(
    torch.float32
).smallest_normal  # a smaller scale has too few bits to keep the bound


class Codec(Protocol):
    def encode(self, tensor: Tensor) -> Tensor:
        """The contiguous tensor to put on the wire, on the same device; `tensor` itself where
        nothing changes.
        """

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        """The tensor of shape and dtype `like` that `wire` stands for."""

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        """What `encode` makes of a tensor such as `like`: the spec that a receive must expect."""


class _Same:
    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        return wire

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        return like


@dataclass(frozen=True)
class _Cast:
    dtype: torch.dtype

    def encode(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.wire_spec(TensorSpec.of(tensor)).dtype).contiguous()

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        return wire.to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        return TensorSpec(like.shape, self.dtype) if like.dtype.is_floating_point else like


class _Int8:
    """Symmetric quantization by block of the flattened tensor.

        [ scale 0 | scale 1 | ... | q q q ... q (block 0) | q q ... (block 1) | ... ]      x ~ scale * q
          4 bytes   4 bytes          1 byte each; the last block may be short

    A block that holds an inf or a nan becomes nan as a whole; one below 1e-36 throughout becomes
    zeros.
    """

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        flat = tensor.detach().reshape(-1)
        blocks = pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK).float()
        scales = _scales(blocks)
        quantized = (
            (blocks / scales[:, None])
            .round_()
            .nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            .to(torch.int8)
        )
        return torch.cat(
            [scales.view(torch.uint8), quantized.view(torch.uint8).view(-1)[: flat.numel()]]
        )

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        num_blocks = _num_blocks(like)
        scales = wire[: 4 * num_blocks].view(torch.float32)
        values = wire[4 * num_blocks :].view(torch.int8)
        padded = pad(values, (0, -values.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)
        return (padded * scales[:, None]).view(-1)[: values.numel()].view(like.shape).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        return TensorSpec((wire_bytes("int8", like.num_bytes // like.dtype.itemsize),), torch.uint8)


def _scales(blocks: Tensor) -> Tensor:
    """One scale a block: max|x| / 127; 0 where that has too few bits to keep the bound, nan where it is not finite."""
    scales = blocks.abs().amax(dim=1) / _INT8_MAX
    scales = torch.where(scales < _SMALLEST_SCALE, 0.0, scales)
    return torch.where(scales.isfinite(), scales, torch.nan)


def _num_blocks(like: TensorSpec) -> int:
    return -(-like.num_bytes // like.dtype.itemsize // INT8_BLOCK)


def codec(name: str) -> Codec:
    """The codec called `name`; raises `ValueError` on an unknown one."""
    match name:
        case "none":
            return _Same()
        case "bf16":
            return _Cast(torch.bfloat16)
        case "fp16":
            return _Cast(torch.float16)
        case "int8":
            return _Int8()
    raise ValueError(f"unknown wire format {name!r}; one of none, bf16, fp16, int8")
