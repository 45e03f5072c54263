"""The contract of a stage. `Stage` and `ReplayStage` keep it; `Scattered`, which stands between a
stage and the executor, keeps the part that computes.

    begin_step   forward 0   forward 1   backward 0   backward 1   complete   zero_grad
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from dpipe.stage.tensor_parallel import Split

Tensors = tuple[torch.Tensor, ...]


class ComputingStage(Protocol):
    """What the executor asks: forward and backward of one micro-batch, by its number in the step.

    `inputs` and `grads` are what arrived from the neighbours, and what is returned goes to them;
    no graph crosses the boundary. Gradients of parameters are added up in `.grad`.
    """

    @property
    def held(self) -> int:
        """Micro-batches that wait for their backward pass, or for a part of it; 0 after a step."""

    def forward(
        self, microbatch: int, inputs: Tensors, targets: torch.Tensor | None = None
    ) -> Tensors:
        """Run the layers and keep what backward needs. The last stage gets `targets` and returns
        the micro-batch's mean loss, a scalar.
        """

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        """The gradients of the inputs; those of parameters are added up."""

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        """As `backward`, but what only `backward_weight` needs waits for it."""

    def backward_weight(self, microbatch: int) -> None: ...

    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors:
        """As `forward`, in evaluation mode; keeps nothing. The last stage may return the accuracy
        behind the loss.
        """

    def complete(self) -> None:
        """All gradients of the step are made: add what other ranks of the tensor-parallel group
        have made of them.
        """

    def clear(self) -> None:
        """Forget a step that was aborted: what is held, and the gradients."""


class PipelineStage(ComputingStage, Protocol):
    """A stage as it is trained, evaluated and saved. Names hold for the whole model, such as
    `layers.3.attention.qkv.weight`.
    """

    @property
    def split(self) -> Split | None:
        """How its layers are cut over a tensor-parallel group; None on one rank."""

    def begin_step(self, step: int, loss_scale: float = 1.0) -> None:
        """Random numbers are those of `step` from here on; losses are multiplied by `loss_scale`
        for backward.
        """

    def zero_grad(self) -> None: ...

    def layer_parameters(self) -> Mapping[int, Sequence[tuple[str, nn.Parameter]]]:
        """Parameters by name, of each layer by its number."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def parameters(self) -> Sequence[nn.Parameter]: ...

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers that a checkpoint holds."""

    def buffers(self) -> Sequence[torch.Tensor]:
        """All buffers that may change, those that are not saved too."""
