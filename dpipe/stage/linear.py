"""Splitting the backward pass: a linear layer whose weight gradient can wait (Qi et al. 2023, zero
bubble).

    forward           y = x W^T + b
    backward, now     dx = dy W        db = sum of dy
    backward, later   W.grad += dy^T x         [make]

Only what the stage before waits for is made now. The products are those that `nn.Linear` and
autograd issue, so the numbers are the same.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Products = dict[
    nn.Parameter, list[tuple[torch.Tensor, torch.Tensor]]
]  # by weight, the factors of its gradients


class WeightGradients:
    """Where the linear layers of a stage file their weight gradients, as products that are still to
    be made.
    """

    def __init__(self) -> None:
        self.filed: Products = {}

    def file(self, weight: nn.Parameter, input: torch.Tensor, grad: torch.Tensor) -> None:
        """`input` [tokens, in] and `grad` [tokens, out] are those of the product."""
        # Detached, because a view keeps what it views, and that the whole graph before it.
        self.filed.setdefault(weight, []).append((input.detach(), grad.detach()))

    def take(self) -> Products:
        filed = self.filed
        self.filed = {}
        return filed


@torch.no_grad()
def make(products: Products) -> None:
    """Add the gradients to their weights; those of one weight are added up first, as autograd
    does.
    """
    for weight, factors in products.items():
        _add(weight, factors)


def _add(weight: nn.Parameter, factors: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """A function of its own, so that one weight's product is freed before the next one's is
    made.
    """
    made, *others = ((grad.t() @ input).to(weight.dtype) for input, grad in factors)
    for other in others:
        made += other
    weight.grad = made if weight.grad is None else weight.grad.add_(made)


class Linear(nn.Linear):
    """An `nn.Linear` whose backward pass files its weight gradient with `gradients`, where they are
    set.
    """

    gradients: WeightGradients | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input, self.bias)

    def product(self, input: torch.Tensor, bias: nn.Parameter | None) -> torch.Tensor:
        if self.gradients is None:
            return F.linear(input, self.weight, bias)
        output: torch.Tensor = _Product.apply(input, self.weight, bias, self.gradients)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    """On [..., in] as one matrix [tokens, in], with or without gradients the same product."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        gradients: WeightGradients,
    ) -> torch.Tensor:
        flat = input.reshape(-1, weight.shape[1])
        used_weight: torch.Tensor = weight
        used_bias: torch.Tensor | None = bias
        if torch.is_autocast_enabled(input.device.type):
            # What autocast would do; autograd casts what backward returns to the dtype of what was
            # given.
            dtype = torch.get_autocast_dtype(input.device.type)
            flat = flat.to(dtype)
            used_weight = weight.to(dtype)
            used_bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(flat, used_weight)
        ctx.weight = weight
        ctx.gradients = gradients
        ctx.shape = input.shape
        return F.linear(flat, used_weight, used_bias).view(*input.shape[:-1], -1)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        flat, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            ctx.gradients.file(ctx.weight, flat, grad)
        return (
            (grad @ weight).view(ctx.shape) if needs_input else None,
            None,
            grad.sum(0) if needs_bias else None,
            None,
        )


def defer_weight_gradients(module: nn.Module, gradients: WeightGradients) -> None:
    """Turn every plain `nn.Linear` inside `module` into a `Linear`, in place; names and parameters
    stay.

    Left as they are: subclasses but those of `Linear`, which may compute something else, and a
    weight that is made from other parameters (`torch.nn.utils.weight_norm`), whose gradient has
    further to go.
    """
    for linear in module.modules():
        plain = type(linear) is nn.Linear and "weight" in dict(
            linear.named_parameters(recurse=False)
        )
        if plain:
            linear.__class__ = Linear
        if isinstance(linear, Linear):
            linear.gradients = gradients
