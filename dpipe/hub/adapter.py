"""LoRA (Hu et al. 2021) by peft's own injection: small matrices learn, the model they adapt does
not.

What does not learn is a buffer here, not a parameter: it has no optimizer state, replicas do not
exchange it, checkpoints do not hold it.
"""

import difflib
import warnings
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from dpipe.config.model import AdapterConfig
from dpipe.errors import ConfigError
from dpipe.hub.extra import extra_library, hub_function
from dpipe.hub.skeleton import Skeleton

NAME = "default"  # peft's, of a model's only adapter
_ALL = "all-linear"  # peft's, of all matrices but the head's


def lora_config(adapter: AdapterConfig, skeleton: Skeleton | None = None) -> Any:
    """peft's configuration of the same adapter. peft takes "all-linear" of some layers by names
    alone, which are those of `skeleton`.
    """
    peft = extra_library("peft", "[adapter]")
    target = adapter.target_modules
    if target == _ALL and adapter.layers and skeleton is not None:
        target = _linear_in_blocks(skeleton)
    encoder = skeleton is not None and skeleton.architecture.is_encoder
    return peft.LoraConfig(
        task_type=None if encoder else "CAUSAL_LM",  # peft has no name for masked words
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        use_dora=adapter.dora,
        use_rslora=adapter.rslora,
        target_modules=target if isinstance(target, str) else list(target),
        target_parameters=list(adapter.target_parameters) or None,
        layers_to_transform=list(adapter.layers) or None,
    )


def add_adapter(skeleton: Skeleton, adapter: AdapterConfig) -> Skeleton:
    """Inject it, without memory. Raises `ConfigError` for modules and parameters that are not
    there.
    """
    if adapter.kind == "none":
        return skeleton
    num_blocks = skeleton.num_layers - 2
    if any(number >= num_blocks for number in adapter.layers):
        raise ConfigError(
            f"adapter.layers {list(adapter.layers)} are not all of this model, whose decoder "
            f"layers are 0 to {num_blocks - 1}"
        )
    _check_layers_of_experts(skeleton, adapter)
    config = lora_config(adapter, skeleton)
    names = [name for name, _ in skeleton.model.named_modules()]
    parameters = [name for name, _ in skeleton.model.named_parameters()]
    peft = extra_library("peft", "[adapter]")
    # It resolves "all-linear", and what older checkpoints call the experts.
    with warnings.catch_warnings():
        # It says of the ranks of experts, which count, that they do not; what it does not find is
        # refused below.
        warnings.simplefilter("ignore", RuntimeWarning)
        try:
            peft.inject_adapter_in_model(config, skeleton.model, low_cpu_mem_usage=True)
        except ValueError as error:
            raise ConfigError(_no_such_module(skeleton, adapter, error)) from None
    if not isinstance(config.target_modules, str):
        _check_found("target_modules", config.target_modules, names)
    _check_found("target_parameters", config.target_parameters or (), parameters)
    if config.target_parameters:
        hub_function("experts:adapt_without_values")(skeleton.model)
    return replace(skeleton, adapter=config)


def _check_found(key: str, wanted: Collection[str], names: Sequence[str]) -> None:
    """peft says nothing where only some are there."""
    for each in sorted(wanted):
        if not any(name == each or name.endswith(f".{each}") for name in names):
            raise ConfigError(
                f"adapter.{key} {each} cannot be adapted: this model has none"
                f"{_nearest([each], names)}"
            )


def _check_layers_of_experts(skeleton: Skeleton, adapter: AdapterConfig) -> None:
    has_experts = skeleton.architecture.experts is not None
    adapts_experts = adapter.target_modules == _ALL and has_experts
    if adapter.layers and (adapter.target_parameters or adapts_experts):
        raise ConfigError(
            "adapter.layers is of modules, and peft adapts parameters, such as the experts of "
            '"all-linear", in all layers: leave it out; or name the layers in '
            'adapter.target_parameters, such as "layers.3.mlp.experts.down_proj", and in '
            "adapter.target_modules"
        )


def _linear_in_blocks(skeleton: Skeleton) -> tuple[str, ...]:
    """The ends of the names of what "all-linear" adapts: not the head."""
    parts = skeleton.architecture
    return _linear(skeleton.model.get_submodule(f"{parts.base}.{parts.blocks}"))


def _linear(module: nn.Module) -> tuple[str, ...]:
    names = set()
    for name, part in module.named_modules():
        if isinstance(part, nn.Linear) or type(part).__name__ == "Conv1D":
            names.add(name.rpartition(".")[2])
    return tuple(sorted(names))


def _no_such_module(skeleton: Skeleton, adapter: AdapterConfig, error: ValueError) -> str:
    names = [name for name, _ in skeleton.model.named_modules()]
    linear = _linear(skeleton.model)
    wanted = adapter.target_modules
    listed = [wanted] if isinstance(wanted, str) else list(wanted)
    reason = " ".join(str(error).split())[:300]
    return (
        f"adapter.target_modules {', '.join(listed)} cannot be adapted: {reason}; this model has "
        f"{', '.join(linear)}{_nearest(listed, names)}"
    )


def _nearest(wanted: Sequence[str], names: Sequence[str]) -> str:
    """Those of `names`, or of their ends, that are like `wanted`."""
    near: set[str] = set()
    for each in wanted:
        parts = each.count(".") + 1
        ends = {".".join(name.split(".")[-parts:]) for name in names}
        near.update(difflib.get_close_matches(each, ends))
    return f"; did you mean {', '.join(sorted(near))}?" if near else ""


def initialise_adapter(layer: nn.Module) -> None:
    """Give a layer's adapter its first values, as peft does, by torch's generator. Nothing where
    there is no adapter.
    """
    from peft.tuners.lora import LoraLayer

    for module in layer.modules():
        if isinstance(module, LoraLayer):
            for matrices in (module.lora_A, module.lora_B):
                matrices[NAME].to_empty(device="cpu")
            module.reset_lora_parameters(NAME, True)
            _initialise_dora(module)


def _initialise_dora(module: Any) -> None:
    if NAME not in module.lora_magnitude_vector:
        return
    magnitude = module.lora_magnitude_vector[NAME]
    weight = module.get_base_layer().weight
    # Its first value (Liu et al. 2024): the norm of each row of the matrix, because B is zero.
    norms = torch.linalg.vector_norm(weight.detach(), dim=1)
    magnitude.weight = nn.Parameter(norms)


def merge_adapter(layer: nn.Module) -> None:
    """Add the adapters of `layer` to the matrices that they adapt. Nothing where there are none."""
    if not any("lora_" in name for name, _ in layer.named_parameters()):
        return
    from peft.tuners.lora import LoraLayer

    for module in layer.modules():
        if isinstance(module, LoraLayer):
            module.merge()
