"""LoRA on a parameter that is in no linear layer, such as the experts of a mixture in one tensor
[experts, out, in] (peft's `target_parameters`).

    ParamWrapper ──> AdaptedParameter        W' = W + scaling * B A, for each expert
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft.tuners.lora import ParamWrapper
from torch import nn

from dpipe.quantised.stacks import found


class AdaptedParameter(ParamWrapper):  # type: ignore[misc]
    """peft's, which computes the same. In each pass peft gives the module another class, which
    makes `W'` twice, needs values, and leaves a frozen `W` as something that a checkpoint holds.
    """

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        """Inside, the module finds `W'` where `W` is; a graph through it keeps it."""
        (adapter,) = active_adapters
        module = self.get_base_layer()
        name = self.parameter_name
        frozen = module._buffers.get(name)
        if frozen is None:
            codes = module.get_submodule(name)
            with found(module, {name: self._adapted(codes.matrix(codes.dtype), adapter)}):
                yield
            return
        module._buffers[name] = self._adapted(frozen, adapter)
        try:
            yield
        finally:
            module._buffers[name] = frozen

    def _adapted(self, weight: torch.Tensor, adapter: str) -> torch.Tensor:
        if self.num_experts == 1:
            summed: torch.Tensor = weight + self.get_delta_weight(adapter)
            return summed
        left, right, scaling = self.get_delta_factors(adapter)
        # One operation, so that no second tensor of W's size is made.
        if not torch.amp.is_autocast_available(weight.device.type):
            return torch.baddbmm(weight, left, right, alpha=scaling)
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, left, right, alpha=scaling)


def adapt_without_values(model: nn.Module) -> None:
    """Make all of peft's wrappers inside `model` into ones of ours, in place."""
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = AdaptedParameter
