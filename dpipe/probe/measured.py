"""What the stages of any model hold, measured: a stage is run on fake tensors, which have sizes but
no values, while every allocation is followed.

    forward          before ── peak ── held
    backward         held ── peak ── gradients              once more: gradients are there before
    backward_input   held ── peak ── deferred
    backward_weight  deferred ── peak ── gradients

The stage's code is that of a run, so recomputation, autocast and split backward passes need no
formula. It takes torch, and some tenths of a second a layer: what a GPT or a BERT holds, which
`dpipe simulate` says without torch, is in `memory/formulas.py`.
"""

import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpipe.memory.layers import Peaks, of_parameters, with_ends, with_masters
from dpipe.memory.walk import LayerMemory, StageMemory
from dpipe.probe.allocations import AllocatedBytes
from dpipe.probe.layer_costs import LayerCost, on_meta
from dpipe.stage.base import Tensors
from dpipe.stage.master_weights import in_precision
from dpipe.stage.model import LayeredModel, changing_buffers
from dpipe.stage.stage import Stage
from dpipe.wire.spec import TensorSpec

Specs = tuple[TensorSpec, ...]

_FLOAT = 4
_RUN = 3  # equal layers in a row, of which more hold nothing new


@dataclass(frozen=True)
class StageRunner:
    """How the stages of a run compute one micro-batch."""

    model: LayeredModel
    inputs: Specs  # of the model's first layer
    targets: TensorSpec
    seed: int = 0
    recompute: str = "none"
    precision: str = "fp32"  # of autocast
    stored: torch.dtype = torch.float32  # of the parameters that layers compute with
    device: str = "cpu"
    frozen: int = 0  # the model's first layers, of which nothing learns
    # by what they are made of, stages that were measured before
    known: dict[Hashable, StageMemory] = field(default_factory=dict, compare=False)

    @property
    def has_masters(self) -> bool:
        return self.stored is not torch.float32

    def on_meta(self, layers: Sequence[int]) -> dict[int, nn.Module]:
        """New ones, by index."""
        return {
            index: in_precision(on_meta(self.model, index, self.seed), self.stored)
            for index in layers
        }


def measured_stages(
    runner: StageRunner, layers: Sequence[LayerCost], cut: Sequence[int]
) -> tuple[StageMemory, ...]:
    """What each stage holds, its layers taken as one; `cut` are layers a stage.

    A stage that fake tensors cannot run, for instance because its loss looks at values, is
    estimated from what its layers' graphs keep, with a warning that says so.
    """
    ends = list(accumulate(cut))
    stages: list[StageMemory] = []
    for start, end in zip([0, *ends], ends, strict=False):
        inputs = layers[start - 1].outputs if start else runner.inputs
        stage: StageMemory
        try:
            stage = _remembered(runner, range(start, end), inputs)
        except Exception as error:  # whatever a user's own code raises
            warnings.warn(
                f"the memory of layers {start} to {end - 1} is a rough estimate, because they "
                f"cannot be run without values: {type(error).__name__}: {error}",
                stacklevel=2,
            )
            stage = _estimated(runner, layers[start:end], inputs)
        if runner.has_masters:
            stage = tuple(map(with_masters, stage))
        stages.append(stage)
    outputs = [_total(layers[end - 1].outputs) for end in ends[:-1]]
    num_frozen = sum(end <= runner.frozen for end in ends)
    return with_ends(stages, outputs, runner.recompute, num_frozen)


def _remembered(runner: StageRunner, layers: range, inputs: Specs) -> StageMemory:
    """As `measured`, of a model that says which of its layers are alike: no stage twice that is
    made of the same, and of a long run of equal layers two and three of them.
    """
    alike = runner.model.alike
    if alike is None:
        return measured(runner, layers, inputs)
    # The first layer that learns gives no gradient back.
    kinds: list[Hashable] = []
    for layer in layers:
        place = _place(runner, layer)
        kinds.append((alike(layer), place))
    return _of_kinds(runner, layers, kinds, inputs)


def _of_kinds(
    runner: StageRunner, layers: Sequence[int], kinds: Sequence[Hashable], inputs: Specs
) -> StageMemory:
    """Of a stage of `layers`, one of `kinds` each."""
    key = (
        tuple(kinds),
        inputs,
        runner.targets,
        runner.recompute,
        runner.precision,
        runner.stored,
        runner.device,
    )
    if key not in runner.known:
        runner.known[key] = _by_runs(runner, layers, kinds, inputs)
    return runner.known[key]


def _place(runner: StageRunner, layer: int) -> int:
    """-1 of a frozen layer, 0 of the first that learns, else 1."""
    return (layer > runner.frozen) - (layer < runner.frozen)


