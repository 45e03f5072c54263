"""From what a layer's passes hold to what its stage does, of any model. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from dpipe.memory.walk import LayerMemory, StageMemory

Stages = Sequence[StageMemory]  # what the layers of each stage hold; none for replay

_MOMENTS = 2  # of AdamW (Loshchilov & Hutter 2019), as large as the parameters


@dataclass(frozen=True)
class Peaks:
    """Working memory of a layer's passes in bytes, above what it holds when they begin."""

    forward: int = 0
    backward: int = 0
    # as `backward`, of a step's first micro-batch: its gradients stay as they are made
    first: int = 0
    input: int = 0  # of a backward pass that leaves the weight gradients

    def remade(self, inside: int, making: int, forward: int) -> "Peaks":
        """With `recompute="full"`: backward first makes what is `inside` again, with a peak of
        `making`; `forward` is the peak of the pass that keeps no graph.
        """
        return Peaks(
            forward=forward,
            backward=inside + max(self.backward, making),
            first=inside + max(self.first, making),
            input=inside + max(self.input, making),
        )


def of_parameters(
    parameter_bytes: int,
    *,
    largest: int,
    peaks: Peaks = Peaks(),
    held_bytes: int = 0,
    deferred_bytes: int = 0,
    weight_bytes: int = 0,
    first_weight_bytes: int = 0,
    keeps_given: bool = False,
) -> LayerMemory:
    """A layer with its gradients and AdamW's state. The other arguments are as in `LayerMemory`.

    AdamW works on one parameter at a time, with two copies of it: `largest` are the bytes of the
    largest.
    """
    return LayerMemory(
        parameter_bytes=parameter_bytes,
        gradient_bytes=parameter_bytes,  # from the first backward of a step on
        optimizer_bytes=_MOMENTS * parameter_bytes,
        update_bytes=2 * largest,
        held_bytes=held_bytes,
        deferred_bytes=deferred_bytes,
        forward_bytes=peaks.forward,
        backward_bytes=peaks.backward,
        first_bytes=peaks.first - peaks.backward,
        input_bytes=peaks.input,
        weight_bytes=weight_bytes,
        first_weight_bytes=first_weight_bytes,
        keeps_given=keeps_given,
    )


def with_masters(layer: LayerMemory) -> LayerMemory:
    """`layer`, whose parameters have 16 bits, with fp32 masters that have the gradients and the
    moments.
    """
    return replace(
        layer,
        rounded_bytes=layer.parameter_bytes,
        parameter_bytes=2 * layer.parameter_bytes,
        gradient_bytes=2 * layer.gradient_bytes,
        optimizer_bytes=2 * layer.optimizer_bytes,
        update_bytes=2 * layer.update_bytes,
        # Every micro-batch finds no 16-bit gradients, so each is like the first of a step.
        backward_bytes=layer.backward_bytes + layer.first_bytes,
        first_bytes=0,
        # A weight's product is itself the 16-bit gradient.
        weight_bytes=0,
        within=None if layer.within is None else with_masters(layer.within),
    )


def with_ends(
    stages: Sequence[StageMemory],
    output_bytes: Sequence[int],
    recompute: str,
    num_frozen: int = 0,
) -> tuple[StageMemory, ...]:
    """`stages`, each but the last with what it holds of its output, of `output_bytes[s]`, and of
    the output's gradient. With `recompute="full"` backward makes the output again; the first
    `num_frozen` stages keep no output and get no gradient.
    """
    ended = list(stages[:num_frozen])
    pairs = list(zip(stages[:-1], output_bytes, strict=True))
    for stage, size in pairs[num_frozen:]:
        held_bytes = 0 if recompute == "full" else size
        ended.append((*stage, LayerMemory(held_bytes=held_bytes, given_bytes=size)))
    return (*ended, tuple(stages[-1]))
