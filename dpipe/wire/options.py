"""What goes around a codec: the options of `format.OPTIONS`, each a codec that holds another.

"int4+hadamard+feedback"      Feedback(Hadamard(IntBlocks(4)))
"""

from functools import cache

import torch
from torch import Tensor

from dpipe.wire.codec import Codec
from dpipe.wire.format import INT_BLOCK, padded_to_block
from dpipe.wire.spec import TensorSpec


class Hadamard:
    """Rotates each block of 64 values before it is rounded, and back behind the link.

    An outlier is spread over its block, and the block's range shrinks: by up to 8 where one value
    is far larger than all others, while a block without outliers gains nothing. The error keeps its
    length, but not its largest part: of a block it is at most 8 times what the format's bound says
    of the rotated values.
    """

    def __init__(self, inner: Codec) -> None:
        self._inner = inner

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        flat = tensor.detach().reshape(-1).float()
        missing = padded_to_block(flat.numel()) - flat.numel()
        blocks = torch.nn.functional.pad(flat, (0, missing)).view(-1, INT_BLOCK)
        rotated = blocks @ hadamard_matrix(flat.device)
        return self._inner.encode(rotated)

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        rotated = self._inner.decode(wire, _blocks_of(like))
        # The matrix is its own inverse.
        flat = (rotated @ hadamard_matrix(wire.device)).view(-1)
        return flat[: like.num_values].view(like.shape).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        return self._inner.wire_spec(_blocks_of(like))


class Feedback:
    """Error feedback (Seide et al. 2014): what rounding took from a tensor is added to the next one
    that crosses the same link in the same direction, the next micro-batch's.
    """

    def __init__(self, inner: Codec) -> None:
        self._inner = inner
        self._residual: Tensor | None = None  # None before the first tensor

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        total = tensor.detach().float()
        if self._residual is not None:
            total = total + self._residual
        wire = self._inner.encode(total)
        received = self._inner.decode(wire, TensorSpec.of(total))
        # What is not finite is seen at the other end, and shall not stay here for good.
        self._residual = (total - received).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        return wire

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        return self._inner.decode(wire, like)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        return self._inner.wire_spec(like)


@cache
def hadamard_matrix(device: torch.device) -> Tensor:
    """Orthonormal and symmetric, of INT_BLOCK rows (Sylvester 1867)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < INT_BLOCK:
        top = torch.cat([matrix, matrix], dim=1)
        bottom = torch.cat([matrix, -matrix], dim=1)
        matrix = torch.cat([top, bottom])
    orthonormal: Tensor = matrix / INT_BLOCK**0.5
    return orthonormal.to(device)


def _blocks_of(like: TensorSpec) -> TensorSpec:
    """The rotated tensor."""
    num_blocks = padded_to_block(like.num_values) // INT_BLOCK
    return TensorSpec((num_blocks, INT_BLOCK), torch.float32)
