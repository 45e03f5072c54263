"""Splitting the backward pass: a linear layer whose weight gradient can wait (Qi et al. 2023, zero
bubble).

    forward           y = x W^T + b
    backward, now     dx = dy W        db = sum of dy
    backward, later   W.grad += dy^T x         [make]

Only what the previous stage waits for is made now. The products are those that `nn.Linear` and
autograd issue, so the numbers are the same to the bit.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

Factors = tuple[torch.Tensor, torch.Tensor]  # x [tokens, in] and dy [tokens, out]
Products = dict[nn.Parameter, list[Factors]]  # by weight: the factors of its gradients


class WeightGradients:
    """Where the linear layers of a stage file their weight gradients, as products still to make."""

    def __init__(self) -> None:
        self.filed: Products = {}

    def file(self, weight: nn.Parameter, input: torch.Tensor, grad: torch.Tensor) -> None:
        """`input` [tokens, in] and `grad` [tokens, out] are those of the product."""
        # Detached, because a view keeps its base alive, and with it the graph before it.
        factors = (input.detach(), grad.detach())
        self.filed.setdefault(weight, []).append(factors)

    def take(self) -> Products:
        filed = self.filed
        self.filed = {}
        return filed


@torch.no_grad()
def make(products: Products) -> None:
    """Add the gradients to their weights. Those of one weight are summed first, as in autograd."""
    for weight, factors in products.items():
        _add(weight, factors)


def _add(weight: nn.Parameter, factors: list[Factors]) -> None:
    """A call of its own, so that one weight's product is freed before the next one's is made."""
    # A weight that a layer uses twice has two products.
    total, *others = ((grad.t() @ input).to(weight.dtype) for input, grad in factors)
    for other in others:
        total += other
    if weight.grad is None:
        weight.grad = total
    else:
        weight.grad.add_(total)


class Linear(nn.Linear):
    """An `nn.Linear` whose backward pass files its weight gradient with `gradients`, if set."""

    gradients: WeightGradients | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.product(input, self.bias)

    def product(self, input: torch.Tensor, bias: nn.Parameter | None) -> torch.Tensor:
        if self.gradients is None:
            return F.linear(input, self.weight, bias)
        output: torch.Tensor = _Product.apply(input, self.weight, bias, self.gradients)  # type: ignore[no-untyped-call]
        return output


class _Product(torch.autograd.Function):
    """Input [..., in] as one matrix [tokens, in]: the same product with gradients and without."""

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
            # As autocast would. Autograd casts what `backward` returns to the inputs' dtypes.
            dtype = torch.get_autocast_dtype(input.device.type)
            flat = flat.to(dtype)
            used_weight = weight.to(dtype)
            used_bias = None if bias is None else bias.to(dtype)
        ctx.save_for_backward(flat, used_weight)
        # Beside what is saved: under autocast that is a copy, and the gradient is the parameter's.
        ctx.weight = weight
        ctx.gradients = gradients
        ctx.shape = input.shape
        output = F.linear(flat, used_weight, used_bias)
        # As `matmul` shapes its result. Autograd lets no layer change in place a view that a
        # function like this one has made, and OLMo clamps its queries in place.
        shaped: torch.Tensor = torch.ops.aten._unsafe_view(
            output, [*input.shape[:-1], output.shape[-1]]
        )
        return shaped

    @staticmethod
    def backward(
        ctx: Any,
        grad: torch.Tensor,
    ) -> tuple[torch.Tensor | None, None, torch.Tensor | None, None]:
        flat, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        if needs_weight:
            ctx.gradients.file(ctx.weight, flat, grad)
        grad_input = (grad @ weight).view(ctx.shape) if needs_input else None
        grad_bias = grad.sum(0) if needs_bias else None
        return grad_input, None, grad_bias, None


def defer_weight_gradients(module: nn.Module, gradients: WeightGradients) -> None:
    """Turn every plain `nn.Linear` inside `module` into a `Linear`, in place; names and parameters
    stay.

    Other subclasses of `nn.Linear` stay, because they may compute something else. So does one whose
    weight is computed from other parameters (`torch.nn.utils.weight_norm`): its gradient has to go
    on to them.
    """
    for linear in module.modules():
        own_parameters = dict(linear.named_parameters(recurse=False))
        if type(linear) is nn.Linear and "weight" in own_parameters:
            # In place: names, hooks and whoever else holds the module keep their meaning.
            linear.__class__ = Linear
        if isinstance(linear, Linear):
            linear.gradients = gradients
