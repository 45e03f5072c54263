"""Which matrices of a layer can be quantised, and those that are."""

from collections.abc import Iterator

import torch
from torch import nn

from dpipe.quantised.linear import QuantisedLinear
from dpipe.quantised.matrix import QuantisedMatrix
from dpipe.quantised.stacks import WithStacks

_STACK = 3  # dimensions: [experts, out, in]


def matrices_of(layer: nn.Module) -> list[torch.Tensor]:
    """Those that `quantise` would take, were they frozen."""
    found: list[torch.Tensor] = []
    for part in layer.modules():
        if isinstance(part, nn.Linear):
            found.append(part.weight)
    for parameter in layer.parameters():
        if parameter.dim() == _STACK:
            found.append(parameter)
    return found


def quantise(layer: nn.Module, kind: str) -> None:
    """Put codes in place of each frozen matrix and stack of `layer`, in which nothing has values
    yet.
    """
    for module in list(layer.modules()):
        _quantise_stacks(module, kind)
        for name, part in list(module.named_children()):
            if isinstance(part, nn.Linear) and "weight" not in part._parameters:
                codes = QuantisedLinear(part, kind)
                setattr(module, name, codes)


def _quantise_stacks(module: nn.Module, kind: str) -> None:
    frozen = getattr(module, "frozen", ())
    for name in sorted(frozen):
        stack = module.get_buffer(name)
        if stack.dim() == _STACK:
            del module._buffers[name]
            codes = QuantisedMatrix(stack, kind)
            module.add_module(name, codes)
            _compute_with_stacks(module)


def _compute_with_stacks(module: nn.Module) -> None:
    own = type(module)
    if not issubclass(own, WithStacks):
        name = f"Quantised{own.__name__}"
        module.__class__ = type(name, (WithStacks, own), {})


def quantised(layer: nn.Module) -> Iterator[tuple[str, QuantisedMatrix]]:
    """Each by the name that the parameter had."""
    for name, module in layer.named_modules():
        if isinstance(module, QuantisedLinear):
            yield f"{name}.weight", module
        elif isinstance(module, QuantisedMatrix):
            yield name, module