def _by_runs(
    runner: StageRunner, layers: Sequence[int], kinds: Sequence[Hashable], inputs: Specs
) -> StageMemory:
    """Whatever a stage holds grows by as much with each equal layer, from the third on."""
    length = 0
    longest = None
    for kind, run in groupby(kinds):
        number = len(list(run))
        if number > length:
            length = number
            longest = kind
    if length <= _RUN:
        return measured(runner, layers, inputs)
    first = kinds.index(longest)
    stages = []
    for kept in (_RUN - 1, _RUN):
        chosen = [*range(first + kept), *range(first + length, len(kinds))]
        few_layers = [layers[place] for place in chosen]
        few_kinds = [kinds[place] for place in chosen]
        # Runs of any length come down to the same two.
        stages.append(_of_kinds(runner, few_layers, few_kinds, inputs))
    extended = []
    for fewer, more in zip(*stages, strict=True):
        count = length - _RUN
        extended.append(_extended(fewer, more, count))
    return tuple(extended)


def _extended(fewer: LayerMemory, more: LayerMemory, count: int) -> LayerMemory:
    """`more`, which has a layer more than `fewer`, with `count` further ones."""
    grown = {}
    for each in fields(more):
        value = getattr(more, each.name)
        if type(value) is int:  # not a truth value
            step = value - getattr(fewer, each.name)
            grown[each.name] = value + count * step
    return replace(more, **grown)


def measured(runner: StageRunner, layers: Sequence[int], inputs: Specs) -> StageMemory:
    """What a stage of `layers` holds, the masters of parameters in half precision apart.

    It counts as two layers: one has the parameters whose gradients do not wait for
    `backward_weight`, such as those of norms, the other has all else.
    """
    # Two of each layer: a stage that splits backward changes its linear layers for good.
    plain = runner.on_meta(layers)
    splitting = runner.on_meta(layers)
    with FakeTensorMode(allow_non_fake_inputs=True):
        whole = _Trial(runner, plain, inputs, splits_backward=False)
        first = whole.micro_batch(Stage.backward)  # makes the parameters' gradients
        later = whole.micro_batch(Stage.backward)
        split = _Trial(runner, splitting, inputs, splits_backward=True)
        first_input = split.micro_batch(Stage.backward_input)
        first_weight_peak = split.backward_weight()
        later_input = split.micro_batch(Stage.backward_input)
        weight_peak = split.backward_weight()
    deferred_bytes = later_input.left_bytes
    early_bytes = first_input.left_bytes - deferred_bytes
    parameters = list(whole.stage.parameters())
    gradients_and_deferred = first.left_bytes + deferred_bytes
    # Gradients in half precision are gone after each micro-batch, so that each is like the first.
    backward_input = first_input if runner.has_masters else later_input
    early = of_parameters(early_bytes, largest=0)
    others = of_parameters(
        sum(parameter.nbytes for parameter in parameters) - early_bytes,
        largest=0,
        keeps_given=later_input.keeps_given,
        peaks=Peaks(
            forward=later.forward_bytes,
            backward=later.backward_bytes,
            first=first.backward_bytes,
            input=backward_input.backward_bytes,
        ),
        held_bytes=later.held_bytes,
        deferred_bytes=deferred_bytes,
        weight_bytes=weight_peak - gradients_and_deferred,
        first_weight_bytes=first_weight_peak - gradients_and_deferred,
    )
    others = replace(others, update_bytes=_update_bytes(parameters))
    return early, replace(others, frozen_bytes=_frozen_bytes(runner, layers))


def _update_bytes(parameters: Sequence[nn.Parameter]) -> int:
    """What AdamW works with: two copies of the parameter that it is at, and one of that before,
    which torch's loop over them still has.
    """
    most = 0
    before = 0
    # It steps matrices first, then vectors, which are small.
    for parameter in parameters:
        if parameter.ndim < 2:
            continue
        size = parameter.nbytes
        most = max(most, 2 * size + before)
        before = size
    return most


def _frozen_bytes(runner: StageRunner, layers: Sequence[int]) -> int:
    """Of the parameters that do not learn, which are buffers."""
    total = 0
    for layer in runner.on_meta(layers).values():
        total += sum(buffer.nbytes for buffer in layer.buffers())
        total -= sum(buffer.nbytes for buffer in changing_buffers(layer))
    return total


@dataclass(frozen=True)
class _Passes:
    """Bytes of one micro-batch's forward and backward pass, the output of the stage apart."""

    held_bytes: int  # from forward to backward
    forward_bytes: int  # peak of the forward pass, above what it holds at its end
    backward_bytes: int  # peak of the backward pass, above what it begins with
    left_bytes: int  # what is there after the backward pass and was not before the forward pass
    keeps_given: bool  # whether that has the gradient of the output in it


