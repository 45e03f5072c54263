"""Between stages of T ranks each: a rank sends its part of the activation, not all of it (Narayanan
et al. 2021).

    stage s, rank 0  [a b] ──a──> rank 0  [a] ──gather──> [a b]  stage s + 1
             rank 1  [a b] ──b──> rank 1  [b] ──gather──> [a b]

All ranks of a stage hold the same activation: so it crosses the network once, and is put together
on the machine behind it. The gradient comes back in the same way. What is no floating-point number
is small, and goes whole.
"""

import torch

from dpipe.stage.base import Tensors
from dpipe.stage.stage import Stage
from dpipe.stage.tensor_group import TensorGroup
from dpipe.wire.spec import TensorSpec

_WIDTH = -1  # the dimension that is cut


class Scattered:
    """A stage as the executor sees it: what it is given by another stage, and gives to one, are
    this rank's parts.
    """

    def __init__(self, stage: Stage, group: TensorGroup, *, first: bool, last: bool) -> None:
        self._stage = stage
        self._group = group
        self._first = first
        self._last = last

    @property
    def held(self) -> int:
        return self._stage.held

    def forward(
        self, microbatch: int, inputs: Tensors, targets: torch.Tensor | None = None
    ) -> Tensors:
        return self._part(
            self._stage.forward(microbatch, self._whole(inputs, self._first), targets), self._last
        )

    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors:
        return self._part(
            self._stage.evaluate(self._whole(inputs, self._first), targets), self._last
        )

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        return self._part(
            self._stage.backward(microbatch, self._whole(grads, self._last)), self._first
        )

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        return self._part(
            self._stage.backward_input(microbatch, self._whole(grads, self._last)), self._first
        )

    def backward_weight(self, microbatch: int) -> None:
        self._stage.backward_weight(microbatch)

    def complete(self) -> None:
        self._stage.complete()

    def clear(self) -> None:
        self._stage.clear()

    def _whole(self, tensors: Tensors, at_the_end: bool) -> Tensors:
        if at_the_end:
            return tensors
        return tuple(
            self._group.all_gather(t, _WIDTH) if t.is_floating_point() else t for t in tensors
        )

    def _part(self, tensors: Tensors, at_the_end: bool) -> Tensors:
        if at_the_end:
            return tensors
        cut = (
            self._group.part(t, _WIDTH).contiguous() if t.is_floating_point() else t
            for t in tensors
        )
        return tuple(cut)


def part_spec(spec: TensorSpec, size: int) -> TensorSpec:
    """What of a boundary between stages one of `size` ranks sends."""
    if not spec.dtype.is_floating_point:
        return spec
    return spec._replace(shape=(*spec.shape[:-1], spec.shape[-1] // size))
