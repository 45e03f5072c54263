"""Parameters in half precision to compute with, and their masters in fp32 to learn (Micikevicius et
al. 2018).

    masters (fp32)  --refresh, once a step-->  parameters (half)  --forward, backward-->  gradients (half)
           ^------------- AdamW ------------- gradients (fp32) <--collect, once a micro-batch--'

A gradient is added up over the micro-batches in fp32, so that half precision rounds each of them
once, and not the sum.
"""

from collections.abc import Mapping

import torch
from torch import nn

Named = tuple[str, nn.Parameter]


class MasterWeights:
    """Turns `layers` to `dtype` in place. What optimizers, checkpoints and replicas see are the
    masters.
    """

    def __init__(self, layers: Mapping[int, nn.Module], dtype: torch.dtype) -> None:
        self.named: dict[int, list[Named]] = {
            index: [(name, _master(parameter)) for name, parameter in layer.named_parameters()]
            for index, layer in layers.items()
        }
        self._working: list[torch.Tensor] = [
            parameter for layer in layers.values() for parameter in layer.parameters()
        ]
        self._masters: list[torch.Tensor] = [
            master for named in self.named.values() for _, master in named
        ]
        for layer in layers.values():
            in_precision(layer, dtype)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients that a backward pass has left on the parameters to those of the
        masters.
        """
        for master, working in zip(self._masters, self._working, strict=True):
            if working.grad is None:
                continue
            if master.grad is None:
                master.grad = working.grad.to(master.dtype)
            else:
                master.grad += working.grad
            working.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the masters to the parameters."""
        torch._foreach_copy_(self._working, self._masters)

    def forget(self) -> None:
        """Drop gradients that were not collected."""
        for working in self._working:
            working.grad = None


def in_precision(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """`layer`, its real numbers as `dtype`, in place."""
    places = [
        (module, *named)
        for module in layer.modules()
        for named in module.named_buffers(recurse=False)
    ]
    of_complex = [place for place in places if place[2].is_complex()]
    for module, name, _ in of_complex:
        setattr(module, name, None)  # `to` would take the imaginary part away
    layer.to(dtype)
    for module, name, buffer in of_complex:
        setattr(module, name, buffer)
    return layer


def _master(parameter: nn.Parameter) -> nn.Parameter:
    values = parameter.detach().clone()
    return nn.Parameter(
        values.float() if values.is_floating_point() else values,
        requires_grad=parameter.requires_grad,
    )
