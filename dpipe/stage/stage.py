"""A stage: some layers of a model, forward and backward, one micro-batch at a time.

    forward   x0 -> [layer 4] -> x1 -> [layer 5] -> x2           one graph a stage, from a leaf that holds its input
    backward  g0 <- [layer 4] <- g1 <- [layer 5] <- g2

What passes between layers is as it would be over a wire, there and back, so that a layer computes
the same bits in any cut. To recompute all is to keep each layer's input alone, a leaf then, and to
make the layer's graph again; a graph is also cut where layers pass on several tensors that learn,
as only the cut gives zeros to one that the next does not use. Nothing here knows of ranks,
neighbours or schedules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dpipe.errors import RunError, TransferError
from dpipe.stage.base import Tensors
from dpipe.stage.linear import Products, WeightGradients, defer_weight_gradients, make
from dpipe.stage.master_weights import MasterWeights
from dpipe.stage.model import Loss, given_by, saved_buffers
from dpipe.stage.recompute import recompute_attention
from dpipe.stage.seeding import seeded
from dpipe.stage.tensor_parallel import Split, leave_uncompiled
from dpipe.streams import upload
from dpipe.wire.spec import TensorSpec

Timed = Callable[
    [str], AbstractContextManager[object]
]  # around a part of the work, by its timer's name

_HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class _Pass:
    """One graph's part of a micro-batch, between forward and backward; `outputs` is None where it
    is made again.
    """

    run: Callable[[Tensors], Tensors]
    inputs: Tensors
    outputs: Tensors | None


class Stage:
    """`layers` by global index, in order, on `device`; the last stage has the `loss`.

    `recompute` "full" holds only the layers' inputs between forward and backward, "selective"
    everything but what is inside an attention core, "none" everything. `precision` "bf16" and
    "fp16" run the layers under autocast; parameters, gradients and what crosses a layer's boundary
    stay fp32. With `parameters` in half precision the layers compute in it, and it crosses the
    boundaries; what is learned, and seen from outside, are their fp32 masters. Micro-batch m draws
    the random numbers of micro-batch `first_microbatch` + m of the whole batch, of which each
    replica has a share. Without `splits_backward`, which `backward_input` needs, linear layers stay
    torch's own: 3 % faster, and the same to the bit. `compiled` layers cannot split it. `split`
    says how the layers were cut for the ranks that hold this stage together, where there are
    several: what lies between their exchanges can be compiled then, and `loss` is the one for such
    ranks. `timed(name)` is around what half precision adds to the update.
    """

    def __init__(
        self,
        index: int,
        layers: Mapping[int, nn.Module],
        *,
        num_microbatches: int,
        loss: Loss | None = None,
        recompute: str = "none",
        precision: str = "fp32",
        parameters: str = "fp32",
        compiled: bool = False,
        seed: int = 0,
        first_microbatch: int = 0,
        splits_backward: bool = True,
        split: Split | None = None,
        device: torch.device | str = "cpu",
        timed: Timed = nullcontext,
    ) -> None:
        self.index = index
        self._first_microbatch = first_microbatch
        self._timed = timed
        self._layers = dict(layers)
        self._loss = loss
        self._last = max(layers)
        self._num_microbatches = num_microbatches
        self._keeps_graph = recompute != "full"
        self._seed = seed
        stored = _HALF[parameters]
        self._device = torch.device(device)
        self._half = _HALF[precision] if stored is None else None
        self._masters = None if stored is None else MasterWeights(self._layers, stored)
        self._stale = True  # whether the masters may have changed since the layers last saw them
        self._passes: dict[int, list[_Pass]] = {}
        self._waiting: dict[int, Products] = {}  # weight gradients that are still to be made
        self._weight_gradients = WeightGradients()
        self._expected: tuple[TensorSpec, ...] | None = None
        self._splits_backward = splits_backward
        self.split = split
        for layer in self._layers.values():
            if recompute == "selective":
                recompute_attention(layer, compiled=compiled and split is None)
            if compiled:
                leave_uncompiled(layer)
                layer.compile()
            elif splits_backward:
                defer_weight_gradients(layer, self._weight_gradients)
        self.begin_step(0)

    def begin_step(self, step: int, loss_scale: float = 1.0) -> None:
        """The random numbers of what follows are those of `step`; its loss is multiplied by
        `loss_scale`.
        """
        self._step = step
        self._loss_factor = loss_scale / self._num_microbatches
        self._stale = True

    def forward(
        self, microbatch: int, inputs: Tensors, targets: torch.Tensor | None = None
    ) -> Tensors:
        """Run the layers and stash what their backward needs. `targets` are for the last stage,
        whose output is the loss: a scalar in fp32, the mean over the micro-batch, not scaled.
        Outputs carry no graph.

        Raises `TransferError` where `inputs` are not as they were at the first micro-batch, and
        `RunError` where the loss is no scalar.
        """
        assert microbatch not in self._passes, f"micro-batch {microbatch} is already stashed"
        self._check_inputs(microbatch, inputs)
        self._refresh()
        targets = None if targets is None else upload(targets, self._device)
        passes: list[_Pass] = []
        for index in self._layers:
            number = self._first_microbatch + microbatch
            run = partial(
                self._run, index, ("draw", self._seed, self._step, number, index), targets
            )
            if passes and self._keeps_graph and _learn_as_one(inputs):
                _go_on(inputs)
            else:
                inputs = self._leaves(index, inputs)
                passes.append(_Pass(run, inputs, None))
            if self._keeps_graph:
                with torch.enable_grad():
                    passes[-1].outputs = inputs = run(inputs)
            else:
                inputs = self._run_first(index, run, inputs)
        self._passes[microbatch] = passes
        return tuple(output.detach() for output in inputs)

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        """All gradients of one micro-batch: the input's are returned, the parameters' added to
        `.grad`.

        `grads` are those of the floating-point outputs, in order; none on the last stage. Returns
        those of the floating-point inputs, in order; none on the first stage, whose inputs are
        data.
        """
        input_grads = self._backward(microbatch, grads)
        make(self._weight_gradients.take())
        self._collect()
        return input_grads

    def backward_input(self, microbatch: int, grads: Tensors) -> Tensors:
        """As `backward`, but leave the weight gradients of linear layers for `backward_weight`."""
        assert self._splits_backward, (
            f"stage {self.index} was made for schedules that do not split the backward pass"
        )
        input_grads = self._backward(microbatch, grads)
        self._waiting[microbatch] = self._weight_gradients.take()
        self._collect()
        return input_grads

    def backward_weight(self, microbatch: int) -> None:
        """Add the weight gradients that `backward_input` of this micro-batch left."""
        make(self._waiting.pop(microbatch))
        self._collect()

    def complete(self) -> None:
        """All gradients of the step are made: add up those of which several ranks have made
        terms.
        """
        if self.split is not None:
            self.split.add_up(self.named_parameters())

    @torch.no_grad()
    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors:
        """As `forward`, in evaluation mode, with nothing stashed."""
        self._refresh()
        targets = None if targets is None else upload(targets, self._device)
        inputs = tuple(upload(tensor, self._device) for tensor in inputs)
        with _evaluation_mode(self._layers.values()):
            for index in self._layers:
                inputs = self._run(index, ("evaluate", self._seed, index), targets, inputs)
        return inputs

    @property
    def held(self) -> int:
        """Micro-batches that are stashed, whole or for their weight gradients alone; 0 after a
        step.
        """
        return len(self._passes) + len(self._waiting)

    def clear(self) -> None:
        """Forget a step that was aborted: the stash and the gradients."""
        self._passes.clear()
        self._waiting.clear()
        self._weight_gradients.take()
        self.zero_grad()

    def layer_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        """Parameters by layer, in order, named for the whole model, such as
        `layers.3.attention.qkv.weight`.
        """
        named: Mapping[int, Iterable[tuple[str, nn.Parameter]]] = (
            self._masters.named
            if self._masters is not None
            else {index: layer.named_parameters() for index, layer in self._layers.items()}
        )
        return {
            i: [(f"layers.{i}.{name}", parameter) for name, parameter in pairs]
            for i, pairs in named.items()
        }

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for named in self.layer_parameters().values():
            yield from named

    def parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def buffers(self) -> Sequence[torch.Tensor]:
        """What layers keep that is not learned, such as running means."""
        return [buffer for layer in self._layers.values() for buffer in layer.buffers()]

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of `buffers` that a checkpoint holds, named as parameters are."""
        for index, layer in self._layers.items():
            yield from ((f"layers.{index}.{name}", buffer) for name, buffer in saved_buffers(layer))

    def zero_grad(self) -> None:
        self._stale = True
        if self._masters is not None:
            self._masters.forget()
        for parameter in self.parameters():
            parameter.grad = None

    def _backward(self, microbatch: int, grads: Tensors) -> Tensors:
        passes = self._passes[microbatch]
        if self._loss is not None:
            assert not grads, "the last stage makes its gradient itself"
            grads = (
                torch.full((), self._loss_factor, device=self._device),
            )  # made there: a copy would be waited for
        while passes:
            grads = self._backward_graph(microbatch, passes.pop(), grads)
        del self._passes[microbatch]
        return grads

    def _backward_graph(self, microbatch: int, graph: _Pass, grads: Tensors) -> Tensors:
        """A call of its own, so that what this graph has made is freed before the next one's is
        made again.
        """
        outputs = graph.run(graph.inputs) if graph.outputs is None else graph.outputs
        self._differentiate(microbatch, outputs, grads)
        return tuple(_taken_grad(leaf) for leaf in graph.inputs if leaf.requires_grad)

    def _run_first(self, index: int, run: Callable[[Tensors], Tensors], inputs: Tensors) -> Tensors:
        """A forward pass of a layer that backward runs again. Raises `RunError` where that would be
        another one.
        """
        layer = self._layers[index]
        before = _buffers_of(layer)
        with torch.no_grad():
            outputs = run(inputs)
        if _buffers_of(layer) != before:
            raise RunError(
                f"layer {index} ({type(layer).__name__}) changes its buffers as it runs, and is "
                "run twice with "
                'pipeline.recompute = "full": set it to "none", or let the layer keep its buffers'
            )
        return outputs

    def _refresh(self) -> None:
        if self._masters is not None and self._stale:
            with self._timed("optimizer-copy-main-to-model-params"):
                self._masters.refresh()
        self._stale = False

    def _collect(self) -> None:
        if self._masters is not None:
            with self._timed("optimizer-copy-to-main-grad"):
                self._masters.collect()

    def _run(
        self,
        index: int,
        draw_key: tuple[str | int, ...],
        targets: torch.Tensor | None,
        inputs: Tensors,
    ) -> Tensors:
        """One layer, and the loss behind the model's last."""
        layer = self._layers[index]
        # A layer is taken to draw random numbers unless it says that it does not.
        drawing = (
            seeded(*draw_key, device=self._device)
            if getattr(layer, "draws", True)
            else nullcontext()
        )
        try:
            with drawing, self._autocast():
                returned = layer(*inputs)
            outputs = self._canonical(given_by(index, layer, returned))
            if self._loss is not None and index == self._last:
                outputs = (
                    self._learnable(_scalar(self._loss(*map(_single, outputs), targets)), inputs),
                )
        except Exception as error:
            error.add_note(f"in layer {index} ({type(layer).__name__}) of stage {self.index}")
            raise
        return outputs

    def _learnable(self, loss: torch.Tensor, inputs: Tensors) -> torch.Tensor:
        """Raises `RunError` for a training step's loss without a graph: it would go on, and teach
        nobody anything.

        Where there is nothing to learn, as every parameter is frozen, none is asked for.
        """
        if loss.requires_grad or not torch.is_grad_enabled():
            return loss
        parameters = (
            parameter for layer in self._layers.values() for parameter in layer.parameters()
        )
        if any(learner.requires_grad for learner in (*inputs, *parameters)):
            raise RunError(
                "the loss has no gradient, so that nothing would learn: let the last layers and "
                "the model's loss "
                "function go without .detach(), .item() and torch.no_grad()"
            )
        return loss

    def _autocast(self) -> AbstractContextManager[object]:
        return (
            nullcontext() if self._half is None else torch.autocast(self._device.type, self._half)
        )

    def _canonical(self, outputs: Tensors) -> Tensors:
        """As they would arrive over a wire, so that a neighbour in the same stage sees the same:
        contiguous, fp32.
        """
        return tuple((o.float() if o.dtype is self._half else o).contiguous() for o in outputs)

    def _leaves(self, layer: int, inputs: Tensors) -> Tensors:
        """What a graph starts from; the inputs of the whole model need no gradient."""
        moved = [upload(tensor.detach(), self._device) for tensor in inputs]
        return tuple(t.requires_grad_(layer > 0 and t.is_floating_point()) for t in moved)

    def _differentiate(self, microbatch: int, outputs: Tensors, grads: Tensors) -> None:
        floating = [output for output in outputs if output.is_floating_point()]
        expected, got = ([tuple(t.shape) for t in tensors] for tensors in (floating, grads))
        if expected != got:
            raise TransferError(
                f"stage {self.index}, micro-batch {microbatch}: gradients of shapes {got} came "
                "back for outputs of "
                f"shapes {expected}; the stage behind must return one for each floating-point "
                "tensor it was given"
            )
        pairs = [
            (o, g.to(o.device)) for o, g in zip(floating, grads, strict=True) if o.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])

    def _check_inputs(self, microbatch: int, inputs: Tensors) -> None:
        got = tuple(TensorSpec.of(tensor) for tensor in inputs)
        self._expected = self._expected or got
        if got != self._expected:
            raise TransferError(
                f"stage {self.index}, micro-batch {microbatch}: expected {_listed(self._expected)} "
                "as at the first "
                f"micro-batch, got {_listed(got)}; shapes and dtypes must not change during a run"
            )


