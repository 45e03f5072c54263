"""A wire format in one file: float8, one byte per value. dpipe itself does not know it."""

import torch
from torch import Tensor

from dpipe.wire.format import FORMATS, Format
from dpipe.wire.spec import TensorSpec


class Float8:
    """Rounds each value to float8_e5m2 (2 bits of mantissa); its bytes are sent as uint8."""

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        return tensor.detach().contiguous().to(torch.float8_e5m2).view(torch.uint8)

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        return wire.view(torch.float8_e5m2).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        return TensorSpec(like.shape, torch.uint8)


def num_bytes(num_values: int, value_bytes: int) -> int:
    return num_values


def declare() -> None:
    FORMATS.add(Format("float8", "toy_format:Float8", num_bytes, between_replicas=False))
