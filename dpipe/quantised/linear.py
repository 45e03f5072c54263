"""A linear layer whose matrix is in 8 or 4 bits. A forward pass makes the matrix in the precision
that it computes in, and a backward pass makes it again: none is kept between them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dpipe.quantised.matrix import QuantisedMatrix, computing_dtype


class QuantisedLinear(QuantisedMatrix):
    """In place of an `nn.Linear` whose matrix [out, in] does not learn."""

    bias: torch.Tensor | None

    def __init__(self, linear: nn.Linear, kind: str) -> None:
        super().__init__(linear.weight, kind)
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.keep("bias", linear.bias)
        self.frozen |= {"bias"}

    @property
    def weight(self) -> torch.Tensor:
        """The matrix, made anew."""
        return self.matrix(self.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` is [..., in]."""
        dtype = computing_dtype(x)
        product: torch.Tensor = _Product.apply(x.to(dtype), self)  # type: ignore[no-untyped-call]
        if self.bias is None:
            return product
        return product + self.bias.to(dtype)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, linear: QuantisedLinear) -> torch.Tensor:
        ctx.linear = linear
        matrix = linear.matrix(x.dtype)
        return F.linear(x, matrix)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        matrix = ctx.linear.matrix(grad.dtype)
        return grad @ matrix, None
