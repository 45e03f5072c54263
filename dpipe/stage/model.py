"""A model as a list of layers and a loss. The layer is the unit: of cutting, seeding, saving and
recomputation.
"""

import copy
import importlib
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dpipe.errors import ConfigError, RunError
from dpipe.stage.seeding import seeded
from dpipe.stage.tensor_group import TensorGroup

Loss = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class LayeredModel:
    """`layers[i]()` makes layer i; a layer takes and gives a tensor or a tuple of tensors.

    `loss(*outputs, targets)` is the mean over a micro-batch. `tied` names a parameter of the first
    layer and one of the last that are one weight to the mathematics: two parameters here, of equal
    start, whose gradients are added up. `split_loss(group)` is the loss where the last layer is
    split over the ranks of a group (`tensor_parallel.py`); a model without it cannot be split.
    """

    layers: tuple[Callable[[], nn.Module], ...]
    loss: Loss
    tied: tuple[str, str] | None = None
    split_loss: Callable[[TensorGroup], Loss] | None = None

    def loss_on(self, group: TensorGroup | None) -> Loss:
        """The loss where `group` holds the last layer together; None is one rank."""
        if group is None:
            return self.loss
        assert self.split_loss is not None, "the configuration splits dpipe's own models alone"
        return self.split_loss(group)


def materialise(
    model: LayeredModel, layer_index: int, seed: int, device: torch.device | str
) -> nn.Module:
    """Make one layer: a function of (seed, layer index), whatever else was made before. Always
    drawn on the CPU.

    Parameters and buffers become contiguous where they are not: one that is transposed, expanded or
    in another memory format.
    """
    with seeded("layer", seed, layer_index):
        layer = model.layers[layer_index]()
    if model.tied is not None and layer_index == len(model.layers) - 1:
        first = materialise(model, 0, seed, "cpu")
        with torch.no_grad():
            layer.get_parameter(model.tied[1]).copy_(first.get_parameter(model.tied[0]))
    for tensor in (*layer.parameters(), *layer.buffers()):
        # Replicas own runs of a parameter's elements, in its memory; an expanded buffer could not
        # be filled.
        tensor.data = tensor.data.contiguous()
    return layer.to(device)


def saved_buffers(layer: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint holds of a layer beside its parameters, by name."""
    persistent = layer.state_dict(keep_vars=True).keys()
    yield from ((name, buffer) for name, buffer in layer.named_buffers() if name in persistent)


def as_tensors(index: int, layer: nn.Module, returned: object) -> tuple[torch.Tensor, ...]:
    """What `layer` has returned, as a tuple of tensors. Raises `RunError` where it is anything
    else.
    """
    outputs = returned if isinstance(returned, tuple) else (returned,)
    if not (outputs and all(isinstance(output, torch.Tensor) for output in outputs)):
        kinds = ", ".join(type(output).__name__ for output in outputs)
        what = f"a tuple of ({kinds})" if isinstance(returned, tuple) else kinds
        raise RunError(
            f"layer {index} ({type(layer).__name__}) returned {what}; a layer must return a tensor "
            "or a tuple of "
            "tensors"
        )
    return outputs


def load_layers(name: str, options: Mapping[str, Any], seed: int) -> LayeredModel:
    """The model that the user's function `package.module:function` returns for `options`: `(layers,
    loss)`.

    `layers` is a list of modules, or of functions of no arguments that make one (then each rank
    makes its own alone). Parameters are what is trained, each of one layer alone. They are saved,
    and buffers that are persistent, such as running means: those of the first replica, because
    nothing makes replicas agree on them. A memory format of parameters, such as channels_last, is
    not kept. Modules in the working folder are found.

    Raises `ConfigError` naming what is missing or of the wrong kind.
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
            layers, loss = _checked(
                name, function(**options)
            )  # which makes them, where it was given a generator
    except ConfigError:
        raise
    except Exception as error:  # whatever a user's own code raises
        raise ConfigError(
            f"model.layers {name!r}: {function.__name__} raised {_told(error)}"
        ) from error
    return LayeredModel(tuple(_factory(name, i, layer) for i, layer in enumerate(layers)), loss)


def _find(name: str) -> Callable[..., Any]:
    module_name, _, function_name = name.partition(":")
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
            f"model.layers {name!r}: cannot import {module_name!r}: {_told(error)}"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(
            f"model.layers {name!r}: {module.__name__} has no function {function_name!r}"
        )
    return function  # type: ignore[no-any-return]


def _told(error: Exception) -> str:
    """What was raised, in one line, and where in the user's own code, as far as that lies in the
    working folder.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(Path.cwd())]
    where = f" (at {own[-1].filename}, line {own[-1].lineno})" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _checked(name: str, returned: object) -> tuple[list[Any], Loss]:
    match returned:
        case (layers, loss) if isinstance(layers, Iterable) and callable(loss):
            found = list(layers)
        case _:
            raise ConfigError(
                f"model.layers {name!r} must return (list of layers, loss function), got "
                f"{returned!r:.80}"
            )
    if not found:
        raise ConfigError(f"model.layers {name!r} returned no layers")
    for index, layer in enumerate(found):
        if not callable(layer):
            raise ConfigError(
                f"model.layers {name!r}: layer {index} must be an nn.Module or a function making "
                f"one, got {layer!r:.80}"
            )
    _check_nothing_is_shared(name, found)
    return found, loss


def _check_nothing_is_shared(name: str, layers: Iterable[Any]) -> None:
    """Layers may be on different ranks: one parameter in two of them would become two, without a
    word.
    """
    owners: dict[nn.Parameter, str] = {}
    for index, layer in enumerate(layers):
        for inside, parameter in layer.named_parameters() if isinstance(layer, nn.Module) else ():
            here = f"layers.{index}.{inside}"
            if (other := owners.setdefault(parameter, here)) != here:
                raise ConfigError(
                    f"model.layers {name!r}: {other} and {here} are one parameter, and layers "
                    "share none, because they "
                    "may lie on different ranks; give each its own, or make one layer of all that "
                    "share it"
                )


def _factory(name: str, index: int, layer: Callable[..., Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        # Copied, because the ranks of one process must not share parameters.
        made = copy.deepcopy(layer) if isinstance(layer, nn.Module) else layer()
        if not isinstance(made, nn.Module):
            raise ConfigError(
                f"model.layers {name!r}: layer {index} makes {made!r:.80}, not an nn.Module"
            )
        return made

    return make
