"""`Exponents`: E3M0, a sign and three bits of exponent a value, for what replicas exchange
(Streaming DiLoCo, Douillard et al. 2025).

    [ scale 0 | scale 1 | ... | two values a byte | ... ]       x ~ sign * scale * 2^(code - 7)
      bf16      bf16                                            or 0, which is code 0

A block's scale is its largest value. Powers of two are far apart, but near zero they are dense, as
the values of a gradient are.
"""

import torch
from torch import Tensor

from dpipe.wire.format import EXPONENT_BLOCK, exponents_bytes
from dpipe.wire.packed import PackedCodec, blocks_of

_LAST_CODE = 7
_SIGN = 8
# Half way between two powers of two lies 3/2 of the smaller one: with a factor of 4/3 what is
# nearer to the greater one has its exponent.
_TO_NEAREST = 4 / 3
_NEARER_TO_ZERO = 2.0**-_LAST_CODE  # than to the smallest power
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).smallest_normal * 2.0**_LAST_CODE


class Exponents(PackedCodec):
    """A block with an inf or a nan in it decodes to nan throughout, one of values below 1.5e-36 to
    zeros.
    """

    def num_bytes(self, num_values: int) -> int:
        return exponents_bytes(num_values)

    def pack(self, flat: Tensor) -> Tensor:
        blocks = blocks_of(flat.float(), EXPONENT_BLOCK)
        scales = _scales(blocks)
        codes = _codes(blocks, scales.float())
        low, high = codes.view(2, -1)
        packed = low | high << 4
        return torch.cat([scales.view(torch.uint8), packed])

    def unpack(self, wire: Tensor, num_values: int) -> Tensor:
        num_blocks = -(-num_values // EXPONENT_BLOCK)
        first_code = 2 * num_blocks
        scales = wire[:first_code].view(torch.bfloat16).float()
        packed = wire[first_code:]
        codes = torch.cat([packed & 15, packed >> 4])
        relative = _table(wire.device)[codes.int()]
        blocks = relative.view(-1, EXPONENT_BLOCK)
        return blocks.mul_(scales[:, None])


def _scales(blocks: Tensor) -> Tensor:
    """One a block; 0 where that is too small, nan where it is not finite."""
    largest = blocks.abs().amax(dim=1)
    scales = torch.where(largest < _SMALLEST_SCALE, 0.0, largest).bfloat16()
    return torch.where(scales.isfinite(), scales, torch.nan)


def _codes(blocks: Tensor, scales: Tensor) -> Tensor:
    """[N] of uint8, from 0 to 15."""
    relative = blocks / scales[:, None]
    # What a scale of 0 or nan makes here says nothing at the other end.
    relative.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    sizes = relative.abs()
    _, exponents = torch.frexp(sizes * _TO_NEAREST)
    codes = exponents + (_LAST_CODE - 1)  # frexp's exponent of 1 is 1
    codes.clamp_(1, _LAST_CODE)
    codes.masked_fill_(sizes < _NEARER_TO_ZERO, 0)
    signed = torch.where(relative < 0, codes + _SIGN, codes)
    return signed.to(torch.uint8).view(-1)


def _table(device: torch.device) -> Tensor:
    """The value of each code, of a scale of 1."""
    powers = [2.0 ** (code - _LAST_CODE) for code in range(1, _LAST_CODE + 1)]
    positive = [0.0, *powers]
    negative = [-value for value in positive]
    return torch.tensor([*positive, *negative], device=device)