class _Trial:
    """A stage on fake tensors, and what it has allocated."""

    def __init__(
        self,
        runner: StageRunner,
        layers: dict[int, nn.Module],
        inputs: Specs,
        *,
        splits_backward: bool,
    ) -> None:
        last = len(runner.model.layers) - 1 in layers
        self._inputs = inputs
        self._targets = runner.targets if last else None
        self._device = runner.device
        # Or it lets go of its output at once.
        self._makes_output_again = runner.recompute == "full" or max(layers) < runner.frozen
        self._bytes = AllocatedBytes()
        for layer in layers.values():
            _fake_tensors(layer, runner.device)
            self._bytes.follow((*layer.parameters(), *layer.buffers()))
        self._without_gradients = self._bytes.now
        self.stage = Stage(
            min(layers),
            layers,
            num_microbatches=1,
            loss=runner.model.loss if last else None,
            recompute=runner.recompute,
            precision="fp32" if runner.has_masters else runner.precision,
            seed=runner.seed,
            splits_backward=splits_backward,
            frozen=runner.frozen,
            device=runner.device,
        )

    def micro_batch(self, backward: Callable[[Stage, int, Tensors], Tensors]) -> _Passes:
        """Forward, and `backward`, which is a method of `Stage`."""
        with self._bytes:
            before = self._bytes.now
            outputs = self._forward()
            forward_peak = self._bytes.take_peak()
            output_bytes = sum(output.untyped_storage().nbytes() for output in outputs)
            gradients = tuple(
                torch.empty_like(output) for output in outputs if output.is_floating_point()
            )
            # As a run does, which sends them and lets go.
            del outputs
            given_bytes = sum(gradient.nbytes for gradient in gradients)
            held_bytes = self._bytes.now - given_bytes - before
            if not self._makes_output_again:
                held_bytes -= output_bytes
            self._bytes.take_peak()
            backward(self.stage, 0, gradients)
            backward_peak = self._bytes.take_peak()
            # Freed by this, unless backward has kept a part of it.
            with_given = self._bytes.now
            del gradients
            after = self._bytes.now
        return _Passes(
            held_bytes,
            forward_bytes=forward_peak - before - held_bytes,
            backward_bytes=backward_peak - before - held_bytes,
            left_bytes=after - before,
            keeps_given=with_given - after < given_bytes,
        )

    def backward_weight(self) -> int:
        """Its peak in bytes, above what the stage holds without gradients and micro-batches."""
        with self._bytes:
            self._bytes.take_peak()
            self.stage.backward_weight(0)
            return self._bytes.take_peak() - self._without_gradients

    def _forward(self) -> Tensors:
        """The outputs to pass on; the last stage has none."""
        inputs = tuple(spec.empty(self._device) for spec in self._inputs)
        targets = None if self._targets is None else self._targets.empty(self._device)
        self._bytes.take_peak()
        outputs = self.stage.forward(0, inputs, targets)
        return outputs if targets is None else ()


def _fake_tensors(layer: nn.Module, device: str) -> None:
    """Put fake tensors on `device` in place of meta tensors; shared ones stay shared."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        return fakes.setdefault(id(tensor), made)

    for module in layer.modules():
        named: Any = (module._parameters, module._buffers, vars(module))
        for tensors in named:
            for name, value in list(tensors.items()):
                if isinstance(value, torch.Tensor) and value.is_meta:
                    tensors[name] = fake(value)


def _estimated(
    runner: StageRunner, layers: Sequence[LayerCost], inputs: Specs
) -> tuple[LayerMemory, ...]:
    """What the layers' graphs keep is counted; working memory is taken to be as much again."""
    again = runner.recompute == "full"
    memories = []
    for layer in layers:
        input_bytes = _total(inputs)
        working = layer.kept_bytes * (2 if again else 1)
        # Parameters are counted in fp32.
        parameter_bytes = layer.parameter_bytes * runner.stored.itemsize // _FLOAT
        largest = layer.largest_parameter_bytes * runner.stored.itemsize // _FLOAT
        memories.append(
            of_parameters(
                parameter_bytes,
                largest=largest,
                held_bytes=input_bytes if again else input_bytes + layer.kept_bytes,
                deferred_bytes=input_bytes + layer.kept_bytes,
                peaks=Peaks(layer.kept_bytes, working, working, working),
                weight_bytes=largest,
            )
        )
        inputs = layer.outputs
    return tuple(memories)


def _total(specs: Specs) -> int:
    return sum(spec.num_bytes for spec in specs)
