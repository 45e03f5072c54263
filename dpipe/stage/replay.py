"""A stage whose compute is a wait: real bytes and no arithmetic, to measure the engine alone."""

import os
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from dpipe.errors import TransferError
from dpipe.stage.base import Tensors
from dpipe.wire.spec import TensorSpec

_EARLY_S = 150e-6  # how late a sleep may end: the rest is spent awake


class ReplayStage:
    """Looks like a `Stage`. Each message is `message_bytes // 4` fp32 values; the loss is 0.

    With `num_slices` of each sequence a forward or backward pass is of one slice: so many times
    shorter, and so are its messages; an evaluation is of whole micro-batches.

    It has `parameter_bytes // 4` parameters, all 0 like their gradient, for replicas to exchange.
    `input_share` of `backward_s` makes the input gradient, the rest the weight gradients. The ranks
    of a tensor-parallel group call `exchange` `num_exchanges` times in each forward and each input
    gradient.
    """

    split = None

    def __init__(
        self,
        index: int,
        *,
        num_microbatches: int,
        num_slices: int = 1,
        forward_s: float,
        backward_s: float,
        input_share: float,
        message_bytes: int,
        parameter_bytes: int = 0,
        first: bool,
        last: bool,
        exchange: Callable[[], None] = lambda: None,
        num_exchanges: int = 0,
    ) -> None:
        self.index = index
        self._num_pieces = num_microbatches * num_slices
        self._evaluation_s = forward_s
        self._forward_s = forward_s / num_slices
        self._backward_s = backward_s / num_slices
        self._input_s = self._backward_s * input_share
        self._weight_s = self._backward_s * (1 - input_share)
        self._exchange = exchange
        self._num_exchanges = num_exchanges
        # Never written to, so that every message can be the same tensor.
        message = torch.zeros(message_bytes // 4)
        piece = message[: len(message) // num_slices]
        self._whole = _at_ends(message, first, last)
        self._inputs, self._outputs = _at_ends(piece, first, last)
        nothing: Tensors = ()
        self._output_grads = nothing if last else (piece,)
        self._parameter = nn.Parameter(torch.zeros(parameter_bytes // 4))
        self._gradient = torch.zeros_like(self._parameter)
        self._num_backwards = 0  # in this step, with the weight gradient
        self._stashed: set[int] = set()
        self._waiting: set[int] = set()

    def begin_step(self, step: int, loss_scale: float = 1.0) -> None:
        self._num_backwards = 0

    def forward(
        self, microbatch: int, inputs: Tensors, targets: torch.Tensor | None = None
    ) -> Tensors:
        self._check("input", inputs, self._inputs)
        self._compute(self._forward_s)
        self._stashed.add(microbatch)
        return self._outputs

    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors:
        expected, outputs = self._whole
        self._check("input", inputs, expected)
        self._compute(self._evaluation_s)
        return outputs

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        inputs = self._take_grads(microbatch, grads, self._backward_s)
        self._count_backward()
        return inputs

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        self._waiting.add(microbatch)
        return self._take_grads(microbatch, grads, self._input_s)

    def backward_weight(self, microbatch: int) -> None:
        self._waiting.remove(microbatch)
        wait(self._weight_s)
        self._count_backward()

    def complete(self) -> None:
        pass

    @property
    def held(self) -> int:
        return len(self._stashed | self._waiting)

    def clear(self) -> None:
        self._stashed.clear()
        self._waiting.clear()
        self.zero_grad()

    def layer_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        if not self._parameter.numel():
            return {}
        return {self.index: list(self.named_parameters())}

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for parameter in self.parameters():
            yield f"layers.{self.index}.weight", parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from ()

    def buffers(self) -> Sequence[torch.Tensor]:
        return ()

    def parameters(self) -> Sequence[nn.Parameter]:
        return (self._parameter,) if self._parameter.numel() else ()

    def zero_grad(self) -> None:
        self._parameter.grad = None

    def _count_backward(self) -> None:
        # The gradient is there once it is complete, as that of a stage that adds it up.
        self._num_backwards += 1
        if self._num_backwards == self._num_pieces:
            self._parameter.grad = self._gradient

    def _take_grads(self, microbatch: int, grads: Tensors, seconds: float) -> Tensors:
        self._stashed.remove(microbatch)
        self._check("gradient", grads, self._output_grads)
        self._compute(seconds)
        return self._inputs

    def _compute(self, seconds: float) -> None:
        """Wait, with exchanges evenly spread over it, as those of layers are."""
        for _ in range(self._num_exchanges):
            wait(seconds / self._num_exchanges)
            self._exchange()
        if not self._num_exchanges:
            wait(seconds)

    def _check(self, what: str, tensors: Tensors, like: Tensors) -> None:
        expected = [str(TensorSpec.of(tensor)) for tensor in like]
        arrived = [str(TensorSpec.of(tensor)) for tensor in tensors]
        if expected != arrived:
            raise TransferError(
                f"replay stage {self.index} expected {expected} as its {what}, got {arrived}; "
                "replay.message_bytes must be the same on every rank"
            )


def _at_ends(message: torch.Tensor, first: bool, last: bool) -> tuple[Tensors, Tensors]:
    """Inputs and outputs of a stage that passes on `message`."""
    inputs: Tensors = () if first else (message,)
    outputs: Tensors = (torch.zeros(()),) if last else (message,)
    return inputs, outputs


def wait(seconds: float) -> None:
    """Return `seconds` from now, to a few us: sleep until shortly before, then yield the core."""
    deadline = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _EARLY_S))
    while time.perf_counter() < deadline:
        os.sched_yield()  # even a sleep of 0 s may take 60 us
