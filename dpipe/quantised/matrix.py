"""A matrix in 8 or 4 bits a value.

    int8   a code of 8 bits a value, a scale a row:             value = code * scale
    nf4    a code of 4 bits a value, a scale for each block:    value = level[code] * scale

The levels of nf4 are quantiles of the normal distribution.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

_BLOCK = 64  # values to a scale of nf4, at most
_MOST = 127  # the largest code of int8
_TINY = torch.finfo(torch.float32).tiny
# Appendix E of Dettmers et al. 2023.
_TABLE = """
                -1.0  -0.6961928009986877  -0.5250730514526367   -0.39491748809814453
-0.28444138169288635  -0.18477343022823334  -0.09105003625154495  0.0
 0.07958029955625534   0.16093020141124725   0.24611230194568634  0.33791524171829224
 0.44070982933044434   0.5626170039176941    0.7229568362236023   1.0
"""
_LEVELS = [float(text) for text in _TABLE.split()]


class QuantisedMatrix(nn.Module):
    """In place of a matrix [rows, columns] that does not learn, or of a stack of them
    [..., rows, columns]. Empty until `take`.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def __init__(self, matrix: torch.Tensor, kind: str) -> None:
        """Of the shape and on the device of `matrix`."""
        super().__init__()
        self.shape = matrix.shape
        self._is_packed = kind == "nf4"
        *above, columns = matrix.shape
        dtype = torch.int8
        codes_in_row = columns
        scales_in_row = 1
        if self._is_packed:
            dtype = torch.uint8
            codes_in_row //= 2
            block = math.gcd(columns, _BLOCK)
            scales_in_row = columns // block
        codes = matrix.new_empty(*above, codes_in_row, dtype=dtype)
        scales = matrix.new_empty(*above, scales_in_row, dtype=torch.float32)
        self.keep("codes", codes)
        self.keep("scales", scales)
        self.frozen = frozenset(("codes", "scales"))

    def keep(self, name: str, values: torch.Tensor | None) -> None:
        """As `freeze` leaves what does not learn: no checkpoint holds it."""
        self.register_buffer(name, values, persistent=False)

    def take(self, matrix: torch.Tensor) -> None:
        """Its codes and scales."""
        # One of a stack after another: what each takes meanwhile is many times its codes.
        codes = []
        scales = []
        for each in matrix.reshape(-1, *matrix.shape[-2:]):
            own_codes, own_scales = self._coded(each.float())
            codes.append(own_codes)
            scales.append(own_scales)
        self.codes = torch.stack(codes).view_as(self.codes)
        self.scales = torch.stack(scales).view_as(self.scales)

    def _coded(self, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        blocks_in_row = self.scales.shape[-1]
        blocks = values.unflatten(1, (blocks_in_row, -1))
        largest = blocks.abs().amax(-1, keepdim=True)
        largest = largest.clamp(min=_TINY)
        scales = largest[..., 0]
        if self._is_packed:
            codes = _nearest(blocks / largest)
            codes = codes.flatten(1)
            first = codes[:, ::2]
            second = codes[:, 1::2]
            packed = (first << 4) | second
            return packed, scales
        scales = scales / _MOST
        ratios = values / scales
        codes = ratios.round()
        return codes.to(torch.int8), scales

    @property
    def dtype(self) -> torch.dtype:
        """In which it is made where nothing else is asked for."""
        return self.scales.dtype

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Made anew, of `shape`."""
        scales = self.scales.to(dtype)
        if not self._is_packed:
            codes = self.codes.to(dtype)
            return codes * scales
        pairs = _pairs(dtype, self.codes.device)
        # No name for the codes as int32, which take as much as their values in bf16.
        values = F.embedding(self.codes.int(), pairs)
        blocks = values.reshape(*scales.shape, -1)
        products = blocks * scales[..., None]
        return products.flatten(-2)


def computing_dtype(x: torch.Tensor) -> torch.dtype:
    """In which a product with `x` is made: that of autocast, where it is on."""
    device = x.device.type
    # A probe's has none.
    if not torch.amp.is_autocast_available(device):
        return x.dtype
    if not torch.is_autocast_enabled(device):
        return x.dtype
    return torch.get_autocast_dtype(device)


def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 2]: the two values of each byte."""
    levels = torch.tensor(_LEVELS, dtype=dtype, device=device)
    return torch.cartesian_prod(levels, levels)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """The code of the level that is nearest to each of `values`, which are between -1 and 1."""
    levels = torch.tensor(_LEVELS)
    sums = levels[1:] + levels[:-1]
    middles = sums / 2
    codes = torch.bucketize(values.contiguous(), middles)
    return codes.to(torch.uint8)
