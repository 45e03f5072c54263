"""A stage: some layers of a model, forward and backward, one micro-batch at a time.

    forward   x0 -> [layer 4] -> x1 -> [layer 5] -> x2      one graph, from the leaf x0
    backward  g0 <- [layer 4] <- g1 <- [layer 5] <- g2

What layers pass on is contiguous and in the stored precision, as after a hop over a wire: a layer
computes the same bits wherever the model is cut. With `recompute="full"` only each layer's input is
kept; backward rebuilds its graph. A graph is also cut where a layer passes on several
differentiable tensors: autograd returns None, not zeros, for an unused one. A stage knows nothing
of ranks, neighbours or schedules.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from dpipe.errors import RunError, TransferError
from dpipe.passes.linear import Products, WeightGradients, defer_weight_gradients, make
from dpipe.passes.recompute import recompute_attention
from dpipe.passes.seeding import seeded
from dpipe.passes.slices import Slices, tell_slices
from dpipe.stage.base import Tensors
from dpipe.stage.master_weights import MasterWeights
from dpipe.stage.model import Loss, as_tensors, changing_buffers, saved_buffers
from dpipe.stage.tensor_parallel import Split, leave_uncompiled
from dpipe.streams import upload
from dpipe.wire.spec import TensorSpec

# Called with a timer's name: times a part of the work.
Timed = Callable[[str], AbstractContextManager[object]]

_HALF = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(slots=True)
class _Graph:
    """One autograd graph of a micro-batch, between forward and backward."""

    run: Callable[[Tensors], Tensors]
    inputs: Tensors  # leaves
    outputs: Tensors | None  # None: backward makes them again


class Stage:
    """`layers` by global index, in order, on `device`; the last stage has the `loss`.

    `recompute`          what is kept between forward and backward: "full" the layers' inputs alone,
                         "selective" all but the inside of attention cores, "none" everything
    `precision`          "bf16" and "fp16" run the layers under autocast; parameters, gradients and
                         what crosses a layer's boundary stay fp32
    `parameters`         in half precision, layers compute in it and pass it on; what is learned,
                         and seen from outside, are fp32 master weights
    `num_slices`         of each sequence: the numbers of micro-batches are then those of slices
                         (`passes/slices.py`), but for an evaluation, whose sequences are whole
    `first_microbatch`   this replica's first in the whole batch: micro-batch m draws the random
                         numbers of `first_microbatch` + m
    `splits_backward`    prepare for `backward_input`; without it linear layers stay torch's own,
                         which is 3 % faster and the same to the bit
    `compiled`           by torch.compile; such layers cannot split the backward pass
    `split`              the tensor-parallel sharding, None on one rank. With it, only the code
                         between collectives is compiled, and `loss` is the group's
    `frozen`             the model's first layers, of which nothing learns: they keep nothing
    `accuracy`           of the last stage: measured beside the loss, in evaluations
    `timed`              called around what master weights add to a step
    """

    def __init__(
        self,
        index: int,
        layers: Mapping[int, nn.Module],
        *,
        num_microbatches: int,
        num_slices: int = 1,
        loss: Loss | None = None,
        recompute: str = "none",
        precision: str = "fp32",
        parameters: str = "fp32",
        compiled: bool = False,
        seed: int = 0,
        first_microbatch: int = 0,
        splits_backward: bool = True,
        split: Split | None = None,
        frozen: int = 0,
        accuracy: Loss | None = None,
        device: torch.device | str = "cpu",
        timed: Timed = nullcontext,
    ) -> None:
        self.index = index
        self.split = split
        self._first_microbatch = first_microbatch
        self._timed = timed
        self._layers = dict(layers)
        self._loss = loss
        self._accuracy = accuracy
        self._num_pieces = num_microbatches * num_slices
        self._slices = Slices(num_slices)
        self._keeps_graph = recompute != "full"
        self._splits_backward = splits_backward
        self._seed = seed
        self._frozen = frozen
        self._device = torch.device(device)
        stored = _HALF[parameters]
        self._half = _HALF[precision] if stored is None else None
        self._masters = None if stored is None else MasterWeights(self._layers, stored)
        self._hold_nothing()
        self._prepare_layers(recompute, compiled)
        self.begin_step(0)

    def _hold_nothing(self) -> None:
        self._graphs: dict[int, list[_Graph]] = {}
        self._waiting: dict[int, Products] = {}  # weight gradients that `backward_weight` will make
        self._weight_gradients = WeightGradients()
        self._expected: tuple[TensorSpec, ...] | None = None  # of the first micro-batch's inputs

    def _prepare_layers(self, recompute: str, compiled: bool) -> None:
        if self._slices.num_slices > 1:
            tell_slices(self._layers.values(), self._slices)
        for layer in self._layers.values():
            if recompute == "selective":
                recompute_attention(layer, compiled=compiled and self.split is None)
            if compiled:
                leave_uncompiled(layer)
                layer.compile()
            # Not both: a compiled layer makes its two gradients together.
            elif self._splits_backward:
                defer_weight_gradients(layer, self._weight_gradients)

    def begin_step(self, step: int, loss_scale: float = 1.0) -> None:
        """What follows draws the random numbers of `step`; its loss is multiplied by
        `loss_scale`.
        """
        self._step = step
        self._loss_factor = loss_scale / self._num_pieces
        self._stale = True  # the layers have yet to be given the masters' values

    def forward(
        self, microbatch: int, inputs: Tensors, targets: torch.Tensor | None = None
    ) -> Tensors:
        """Run the layers and stash what their backward needs. Outputs carry no graph.

        `targets` are for the last stage, whose output is the loss: a scalar in fp32, the mean over
        the micro-batch, not scaled.

        Raises `TransferError` if `inputs` are not as they were at the first micro-batch, and
        `RunError` if the loss is no scalar.
        """
        assert microbatch not in self._graphs, f"micro-batch {microbatch} is already stashed"
        self._check_inputs(microbatch, inputs)
        self._refresh()
        targets = None if targets is None else upload(targets, self._device)
        number = self._first_microbatch + microbatch
        with self._slices.at(microbatch):
            graphs, outputs = self._forward(number, inputs, targets)
        self._graphs[microbatch] = graphs
        return tuple(output.detach() for output in outputs)

    def _forward(
        self, number: int, inputs: Tensors, targets: torch.Tensor | None
    ) -> tuple[list[_Graph], Tensors]:
        """`number` is that of the micro-batch in the whole batch."""
        graphs: list[_Graph] = []
        for index in self._layers:
            draw_key = ("draw", self._seed, self._step, number, index)
            # Bound to its key: backward may run it again, when the step's other draws are made.
            run = partial(self._run, index, draw_key, targets)
            if index < self._frozen:
                inputs = self._run_frozen(run, inputs)
                continue
            if graphs and self._keeps_graph and _has_one_gradient(inputs):
                _make_gradients_contiguous(inputs)
            else:
                inputs = self._leaves(index, inputs)
                graphs.append(_Graph(run, inputs, None))
            if self._keeps_graph:
                with torch.enable_grad():
                    inputs = run(inputs)
                graphs[-1].outputs = inputs
            else:
                inputs = self._run_first(index, run, inputs)
        return graphs, inputs

    def backward(self, microbatch: int, grads: Tensors) -> Tensors:
        """All gradients of one micro-batch: returns the inputs', adds the parameters' to `.grad`.

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
        """After the last backward of a step: sum gradients over the tensor-parallel group, where
        each rank has some terms.
        """
        if self.split is not None:
            self.split.add_up(self.named_parameters())

    @torch.no_grad()
    def evaluate(self, inputs: Tensors, targets: torch.Tensor | None = None) -> Tensors:
        """As `forward`, in evaluation mode, with nothing stashed. The last stage returns the loss,
        and the accuracy where there is one.
        """
        self._refresh()
        targets = None if targets is None else upload(targets, self._device)
        inputs = tuple(upload(tensor, self._device) for tensor in inputs)
        with _evaluation_mode(self._layers.values()):
            for index in self._layers:
                key = ("evaluate", self._seed, index)
                inputs = self._run(index, key, targets, inputs, self._accuracy)
        return inputs

    @property
    def held(self) -> int:
        """Stashed micro-batches, those that wait for `backward_weight` included; 0 after a step."""
        return len(self._graphs) + len(self._waiting)

    def clear(self) -> None:
        """Forget a step that was aborted: the stash and the gradients."""
        self._graphs.clear()
        self._waiting.clear()
        self._slices.clear()
        self._weight_gradients.take()
        self.zero_grad()

    def layer_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        """Parameters by layer, in order, named as in the whole model:
        `layers.3.attention.qkv.weight`.
        """
        in_model: dict[int, list[tuple[str, nn.Parameter]]] = {}
        for index, layer in self._layers.items():
            named: Iterable[tuple[str, nn.Parameter]] = layer.named_parameters()
            if self._masters is not None:
                named = self._masters.named[index]
            in_model[index] = [(f"layers.{index}.{name}", parameter) for name, parameter in named]
        return in_model

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for named in self.layer_parameters().values():
            yield from named

    def parameters(self) -> Sequence[nn.Parameter]:
        return [parameter for _, parameter in self.named_parameters()]

    def buffers(self) -> Sequence[torch.Tensor]:
        """What layers keep that is not learned and may change, such as running means."""
        return [buffer for layer in self._layers.values() for buffer in changing_buffers(layer)]

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of `buffers` that a checkpoint holds, named as parameters are."""
        for index, layer in self._layers.items():
            for name, buffer in saved_buffers(layer):
                yield f"layers.{index}.{name}", buffer

    def zero_grad(self) -> None:
        self._stale = True
        if self._masters is not None:
            self._masters.forget()
        for parameter in self.parameters():
            parameter.grad = None

    def _backward(self, microbatch: int, grads: Tensors) -> Tensors:
        graphs = self._graphs[microbatch]
        if self._loss is not None:
            assert not grads, "the last stage makes its gradient itself"
            # Made on the device: the host would wait for a copy.
            grads = (torch.full((), self._loss_factor, device=self._device),)
        # A graph may have to be made again.
        with self._slices.at(microbatch):
            # Popped, so that each graph is freed as soon as it has been gone through.
            while graphs:
                grads = self._backward_graph(microbatch, graphs.pop(), grads)
        del self._graphs[microbatch]
        self._slices.forget(microbatch)
        return grads

    def _backward_graph(self, microbatch: int, graph: _Graph, grads: Tensors) -> Tensors:
        """A call of its own, so that this graph's tensors are freed before the next graph is
        rebuilt.
        """
        outputs = graph.outputs
        if outputs is None:
            outputs = graph.run(graph.inputs)
        self._differentiate(microbatch, outputs, grads)
        return tuple(_taken_grad(leaf) for leaf in graph.inputs if leaf.requires_grad)

    @torch.no_grad()
    def _run_frozen(self, run: Callable[[Tensors], Tensors], inputs: Tensors) -> Tensors:
        return run(tuple(upload(tensor, self._device) for tensor in inputs))

    def _run_first(self, index: int, run: Callable[[Tensors], Tensors], inputs: Tensors) -> Tensors:
        """A forward pass of a layer that backward runs again. Raises `RunError` if the layer writes
        to its buffers, because the second pass would see other values.
        """
        layer = self._layers[index]
        before = _buffer_versions(layer)
        with torch.no_grad():
            outputs = run(inputs)
        if _buffer_versions(layer) != before:
            raise RunError(
                f"layer {index} ({type(layer).__name__}) changes its buffers as it runs, and "
                'pipeline.recompute = "full" runs it twice: set it to "none", or let the layer '
                "keep its buffers"
            )
        return outputs

    def _refresh(self) -> None:
        # At the first forward of a step: the exchange between replicas may have ended only then.
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
        accuracy: Loss | None = None,
    ) -> Tensors:
        """One layer, and the loss behind the model's last, and the accuracy if that is given."""
        layer = self._layers[index]
        # A layer is taken to draw random numbers unless it says that it does not.
        drawing: AbstractContextManager[None] = nullcontext()
        if getattr(layer, "draws", True):
            drawing = seeded(*draw_key, device=self._device)
        try:
            with drawing, self._autocast():
                returned = layer(*inputs)
            outputs = self._as_after_a_hop(as_tensors(index, layer, returned))
            if self._loss is not None and index == max(self._layers):
                predictions = tuple(map(_as_float, outputs))
                loss = _scalar(self._loss(*predictions, targets))
                outputs = (self._learnable(loss, inputs),)
                if accuracy is not None:
                    outputs += (_scalar(accuracy(*predictions, targets)),)
        except Exception as error:
            error.add_note(f"in layer {index} ({type(layer).__name__}) of stage {self.index}")
            raise
        return outputs

    def _learnable(self, loss: torch.Tensor, inputs: Tensors) -> torch.Tensor:
        """Raises `RunError` for a training step's loss without a graph: the run would learn
        nothing. A stage whose parameters are all frozen, with nothing to pass back, needs none.
        """
        if loss.requires_grad or not torch.is_grad_enabled():
            return loss
        learners = [*inputs]
        for layer in self._layers.values():
            learners += layer.parameters()
        if any(learner.requires_grad for learner in learners):
            raise RunError(
                "the loss has no gradient, so that nothing would learn: remove .detach(), .item() "
                "and torch.no_grad() from the last layers and the model's loss function"
            )
        return loss

    def _autocast(self) -> AbstractContextManager[object]:
        if self._half is None:
            return nullcontext()
        return torch.autocast(self._device.type, self._half)

    def _as_after_a_hop(self, outputs: Tensors) -> Tensors:
        """Contiguous, and fp32 where autocast made half precision: the next layer sees the same in
        this stage as on another rank.
        """
        half = self._half
        return tuple((out.float() if out.dtype is half else out).contiguous() for out in outputs)

    def _leaves(self, layer: int, inputs: Tensors) -> Tensors:
        """What a graph starts from. The inputs of the first layer that learns need no gradient."""
        moved = [upload(tensor.detach(), self._device) for tensor in inputs]
        learns_below = layer > self._frozen
        return tuple(t.requires_grad_(learns_below and t.is_floating_point()) for t in moved)

    def _differentiate(self, microbatch: int, outputs: Tensors, grads: Tensors) -> None:
        floating = [out for out in outputs if out.is_floating_point()]
        expected = [tuple(out.shape) for out in floating]
        arrived = [tuple(grad.shape) for grad in grads]
        if expected != arrived:
            raise TransferError(
                f"stage {self.index}, micro-batch {microbatch}: gradients of shapes {arrived} came "
                f"back for outputs of shapes {expected}; the next stage must return one for each "
                "floating-point tensor that it was given"
            )
        starts: list[torch.Tensor] = []
        start_grads: list[torch.Tensor] = []
        for output, grad in zip(floating, grads, strict=True):
            if output.requires_grad:  # not what a layer only passes on from data
                starts.append(output)
                start_grads.append(grad.to(output.device))
        if starts:
            torch.autograd.backward(starts, start_grads)

    def _check_inputs(self, microbatch: int, inputs: Tensors) -> None:
        arrived = tuple(TensorSpec.of(tensor) for tensor in inputs)
        # The boundaries were measured once, and every receive has a buffer of that size.
        if self._expected is None:
            self._expected = arrived
        if arrived != self._expected:
            raise TransferError(
                f"stage {self.index}, micro-batch {microbatch}: expected {_listed(self._expected)} "
                f"as at the first micro-batch, got {_listed(arrived)}; shapes and dtypes must not "
                "change during a run"
            )


