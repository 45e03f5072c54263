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
from dpipe.memory.walk import StageMemory
from dpipe.placement.fleet import Floats, Ints
from dpipe.plan.costs import LayerCosts, on_ranks, stage_cost
from dpipe.plan.on_machines import layers_on
from dpipe.plan.tensor_parallel import at_boundaries
from dpipe.wire.format import wire_bytes

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
    working: float  # above that, of the layer that needs most


def times_of(config: Config, whole: LayerCosts, machines: Sequence[Machine]) -> SummedTimes:
    """Of `machines`, one of each kind; `whole` are the layers on one rank at predict.gflops."""
    rows = [_seconds(config, layers_on(config, whole, machine)) for machine in machines]
    return SummedTimes(*map(np.stack, zip(*rows, strict=True)))


def _seconds(config: Config, layers: LayerCosts) -> tuple[Floats, Floats, Floats, Floats]:
    # Each layer as a stage of its own, with what is computed again and exchanged in its group.
    cut = (1,) * len(layers.forward_s)
    alone = stage_cost(on_ranks(config, layers), cut, recompute=config.pipeline.recompute)
    return (
        _summed_s(alone.forward_us),
        _summed_s(alone.backward_us),
        _summed_s(alone.input_us),
        _summed_s(alone.weight_us),
    )


def _summed_s(times_us: Sequence[float]) -> Floats:
    return summed(np.array(times_us) / 1e6)


def bytes_of_hops(config: Config, whole: LayerCosts) -> tuple[Floats, Floats]:
    """Sent behind each layer but the last, forward and backward, in the format of `config`."""
    alone = stage_cost(whole, (1,) * len(whole.forward_s), recompute="none")
    cost = at_boundaries(config, alone)
    return np.array(cost.activation_bytes, float), np.array(cost.gradient_bytes, float)


def exchanged_bytes(whole: LayerCosts, kind: str, wire: str) -> Floats:
    """Both ways between replicas, summed up."""
    there = [wire_bytes(wire, size // _FLOAT_BYTES) for size in whole.parameter_bytes]
    home = there if KINDS[kind].rounds_answer else list(whole.parameter_bytes)
    return summed(np.array(there, float) + np.array(home, float))


def held_of(config: Config, whole: LayerCosts) -> Held:
    """Nothing where nobody asked what layers hold."""
    num_layers = len(whole.forward_s)
    if whole.memory_of is None:
        nothing = np.zeros(num_layers + 1)
        return Held(nothing, nothing, 0.0)
    layers = in_run(config, whole.memory_of((1,) * num_layers))
    return Held(
        summed(np.array([_static(layer) for layer in layers], float)),
        summed(np.array([_held(layer) for layer in layers], float)),
        float(max(_working(layer) for layer in layers)),
    )


def _static(parts: StageMemory) -> int:
    return sum(
        part.parameter_bytes
        + part.rounded_bytes
        + part.gradient_bytes
        + part.optimizer_bytes
        + part.exchange_bytes
        for part in parts
    )


def _held(parts: StageMemory) -> int:
    # The last part is what a stage holds of its output, which a layer within a stage does not.
    return parts[0].held_bytes


def _working(parts: StageMemory) -> int:
    layer = parts[0]
    return max(
        layer.forward_bytes,
        layer.backward_bytes + layer.first_bytes,
        layer.input_bytes,
        layer.update_bytes,
    )


def summed(values: Floats | Ints) -> Floats:
    """What is before each layer, and the total."""
    return np.concatenate([[0.0], np.cumsum(values, dtype=float)])
