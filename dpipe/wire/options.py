"""What goes around a codec: the options of `format.OPTIONS`, each a codec that holds another.

"int4+hadamard+outlier+feedback"      Feedback(Outlier(Hadamard(IntBlocks(4))))
"""

from functools import cache

import torch
from torch import Tensor

from dpipe.wire.codec import Codec
from dpipe.wire.format import INT_BLOCK, padded_to_block
from dpipe.wire.packed import in_cache
from dpipe.wire.spec import TensorSpec

_SIGN_AND_PLACE_OFF = 0x7FFFFFFF - (INT_BLOCK - 1)


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
        blocks = _blocks_of(tensor)
        rotated = torch.empty_like(blocks)
        matrix = hadamard_matrix(blocks.device)
        for part in in_cache(blocks):
            torch.mm(blocks[part], matrix, out=rotated[part])
        return self._inner.encode(rotated)

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        rotated = self._inner.decode(wire, _spec_of_blocks(like))
        # The matrix is its own inverse.
        matrix = hadamard_matrix(rotated.device)
        for part in in_cache(rotated):
            rotated[part] = rotated[part] @ matrix
        return rotated.view(-1)[: like.num_values].view(like.shape).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        return self._inner.wire_spec(_spec_of_blocks(like))


class Outlier:
    """Of each block of 64 values the largest is sent beside the others, in bf16 (Dettmers et al.
    2022 keep the columns of a matrix that have such values apart).

        [ the others, in the inner format | value | value | ... | place | place | ... ]
                                            bf16                  a byte

    Published language models have single values that are thousands of times as large as the others,
    in the first token of a sequence most of all ("massive activations", Sun et al. 2024). Apart
    from them a block has the range of its other values, among which a neighbour's stands for the
    largest. The largest has an error of at most |x| / 256.

    It is the largest but for the last six bits of the mantissa, which hold its place meanwhile.
    """

    def __init__(self, inner: Codec) -> None:
        self._inner = inner

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        others = _blocks_of(tensor).clone()
        values = []
        places = []
        for part in in_cache(others):
            blocks = others[part]
            at = _places_of_largest(blocks)
            largest = blocks.gather(1, at).bfloat16()
            values.append(largest.view(torch.uint8).view(-1))
            places.append(at.to(torch.uint8).view(-1))

            neighbours = blocks.gather(1, at ^ 1)
            blocks.scatter_(1, at, neighbours)

        wire = self._inner.encode(others)
        return torch.cat([wire, *values, *places])

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        spec = _spec_of_blocks(like)
        num_blocks = spec.shape[0]
        num_inner = wire.numel() - 3 * num_blocks
        inner, values, places = wire.split([num_inner, 2 * num_blocks, num_blocks])

        # A copy is aligned as a view of two bytes must be.
        aligned = values.clone()
        largest = aligned.view(torch.bfloat16).float()
        at = places.long() % INT_BLOCK

        blocks = self._inner.decode(inner, spec)
        blocks.scatter_(1, at.view(-1, 1), largest.view(-1, 1))
        return blocks.view(-1)[: like.num_values].view(like.shape).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        spec = _spec_of_blocks(like)
        num_inner = self._inner.wire_spec(spec).num_bytes
        num_blocks = spec.shape[0]
        return TensorSpec((num_inner + 3 * num_blocks,), torch.uint8)


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


def _blocks_of(tensor: Tensor) -> Tensor:
    """[blocks, INT_BLOCK] of fp32; may share memory with `tensor`."""
    flat = tensor.detach().reshape(-1).float()
    missing = padded_to_block(flat.numel()) - flat.numel()
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    return flat.view(-1, INT_BLOCK)


def _spec_of_blocks(like: TensorSpec) -> TensorSpec:
    num_blocks = padded_to_block(like.num_values) // INT_BLOCK
    return TensorSpec((num_blocks, INT_BLOCK), torch.float32)


def _places_of_largest(blocks: Tensor) -> Tensor:
    """[blocks, 1]; many times as fast as `argmax`. What is not finite counts as the largest."""
    places = torch.arange(INT_BLOCK, dtype=torch.int32, device=blocks.device)
    # As integers, positive floating-point numbers are in the same order.
    sizes = blocks.view(torch.int32).bitwise_and(_SIGN_AND_PLACE_OFF)
    largest = sizes.bitwise_or_(places).amax(dim=1, keepdim=True)
    return largest.bitwise_and_(INT_BLOCK - 1).long()