def _as_float(tensor: torch.Tensor) -> torch.Tensor:
    """A loss is computed in fp32, whatever the layers compute in."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _scalar(loss: object) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor):
        raise RunError(
            f"the model's loss function returned {type(loss).__name__}; it must return a scalar "
            "tensor, the mean over the micro-batch"
        )
    if loss.dim():
        raise RunError(
            f"the loss is of shape {list(loss.shape)}; it must be a scalar, the mean over the "
            "micro-batch: end the model's loss function with .mean()"
        )
    return loss.float()


def _buffer_versions(layer: nn.Module) -> list[tuple[int, int]]:
    """The identity of each buffer, and how often it has been written to."""
    return [(id(buffer), buffer._version) for buffer in layer.buffers()]


def _has_one_gradient(tensors: Tensors) -> bool:
    """Whether one graph can go on through them: autograd returns None, not zeros, for one of
    several that the next layer does not use.
    """
    return sum(tensor.is_floating_point() for tensor in tensors) == 1


def _make_gradients_contiguous(tensors: Tensors) -> None:
    """Inside a graph, pass a gradient on as `_taken_grad` would between two: a product may round
    differently for other strides.
    """
    for tensor in tensors:
        if tensor.requires_grad:
            tensor.register_hook(torch.Tensor.contiguous)


def _taken_grad(leaf: torch.Tensor) -> torch.Tensor:
    """A gradient as after a hop: contiguous, and zeros if the layer did not use the input."""
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
