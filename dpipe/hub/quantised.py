"""Matrices that do not learn, in 8 or 4 bits: what is left of a base beside its adapter (QLoRA,
Dettmers et al. 2023).

    int8   a code of 8 bits a value, a scale a row:             value = code * scale
    nf4    a code of 4 bits a value, a scale for each block:    value = level[code] * scale

The levels of nf4 are quantiles of the normal distribution. A forward pass makes the matrix in the
precision that it computes in, and a backward pass makes it again: none is kept between them.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpipe.errors import ConfigError
from dpipe.hub.skeleton import Skeleton

_BLOCK = 64  # values to a scale of nf4, at most
_MOST = 127  # the largest code of int8
# Appendix E of Dettmers et al. 2023.
_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class QuantisedLinear(nn.Module):
    """In place of an `nn.Linear` whose matrix [out, in] does not learn."""

    codes: torch.Tensor
    scales: torch.Tensor
    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._is_packed = kind == "nf4"
        codes_in_row = self.in_features
        scales_in_row = 1
        dtype = torch.int8
        if self._is_packed:
            codes_in_row //= 2
            scales_in_row = self.in_features // math.gcd(self.in_features, _BLOCK)
            dtype = torch.uint8
        rows = self.out_features
        device = linear.weight.device
        self._buffer("codes", torch.empty(rows, codes_in_row, dtype=dtype, device=device))
        self._buffer("scales", torch.empty(rows, scales_in_row, device=device))
        self._buffer("bias", linear.bias)
        self.frozen = frozenset(("codes", "scales", "bias"))

    def _buffer(self, name: str, values: torch.Tensor | None) -> None:
        # As `freeze` leaves them: no checkpoint holds them.
        self.register_buffer(name, values, persistent=False)

    def take(self, weight: torch.Tensor) -> None:
        """The codes and scales of `weight` [out, in]."""
        blocks = weight.float().unflatten(1, (self._width(), -1))
        largest = blocks.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        if self._is_packed:
            codes = _nearest(blocks / largest).flatten(1)
            self.codes = (codes[:, ::2] << 4) | codes[:, 1::2]
            self.scales = largest[..., 0]
        else:
            self.scales = largest[..., 0] / _MOST
            self.codes = (weight.float() / self.scales).round().to(torch.int8)

    def _width(self) -> int:
        """Blocks in a row."""
        return int(self.scales.shape[1])

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, made anew."""
        return self.matrix(self.scales.dtype)

    def matrix(self, dtype: torch.dtype) -> torch.Tensor:
        if not self._is_packed:
            return self.codes.to(dtype) * self.scales.to(dtype)
        values = F.embedding(self.codes.int(), _pairs(dtype, self.codes.device))
        blocks = values.reshape(self.out_features, self._width(), -1)
        return (blocks * self.scales.to(dtype)[..., None]).flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [..., in]."""
        device = x.device.type
        # A probe's has none.
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        product: torch.Tensor = _Product.apply(x, self)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: QuantisedLinear) -> torch.Tensor:
        ctx.linear = linear
        return F.linear(x, linear.matrix(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        return grad @ ctx.linear.matrix(grad.dtype), None


def _pairs(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[256, 2]: the two values of each byte."""
    levels = torch.tensor(_LEVELS, dtype=dtype, device=device)
    return torch.cartesian_prod(levels, levels)


def _nearest(values: torch.Tensor) -> torch.Tensor:
    """The code of the level that is nearest to each of `values`, which are between -1 and 1."""
    levels = torch.tensor(_LEVELS)
    middles = (levels[1:] + levels[:-1]) / 2
    return torch.bucketize(values.contiguous(), middles).to(torch.uint8)


def check_quantised(skeleton: Skeleton, kind: str) -> None:
    """Raises `ConfigError` for a model most of whose values would stay as they are."""
    block = skeleton.layer(1)
    matrices = [part.weight for part in block.modules() if isinstance(part, nn.Linear)]
    values = sum(parameter.numel() for parameter in block.parameters())
    if sum(matrix.numel() for matrix in matrices) < values / 2:
        raise ConfigError(
            f'adapter.base "{kind}" is of linear layers, and most of a block of '
            f"{skeleton.config.model_type!r} is none, such as experts in one tensor: leave it out"
        )
    if kind == "nf4" and any(matrix.shape[1] % 2 for matrix in matrices):
        raise ConfigError('adapter.base "nf4" needs matrices of even width: take "int8"')


def quantise(layer: nn.Module, kind: str) -> None:
    """Put a `QuantisedLinear` in place of each frozen `nn.Linear` of a block."""
    for module in list(layer.modules()):
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear) and "weight" not in part._parameters:
                setattr(module, name, QuantisedLinear(part, kind))


def quantised(layer: nn.Module) -> Iterator[tuple[str, QuantisedLinear]]:
    for name, module in layer.named_modules():
        if isinstance(module, QuantisedLinear):
            yield name, module
