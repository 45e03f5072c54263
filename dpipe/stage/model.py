"""A model as a list of layers and a loss. A layer is the unit of cutting, seeding, saving and
recomputation.
"""

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpipe.errors import ConfigError, RunError
from dpipe.passes.seeding import seeded
from dpipe.stage.tensor_group import TensorGroup

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class LayeredModel:
    """`layers[i]()` makes layer i; a layer takes and returns a tensor or a tuple of tensors.

    `loss(*outputs, targets)` is the mean over a micro-batch. `tied` names a parameter of the first
    layer and one of the last that are mathematically one weight: here two parameters that start
    equal and whose gradients are summed. `split_loss(group)` is the loss with the last layer split
    over a tensor-parallel group (`tensor_parallel.py`); a model without it cannot be split.
    `fill(i, layer)` gives layer i values of its own, such as those of a published model:
    `layers[i]` may then leave its parameters without memory, on the meta device. Of the first
    `frozen` layers nothing learns. Layers for which `alike` returns the same take and hold the
    same. `accuracy` is called as `loss` is, in evaluations: the share of the tokens that the model
    would have said itself.
    """

    layers: tuple[Callable[[], nn.Module], ...]
    loss: Loss
    tied: tuple[str, str] | None = None
    split_loss: Callable[[TensorGroup], Loss] | None = None
    fill: Callable[[int, nn.Module], None] | None = None
    frozen: int = 0
    alike: Callable[[int], Hashable] | None = None
    accuracy: Loss | None = None

    def loss_on(self, group: TensorGroup | None) -> Loss:
        """The loss on one rank of `group`; None: on one rank alone."""
        if group is None:
            return self.loss
        assert self.split_loss is not None, "the configuration splits dpipe's own models alone"
        return self.split_loss(group)


def materialise(
    model: LayeredModel, layer_index: int, seed: int, device: torch.device | str
) -> nn.Module:
    """Make one layer: a function of (seed, layer index), whatever was made before. Its values are
    always drawn on the CPU.

    Parameters and buffers that are transposed, expanded or in another memory format become
    contiguous.
    """
    with seeded("layer", seed, layer_index):
        layer = model.layers[layer_index]()
        if model.fill is not None:
            model.fill(layer_index, layer)
    if model.fill is None and model.tied is not None and layer_index == len(model.layers) - 1:
        # Made again, not asked for: the first layer may live on another rank.
        first = materialise(model, 0, seed, "cpu")
        name_in_first, name_in_last = model.tied
        with torch.no_grad():
            layer.get_parameter(name_in_last).copy_(first.get_parameter(name_in_first))
    for tensor in (*layer.parameters(), *layer.buffers()):
        # Sharded replicas own ranges of a parameter's memory, and a checkpoint could not fill an
        # expanded buffer.
        tensor.data = tensor.data.contiguous()
    return layer.to(device)


