"""Between stages of T ranks each: a rank sends its part of an activation, not all of it (Narayanan
et al. 2021, scatter/gather).

    stage s, rank 0  [a b] ──a──> rank 0  [a] ──gather──> [a b]  stage s + 1
             rank 1  [a b] ──b──> rank 1  [b] ──gather──> [a b]

All ranks of a stage hold the same activation: so it crosses the network once, and the machine
behind puts it together. The gradient comes back in the same way. Tensors of integers are small, and
go whole.
"""

import torch

from dpipe.stage.base import ComputingStage, Tensors
from dpipe.stage.tensor_group import TensorGroup
from dpipe.wire.spec import TensorSpec

_WIDTH = -1  # the dimension that is cut


class Scattered:
    """A stage as the executor sees it: between stages it takes and gives this rank's parts.

    The `first` stage's inputs and the `last` one's outputs stay whole.
    """

    def __init__(
        self, stage: ComputingStage, group: TensorGroup, *, first: bool, last: bool
    ) -> None:
        self._stage = stage
        self._group = group
        self._first = first
        self._last = last

    @property
    def held(self) -> int:
        return self._stage.held

    def forward(
        self,
        microbatch: int,
        inputs: Tensors,
        targets: torch.Tensor | None = None,
    ) -> Tensors:
        inputs = self._whole(inputs, self._first)
        outputs = self._stage.forward(microbatch, inputs, targets)
        return self._part(outputs, self._last)

    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors:
        outputs = self._stage.evaluate(self._whole(inputs, self._first), targets)
        return self._part(outputs, self._last)

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        input_grads = self._stage.backward(microbatch, self._whole(grads, self._last))
        return self._part(input_grads, self._first)

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        input_grads = self._stage.backward_input(microbatch, self._whole(grads, self._last))
        return self._part(input_grads, self._first)

    def backward_weight(self, microbatch: int) -> None:
        self._stage.backward_weight(microbatch)

    def complete(self) -> None:
        self._stage.complete()

    def clear(self) -> None:
        self._stage.clear()

    def _whole(self, tensors: Tensors, at_an_end: bool) -> Tensors:
        if at_an_end:
            return tensors
        return tuple(self._gathered(tensor) for tensor in tensors)

    def _part(self, tensors: Tensors, at_an_end: bool) -> Tensors:
        if at_an_end:
            return tensors
        return tuple(self._part_of(tensor) for tensor in tensors)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return self._group.all_gather(tensor, _WIDTH)

    def _part_of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        return self._group.part(tensor, _WIDTH).contiguous()  # a transport sends memory as it lies


def part_spec(spec: TensorSpec, size: int) -> TensorSpec:
    """What one of `size` ranks sends of a tensor between stages."""
    if not spec.dtype.is_floating_point:
        return spec
    *others, width = spec.shape
    return spec._replace(shape=(*others, width // size))
