"""What each layer of any model costs: counted without running it, or measured by running it."""

import time
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from dpipe.errors import ConfigError, RunError
from dpipe.passes.recompute import attention_cores
from dpipe.passes.seeding import seeded
from dpipe.stage.master_weights import in_precision
from dpipe.stage.model import LayeredModel, as_tensors, materialise
from dpipe.stage.stage import Stage
from dpipe.streams import Streams, streams_of
from dpipe.wire.spec import TensorSpec

_REPEATS = 3  # the first may load kernels, and other work may slow any of them
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class LayerCost:
    """One layer, for one micro-batch. Parameters count as replicas exchange them and optimizers
    learn them: in fp32 at least.
    """

    forward_flops: float
    parameter_bytes: int
    outputs: tuple[TensorSpec, ...]  # what it passes to the next layer
    attention_cores: int = 0  # modules that selective recomputation runs again
    core_flops: float = 0.0  # of `forward_flops`, those of the attention cores
    largest_parameter_bytes: int = 0
    kept_bytes: int = 0  # by the layer's graph for its backward, input and parameters apart


# By recipe, the cost of a layer and what it returned on the meta device: the blocks of a model are
# alike, and following the shapes of one takes 30 ms.
_Known = dict[Hashable, tuple[LayerCost, tuple[torch.Tensor, ...]]]
_KNOWN: _Known = {}


def probe(
    model: LayeredModel,
    inputs: Iterable[TensorSpec],
    seed: int,
    dtype: torch.dtype = torch.float32,
) -> tuple[LayerCost, ...]:
    """Count each layer's operations and follow the shapes, on the meta device: nothing is computed.

    `inputs` are those of the first layer, `dtype` is that of the parameters. Raises `ConfigError`
    naming a layer whose shapes depend on values.
    """
    tensors: tuple[torch.Tensor, ...] = tuple(spec.empty("meta") for spec in inputs)
    costs = []
    of_this_model: _Known = {}  # by what it says of a layer itself
    for index in range(len(model.layers)):
        known = _KNOWN
        recipe = recipe_of(model.layers[index], tensors, dtype)
        if recipe is None and model.alike is not None:
            known = of_this_model
            recipe = (model.alike(index), _layouts(tensors))
        if recipe in known:
            cost, tensors = known[recipe]
        else:
            cost, tensors = _probe_layer(model, index, tensors, seed, dtype)
        if recipe is not None:  # None is no recipe: such layers are probed each time
            known[recipe] = cost, tensors
        costs.append(cost)
    return tuple(costs)


def _probe_layer(
    model: LayeredModel,
    index: int,
    inputs: tuple[torch.Tensor, ...],
    seed: int,
    dtype: torch.dtype,
) -> tuple[LayerCost, tuple[torch.Tensor, ...]]:
    """The cost of one layer, and its outputs on the meta device."""
    try:
        layer = in_precision(on_meta(model, index, seed), dtype)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            outputs = as_tensors(index, layer, layer(*inputs))
        kept_bytes = _kept_bytes(layer, inputs)
    except RunError as error:
        raise ConfigError(str(error)) from error
    except Exception as error:  # whatever a user's own code raises
        inputs_text = ", ".join(str(TensorSpec.of(tensor)) for tensor in inputs)
        raise ConfigError(
            f"layer {index} cannot take ({inputs_text}), or its shapes depend on values: "
            f"{type(error).__name__}: {error}"
        ) from error
    parameters = [_num_bytes(parameter) for parameter in layer.parameters()]
    cost = LayerCost(
        forward_flops=float(counter.get_total_flops()),
        parameter_bytes=sum(parameters),
        outputs=tuple(TensorSpec.of(output) for output in outputs),
        attention_cores=len(attention_cores(layer)),
        core_flops=_core_flops(layer, counter),
        largest_parameter_bytes=max(parameters, default=0),
        kept_bytes=kept_bytes,
    )
    return cost, outputs


def recipe_of(
    make: Callable[[], nn.Module],
    inputs: tuple[torch.Tensor, ...],
    dtype: torch.dtype,
) -> Hashable:
    """All that the cost of a layer depends on, if it is a class called with plain arguments; None
    if its factory might make something else the next time.
    """
    # A user's function may count its calls; a class makes the same of the same arguments.
    if not (isinstance(make, partial) and isinstance(make.func, type)):
        return None
    arguments = (make.args, tuple(sorted(make.keywords.items())))
    recipe = (make.func, arguments, _layouts(inputs), dtype)
    try:
        hash(recipe)
    except TypeError:
        return None
    return recipe


def _layouts(tensors: tuple[torch.Tensor, ...]) -> Hashable:
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)


def _kept_bytes(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> int:
    """Bytes of the distinct storages that the graph of a forward pass holds."""
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    leaves = []
    for tensor in inputs:
        leaf = tensor.detach()
        leaf.requires_grad_(leaf.is_floating_point())
        leaves.append(leaf)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layer(*leaves)
    counted_elsewhere = [*leaves, *layer.parameters(), *layer.buffers()]
    for tensor in counted_elsewhere:
        storage = tensor.untyped_storage()
        kept.pop(storage._cdata, None)
    # The graph must live until here: the address of a freed storage could be used again.
    del output
    return sum(kept.values())


def _core_flops(layer: nn.Module, counter: FlopCounterMode) -> float:
    by_module = counter.get_flop_counts()
    cores = attention_cores(layer)
    total = 0
    for name, module in layer.named_modules():
        counted = by_module.get(f"{type(layer).__name__}.{name}")  # the counter's way of naming
        if module in cores and counted is not None:
            total += sum(counted.values())
    return float(total)


def on_meta(model: LayeredModel, index: int, seed: int) -> nn.Module:
    """Layer `index` on the meta device, where tensors have sizes but no memory."""
    with seeded("layer", seed, index), torch.device("meta"):
        layer = model.layers[index]()
    return layer.to("meta")


def _num_bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * max(parameter.itemsize, _FLOAT_BYTES)


def measure(
    model: LayeredModel,
    inputs: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    seed: int,
    *,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    parameters: str = "fp32",
) -> tuple[float, ...]:
    """Seconds of forward and backward of each layer on one micro-batch, run for real: the best of
    three.

    A `Stage` of that precision runs them on `device`, with the process's number of threads. One
    layer is in memory at a time.
    """
    tensors = inputs
    seconds = []
    streams = streams_of(device)
    for index in range(len(model.layers)):
        last = index == len(model.layers) - 1
        layer = materialise(model, index, seed, streams.device)
        stage = Stage(
            index,
            {index: layer},
            num_microbatches=1,
            loss=model.loss if last else None,
            precision=precision,
            parameters=parameters,
            seed=seed,
            device=streams.device,
        )
        timed = [_timed(stage, tensors, targets, last, streams) for _ in range(_REPEATS)]
        seconds.append(min(took for took, _ in timed))
        tensors = timed[0][1]  # all are alike: each draws the same numbers
    return tuple(seconds)


def _timed(
    stage: Stage,
    inputs: tuple[torch.Tensor, ...],
    targets: torch.Tensor,
    last: bool,
    streams: Streams,
) -> tuple[float, tuple[torch.Tensor, ...]]:
    """From an idle device to an idle device."""
    streams.catch_up()
    began = time.perf_counter()
    outputs = stage.forward(0, inputs, targets)
    gradients: tuple[torch.Tensor, ...] = ()
    if not last:
        gradients = tuple(torch.ones_like(o) for o in outputs if o.is_floating_point())
    stage.backward(0, gradients)
    streams.catch_up()
    return time.perf_counter() - began, outputs