def saved_buffers(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The persistent buffers of a layer, by name: what a checkpoint holds beside its parameters."""
    persistent = layer.state_dict(keep_vars=True).keys()
    for name, buffer in layer.named_buffers():
        if name in persistent:
            yield name, buffer


def freeze(layer: nn.Module) -> None:
    """Turn the parameters of `layer` that do not learn into buffers that no checkpoint holds: they
    have no optimizer state, and replicas do not exchange them.
    """
    for module in layer.modules():
        frozen = []
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                del module._parameters[name]
                module.register_buffer(name, parameter.detach(), persistent=False)
                frozen.append(name)
        if frozen:
            module.frozen = frozenset(frozen)  # type: ignore[assignment]


def changing_buffers(layer: nn.Module) -> Iterator[torch.Tensor]:
    """All buffers of `layer` but its frozen parameters."""
    for module in layer.modules():
        frozen = getattr(module, "frozen", ())
        for name, buffer in module.named_buffers(recurse=False):
            if name not in frozen:
                yield buffer


def as_tensors(index: int, layer: nn.Module, returned: object) -> tuple[torch.Tensor, ...]:
    """What `layer` has returned, as a tuple of tensors. Raises `RunError` for anything else."""
    outputs = returned if isinstance(returned, tuple) else (returned,)
    if outputs and all(isinstance(output, torch.Tensor) for output in outputs):
        return outputs
    types = ", ".join(type(output).__name__ for output in outputs)
    what = f"a tuple of ({types})" if isinstance(returned, tuple) else types
    raise RunError(
        f"layer {index} ({type(layer).__name__}) returned {what}; a layer must return a tensor "
        "or a tuple of tensors"
    )


def load_layers(name: str, options: Mapping[str, Any], seed: int) -> LayeredModel:
    """The model that the user's function `package.module:function` makes of `options`. It returns
    `(layers, loss)`.

    `layers` is a list of modules, or of functions without arguments that make one; then a rank
    makes only its own. No two layers share a parameter. Checkpoints hold parameters and persistent
    buffers, such as running means; the buffers are the first replica's, because replicas do not
    exchange them. A memory format such as channels_last is not kept. Modules in the working folder
    can be imported.

    Raises `ConfigError` naming what is missing or of the wrong type.
    """
    function = _find(name)
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        raise ConfigError(
            f"model.options do not fit {name}{inspect.signature(function)}: {error}"
        ) from None
    try:
        with seeded("layers", seed):
            # Checked inside, because a generator makes its layers only when it is read.
            layers, loss = _checked(name, function(**options))
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's own code raises
        raise ConfigError(
            f"model.layers {name!r}: {function.__name__} raised {_described(error)}"
        ) from error
    factories = [_factory(name, index, layer) for index, layer in enumerate(layers)]
    return LayeredModel(tuple(factories), loss)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
    # The `dpipe` command does not have the working folder on its path, as `python -m` does. Last,
    # so that no file of the user's hides an installed package.
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"model.layers {name!r}: cannot import {module_name!r}: {error}; it must be installed "
            f"or lie in {folder}"
        ) from error
    except Exception as error:  # whatever a user's own code raises
        raise ConfigError(
            f"model.layers {name!r}: cannot import {module_name!r}: {_described(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"model.layers {name!r}: {module.__name__} has no function {function_name!r}"
        )
    return function  # type: ignore[no-any-return]


def _described(error: Exception) -> str:
    """What was raised, in one line, and the line of the working folder's code that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())]
    message = f"{type(error).__name__}: {' '.join(str(error).split())}"
    if not own:
        return message
    return f"{message} (at {own[-1].filename}, line {own[-1].lineno})"


def _checked(name: str, returned: object) -> tuple[list[Any], Loss]:
    match returned:
        case (iterable, loss) if isinstance(iterable, Iterable) and callable(loss):
            layers = list(iterable)
        case _:
            raise ConfigError(
                f"model.layers {name!r} must return (list of layers, loss function), got "
                f"{returned!r:.80}"
            )
    if not layers:
        raise ConfigError(f"model.layers {name!r} returned no layers")
    for index, layer in enumerate(layers):
        if not callable(layer):
            raise ConfigError(
                f"model.layers {name!r}: layer {index} must be an nn.Module or a function making "
                f"one, got {layer!r:.80}"
            )
    _check_nothing_is_shared(name, layers)
    return layers, loss


def _check_nothing_is_shared(name: str, layers: Iterable[Any]) -> None:
    """Layers may be on different ranks, where one parameter in two of them would silently become
    two.
    """
    owners: dict[nn.Parameter, str] = {}
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            continue
        for key, parameter in layer.named_parameters():
            here = f"layers.{index}.{key}"
            other = owners.setdefault(parameter, here)
            if other != here:
                raise ConfigError(
                    f"model.layers {name!r}: {other} and {here} are one parameter, but layers may "
                    "lie on different ranks and cannot share one; give each its own, or make one "
                    "layer of all that share it"
                )


def _factory(name: str, index: int, layer: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        # Copied, because ranks that are threads of one process must not share parameters.
        module = copy.deepcopy(layer) if isinstance(layer, nn.Module) else layer()
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"model.layers {name!r}: layer {index} makes {module!r:.80}, not an nn.Module"
            )
        return module

    return make
