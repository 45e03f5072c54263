"""What the model's layers take and hold, by layer: summed up from the first, so that a stage is a
difference.

    layers      0    1    2    3          summed   0   1   3   5   6
    seconds     1    2    2    1          stage of layers 1 and 2: summed[3] - summed[1] = 4
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpipe.config.load import Config
from dpipe.dataparallel.kinds import KINDS
from dpipe.machines.machine import Machine
from dpipe.memory.fit import in_run
from dpipe.memory.walk import LayerMemory, StageMemory
from dpipe.placement.fleet import Floats, Ints
from dpipe.plan.costs import LayerCosts, on_ranks, stage_cost
from dpipe.plan.on_machines import layers_on
from dpipe.plan.tensor_parallel import at_boundaries
from dpipe.timeline.cost import Cost
from dpipe.wire.format import HopFormats, wire_bytes

_FLOAT_BYTES = 4


@dataclass(frozen=True)
class SummedTimes:
    """Seconds of one micro-batch, by kind of machine: [kind, layer + 1], summed up."""

    forward: Floats
    backward: Floats  # whole, with what is computed again
    input: Floats  # of a split backward pass
    weight: Floats


@dataclass(frozen=True)
class Held:
    """Bytes, summed up: [layer + 1]."""

    static: Floats  # parameters, gradients, the optimizer's state, buffers of the exchange
    held: Floats  # by a micro-batch that is under way
    deferred: Floats  # by one whose weight gradients are left for later
    working: float  # above that, of the layer that needs most


def times_of(config: Config, whole: LayerCosts, machines: Sequence[Machine]) -> SummedTimes:
    """Of `machines`, one of each kind; `whole` are the layers on one rank at predict.gflops."""
    costs = [_layer_by_layer(config, whole, machine) for machine in machines]
    return SummedTimes(
        forward=_summed_s([cost.forward_us for cost in costs]),
        backward=_summed_s([cost.backward_us for cost in costs]),
        input=_summed_s([cost.input_us for cost in costs]),
        weight=_summed_s([cost.weight_us for cost in costs]),
    )


def _layer_by_layer(config: Config, whole: LayerCosts, machine: Machine) -> Cost:
    """Each layer as a stage of its own, with what is computed again and exchanged in its group."""
    layers = layers_on(config, whole, machine)
    of_group = on_ranks(config, layers)
    cut = (1,) * len(layers.forward_s)
    recompute = config.pipeline.recompute
    any_formats = HopFormats.alike("none", len(cut) - 1)  # only times are asked for
    return stage_cost(of_group, cut, any_formats, recompute=recompute)


def _summed_s(times_us: Sequence[Sequence[float]]) -> Floats:
    rows = []
    for of_layers_us in times_us:
        of_layers_s = np.array(of_layers_us) / 1e6
        rows.append(summed(of_layers_s))
    return np.stack(rows)


def bytes_of_hops(config: Config, whole: LayerCosts, wire: str) -> tuple[Floats, Floats]:
    """Sent behind each layer but the last, forward and backward, in the format `wire`."""
    cut = (1,) * len(whole.forward_s)
    formats = HopFormats.alike(wire, len(cut) - 1)
    alone = stage_cost(whole, cut, formats, recompute="none")  # recomputing changes no message
    cost = at_boundaries(config, alone)
    forward = np.array(cost.activation_bytes, float)
    backward = np.array(cost.gradient_bytes, float)
    return forward, backward


def exchanged_bytes(whole: LayerCosts, kind: str, wire: str) -> Floats:
    """Both ways between replicas, summed up."""
    rounds_answer = KINDS[kind].rounds_answer
    both_ways = []
    for size in whole.parameter_bytes:
        there = wire_bytes(wire, size // _FLOAT_BYTES)
        # Parameters come back exact, unless the kind rounds them as well.
        back = there if rounds_answer else size
        both_ways.append(float(there + back))
    return summed(np.array(both_ways))


def held_of(config: Config, whole: LayerCosts) -> Held:
    """Nothing where nobody asked what layers hold."""
    num_layers = len(whole.forward_s)
    if whole.memory_of is None:
        nothing = np.zeros(num_layers + 1)
        return Held(nothing, nothing, nothing, 0.0)
    cut = (1,) * num_layers
    stages = in_run(config, whole.memory_of(cut))
    static = [_static(stage) for stage in stages]
    layers = [_without_output(stage) for stage in stages]
    held = [sum(part.held_bytes for part in layer) for layer in layers]
    deferred = [sum(part.deferred_bytes for part in layer) for layer in layers]
    working = max(_working(part) for layer in layers for part in layer)
    return Held(
        static=summed(np.array(static)),
        held=summed(np.array(held)),
        deferred=summed(np.array(deferred)),
        working=float(working),
    )


def _static(parts: StageMemory) -> int:
    return sum(
        part.parameter_bytes
        + part.frozen_bytes
        + part.rounded_bytes
        + part.gradient_bytes
        + part.optimizer_bytes
        + part.exchange_bytes
        for part in parts
    )


def _without_output(parts: StageMemory) -> StageMemory:
    """What a stage holds of its output, a layer within a stage does not hold. A layer that was
    measured may be several parts.
    """
    return tuple(part for part in parts if not part.given_bytes)


def _working(layer: LayerMemory) -> int:
    return max(
        layer.forward_bytes,
        layer.backward_bytes + layer.first_bytes,
        layer.input_bytes,
        layer.update_bytes,
    )


def summed(values: Floats | Ints) -> Floats:
    """What is before each layer, and the total."""
    sums = np.zeros(len(values) + 1)
    np.cumsum(values, dtype=float, out=sums[1:])
    return sums
