"""Parameters in half precision to compute with, and fp32 master weights that learn (Micikevicius et
al. 2018).

    masters (fp32) ──refresh, once a step──> parameters (half) ──forward, backward──> gradients
       ^──────── AdamW ──────── gradients (fp32) <──── collect, once a micro-batch ─────(half)┘

Gradients are added up over the micro-batches in fp32: half precision rounds each of them, never
the sum.
"""

from collections.abc import Mapping

import torch
from torch import nn

Named = tuple[str, nn.Parameter]


class MasterWeights:
    """Casts `layers` to `dtype`, in place. Optimizers, checkpoints and replicas see the masters."""

    def __init__(self, layers: Mapping[int, nn.Module], dtype: torch.dtype) -> None:
        self.named: dict[int, list[Named]] = {}
        self._working: list[torch.Tensor] = []
        self._masters: list[torch.Tensor] = []  # of each of those, in the same order
        for index, layer in layers.items():
            self.named[index] = []
            for name, parameter in layer.named_parameters():
                master = _master(parameter)
                self.named[index].append((name, master))
                self._working.append(parameter)
                self._masters.append(master)
            # Behind the masters, which are of the values before they were rounded. `to` changes
            # parameters in place: those above stay the layer's.
            in_precision(layer, dtype)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the gradients that a backward pass left on the parameters to the masters'."""
        for master, working in zip(self._masters, self._working, strict=True):
            if working.grad is None:
                continue
            if master.grad is None:
                master.grad = working.grad.to(master.dtype)
            else:
                master.grad += working.grad
            # Or the next backward pass would add to it, in half precision.
            working.grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """Write the masters, rounded, to the parameters."""
        # All in one call: on a GPU a copy of each would be a kernel of its own. There may be none:
        # in a stage of frozen layers nothing learns.
        if self._working:
            torch._foreach_copy_(self._working, self._masters)

    def forget(self) -> None:
        """Drop gradients that were not collected."""
        for working in self._working:
            working.grad = None


def in_precision(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the floating-point parameters and buffers of `layer`, in place. Complex buffers stay."""
    complex_buffers = [
        (module, name, buffer)
        for module in layer.modules()
        for name, buffer in module.named_buffers(recurse=False)
        if buffer.is_complex()
    ]
    for module, name, _ in complex_buffers:
        setattr(module, name, None)  # `to` would drop the imaginary part
    layer.to(dtype)
    for module, name, buffer in complex_buffers:
        setattr(module, name, buffer)
    return layer


def _master(parameter: nn.Parameter) -> nn.Parameter:
    values = parameter.detach().clone()
    if values.is_floating_point():
        values = values.float()
    return nn.Parameter(values, requires_grad=parameter.requires_grad)