def _single(tensor: torch.Tensor) -> torch.Tensor:
    """As a loss takes it: in fp32, whatever the layers compute in."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _scalar(loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise RunError(
            f"the model's loss function returned {type(loss).__name__}; it must return a scalar "
            "tensor, the mean over "
            "the micro-batch"
        )
    if loss.dim():
        raise RunError(
            f"the loss is of shape {list(loss.shape)}; it must be a scalar, the mean over the "
            "micro-batch: end the "
            "model's loss function with .mean()"
        )
    return loss.float()


def _buffers_of(layer: nn.Module) -> list[tuple[int, int]]:
    """Which they are, and how often each has been written to."""
    return [(id(buffer), buffer._version) for buffer in layer.buffers()]


def _learn_as_one(tensors: Tensors) -> bool:
    """Whether one of them has a gradient: of several, one that a layer does not use would have
    none, and not zeros.
    """
    return sum(tensor.is_floating_point() for tensor in tensors) == 1


def _go_on(tensors: Tensors) -> None:
    """Within a graph a gradient is passed on as `_taken_grad` would give it: products may round by
    their strides.
    """
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(torch.Tensor.contiguous)


def _taken_grad(leaf: torch.Tensor) -> torch.Tensor:
    """A gradient as it would go over a wire: zeros where the layer did not use the input."""
    return torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.contiguous()


def _listed(specs: Iterable[TensorSpec]) -> str:
    return "(" + ", ".join(map(str, specs)) + ")"


@contextmanager
def _evaluation_mode(layers: Iterable[nn.Module]) -> Iterator[None]:
    """Each module goes back to the mode it was in: a user may keep some in evaluation mode."""
    modules = [module for layer in layers for module in layer.modules()]
    modes = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
