"""Splitting the backward pass: a linear layer whose weight gradient can wait (Qi et al. 2023, zero bubble).

    forward           y = x W^T + b
    backward, now     dx = dy W        db = sum of dy
    backward, later   W.grad += dy^T x         [run_deferred]

Only what the stage before waits for is made now. The products are those that `nn.Linear` and autograd issue, so the
numbers are the same.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(slots=True)
class WeightGradient:
    """One product that is still to be made, of `grad` [tokens, out] and `input` [tokens, in]."""

    weight: nn.Parameter
    input: torch.Tensor
    grad: torch.Tensor

    def run(self) -> None:
        made = (self.grad.t() @ self.input).to(self.weight.dtype)
        if self.weight.grad is None:
            self.weight.grad = made
        else:
            self.weight.grad += made


Deferred = list[WeightGradient]


class Linear(nn.Linear):
    """An `nn.Linear` whose backward pass leaves its weight gradient in `deferred`."""

    deferred: Deferred

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        kind = input.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else input.dtype
        flat = input.to(dtype).reshape(-1, self.in_features)
        output: torch.Tensor = _Product.apply(flat, self.weight, self.bias, self.deferred)  # type: ignore[no-untyped-call]
        return output.view(*input.shape[:-1], self.out_features)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: nn.Parameter, bias: nn.Parameter | None, deferred: Deferred
    ) -> torch.Tensor:
        # In half precision this casts once more than autocast's cache would.
        cast = weight.to(input.dtype)
        ctx.save_for_backward(input, cast)
        ctx.weight, ctx.bias, ctx.deferred = weight, bias, deferred
        return F.linear(input, cast, None if bias is None else bias.to(input.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        input, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight:
            ctx.deferred.append(WeightGradient(ctx.weight, input, grad))
        return (
            grad @ weight if needs_input else None,
            None,
            grad.sum(0).to(ctx.bias.dtype) if needs_bias else None,
            None,
        )


def defer_weight_gradients(module: nn.Module, deferred: Deferred) -> None:
    """Turn every plain `nn.Linear` inside `module` into a `Linear`, in place; names and parameters stay.

    Subclasses are left as they are: they may compute something else.
    """
    for linear in module.modules():
        if type(linear) in (nn.Linear, Linear):
            linear.__class__ = Linear
            linear.deferred = deferred  # type: ignore[assignment]


def run_deferred(gradients: Deferred) -> None:
    """Make the products in the order in which the backward pass left them."""
    with torch.no_grad():
        for gradient in gradients:
            gradient.run()
