"""`IntBlocks`: 6, 4, 3 or 2 bits a value, with a scale and a zero point for each block of 64.

    [ zero 0 | zero 1 | ... | scale 0 | scale 1 | ... | plane | plane ]     x ~ zero + scale * code
      bf16     bf16           bf16      bf16

The codes, 0 to 2^bits - 1, are packed by planes of 4, 2 or 1 bits: 6 bits are a plane of 4 and one
of 2. A plane of w bits holds 8 / w values a byte, from as many equal parts of the tensor:

    codes    a a a a b b b b      two parts of a tensor of 8 values
    bytes    a+16b  a+16b  a+16b  a+16b

On one core of a CPU it takes torch's own operators to pack 2 GB of fp32 a second and to unpack as
many, because what they read is in the cache (`dpipe bench formats` measures it).
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpipe.wire.format import INT_BLOCK, int_blocks_bytes, padded_to_block
from dpipe.wire.packed import PackedCodec, in_cache

_PLANES = {6: (4, 2), 4: (4,), 3: (2, 1), 2: (2,)}
# Rounding to bf16 changes a number by less than this share: ranges are widened by as much, so that
# every value of a block lies between its first code and its last.
_BF16_STEP = 2.0**-8
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).smallest_normal


class IntBlocks(PackedCodec):
    """Blocks of the flattened tensor; the last one is filled up with its last value.

    A block with an inf or a nan in it, or with values beyond 1e38, decodes to nan throughout; one
    whose values differ by less than 1e-36 to one value.
    """

    def __init__(self, bits: int) -> None:
        self._bits = bits
        self._last_code = 2**bits - 1

    def num_bytes(self, num_values: int) -> int:
        return int_blocks_bytes(self._bits, num_values)

    def pack(self, flat: Tensor) -> Tensor:
        blocks = _filled_up(flat).view(-1, INT_BLOCK)
        zeros, scales = self._range_of(blocks)
        codes = self._codes(blocks, zeros.float(), scales.float())
        planes = _pack(codes, self._bits)
        return torch.cat([zeros.view(torch.uint8), scales.view(torch.uint8), *planes])

    def unpack(self, wire: Tensor, num_values: int) -> Tensor:
        num_padded = padded_to_block(num_values)
        num_blocks = num_padded // INT_BLOCK
        first_plane = 4 * num_blocks
        ranges = wire[:first_plane].view(torch.bfloat16).float()
        zeros = ranges[:num_blocks, None]
        scales = ranges[num_blocks:, None]
        packed = wire[first_plane:]
        codes = _unpack(packed, num_padded, self._bits).view(-1, INT_BLOCK)
        blocks = torch.empty(codes.shape, dtype=torch.float32, device=wire.device)
        for part in in_cache(codes):
            values = blocks[part]
            values.copy_(codes[part])
            values.mul_(scales[part]).add_(zeros[part])
        return blocks

    def _range_of(self, blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Zero points and scales, in bf16, one a block."""
        lowest = blocks.amin(dim=1).float()
        highest = blocks.amax(dim=1).float()
        below = lowest - _BF16_STEP * lowest.abs()
        zeros = below.bfloat16()
        value_range = highest - zeros.float()
        widened = value_range * (1 + _BF16_STEP)
        scales = (widened / self._last_code).bfloat16()
        too_small = scales < _SMALLEST_SCALE
        scales = torch.where(too_small, 0.0, scales)
        scales = torch.where(scales.isfinite(), scales, torch.nan)
        return zeros, scales

    def _codes(self, blocks: Tensor, zeros: Tensor, scales: Tensor) -> Tensor:
        # Where the scale is 0 or nan the code says nothing; it must only not be inf or nan.
        inverse = torch.where(scales > 0, 1 / scales, 0.0)
        # To the nearest code: what is not negative is rounded down when it is made an integer.
        offset = 0.5 - zeros * inverse
        offset.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
        by_block = inverse[:, None]
        offset_by_block = offset[:, None]
        codes = torch.empty(blocks.shape, dtype=torch.int8, device=blocks.device)
        for part in in_cache(blocks):
            # Signed, because torch makes them of fp32 seven times as fast as unsigned ones.
            scaled = blocks[part] * by_block[part]
            codes[part] = scaled.add_(offset_by_block[part])
        flat = codes.view(torch.uint8).view(-1)
        # A block that is not finite must not reach into what is packed beside it.
        return flat.bitwise_and_(self._last_code)


def _filled_up(flat: Tensor) -> Tensor:
    """To whole blocks."""
    size = flat.numel()
    missing = padded_to_block(size) - size
    if not missing:
        return flat
    last = flat[-1:]
    return torch.cat([flat, last.expand(missing)])


def _pack(codes: Tensor, bits: int) -> Iterator[Tensor]:
    """The planes, lowest bits first; `codes` are as many as whole blocks have."""
    shift = 0
    for width in _PLANES[bits]:
        of_plane = codes
        if width < bits:
            shifted = codes >> shift
            of_plane = shifted.bitwise_and_(2**width - 1)
        parts = of_plane.view(8 // width, -1)
        packed = parts[-1].clone()
        for part in reversed(parts[:-1]):
            packed.bitwise_left_shift_(width)
            packed.bitwise_or_(part)
        yield packed
        shift += width


def _unpack(planes: Tensor, num_codes: int, bits: int) -> Tensor:
    codes = torch.zeros(num_codes, dtype=torch.uint8, device=planes.device)
    shift = 0
    start = 0
    for width in _PLANES[bits]:
        num_bytes = num_codes * width // 8
        end = start + num_bytes
        packed = planes[start:end]
        parts = codes.view(8 // width, -1)
        for number, part in enumerate(parts):
            shifted = packed >> number * width
            own = shifted.bitwise_and_(2**width - 1)
            own.bitwise_left_shift_(shift)
            part.bitwise_or_(own)
        shift += width
        start = end
    return codes


def int6() -> IntBlocks:
    return IntBlocks(6)


def int4() -> IntBlocks:
    return IntBlocks(4)


def int3() -> IntBlocks:
    return IntBlocks(3)


def int2() -> IntBlocks:
    return IntBlocks(2)
