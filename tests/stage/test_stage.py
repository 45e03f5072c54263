"""The central promise: the split into stages and the order of execution change no bit of the
result.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpipe.errors import RunError, TransferError
from dpipe.stage.gpt import gpt
from dpipe.stage.model import LayeredModel, materialise
from dpipe.stage.stage import Stage

MICROBATCHES = 4
VOCAB, CONTEXT = 13, 6


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """There are few cores and the tensors are small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_gpt(dropout: float = 0.0, tied: bool = False) -> LayeredModel:
    return gpt(
        vocab_size=VOCAB,
        num_layers=2,
        width=16,
        num_heads=2,
        context=CONTEXT,
        dropout=dropout,
        tied=tied,
    )


def cut_model(
    model: LayeredModel,
    cut: Sequence[int],
    *,
    recompute: str = "none",
    precision: str = "fp32",
    splits_backward: bool = True,
) -> list[Stage]:
    """One stage for each number of layers in `cut`."""
    starts = [0, *accumulate(cut)]
    assert starts[-1] == len(model.layers)
    return [
        Stage(
            index,
            {layer: materialise(model, layer, 0, "cpu") for layer in range(start, start + size)},
            num_microbatches=MICROBATCHES,
            loss=model.loss if index == len(cut) - 1 else None,
            recompute=recompute,
            precision=precision,
            splits_backward=splits_backward,
        )
        for index, (start, size) in enumerate(zip(starts, cut, strict=False))
    ]


def tokens(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + microbatch)
    text = torch.randint(VOCAB, (2, CONTEXT + 1), generator=draw)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def forward(stages: Sequence[Stage], step: int, microbatch: int) -> torch.Tensor:
    inputs, targets = tokens(step, microbatch)
    x: tuple[torch.Tensor, ...] = (inputs,)
    for stage in stages:
        x = stage.forward(microbatch, x, targets if stage is stages[-1] else None)
    return x[0]


def backward(stages: Sequence[Stage], microbatch: int) -> None:
    grads: tuple[torch.Tensor, ...] = ()
    for stage in reversed(stages):
        grads = stage.backward(microbatch, grads)


def split_backward(stages: Sequence[Stage], microbatch: int) -> None:
    grads: tuple[torch.Tensor, ...] = ()
    for stage in reversed(stages):
        grads = stage.backward_input(microbatch, grads)
    for stage in stages:
        stage.backward_weight(microbatch)


def gpipe(stages: Sequence[Stage], step: int) -> list[torch.Tensor]:
    losses = [forward(stages, step, m) for m in range(MICROBATCHES)]
    for m in range(MICROBATCHES):
        backward(stages, m)
    return losses


def one_at_a_time(stages: Sequence[Stage], step: int) -> list[torch.Tensor]:
    losses = []
    for m in range(MICROBATCHES):
        losses.append(forward(stages, step, m))
        backward(stages, m)
    return losses


def split(stages: Sequence[Stage], step: int) -> list[torch.Tensor]:
    losses = [forward(stages, step, m) for m in range(MICROBATCHES)]
    for m in range(MICROBATCHES):
        split_backward(stages, m)
    return losses


def late_weights(stages: Sequence[Stage], step: int) -> list[torch.Tensor]:
    """All input gradients first."""
    losses = [forward(stages, step, m) for m in range(MICROBATCHES)]
    for m in range(MICROBATCHES):
        grads: tuple[torch.Tensor, ...] = ()
        for stage in reversed(stages):
            grads = stage.backward_input(m, grads)
    for m in range(MICROBATCHES):
        for stage in stages:
            stage.backward_weight(m)
    return losses


@dataclass
class Result:
    losses: list[float]
    parameters: dict[str, torch.Tensor]

    def equals(self, other: "Result") -> bool:
        same = all(
            torch.equal(self.parameters[name], other.parameters[name]) for name in self.parameters
        )
        return (
            same
            and self.losses == other.losses
            and self.parameters.keys() == other.parameters.keys()
        )


def train(
    model: LayeredModel,
    cut: Sequence[int],
    order: Callable[[Sequence[Stage], int], list[torch.Tensor]] = gpipe,
    **how: object,
) -> Result:
    """Three steps; losses of all micro-batches, and the parameters at the end.

    Linear layers are torch's own unless `order` splits the backward pass.
    """
    stages = cut_model(model, cut, splits_backward=order in (split, late_weights), **how)
    parameters = {name: p for stage in stages for name, p in stage.named_parameters()}
    optimizer = torch.optim.AdamW(parameters.values(), lr=1e-2)
    losses: list[float] = []
    for step in range(3):
        for stage in stages:
            stage.begin_step(step)
        losses += [loss.item() for loss in order(stages, step)]
        if model.tied is not None:
            add_tied(parameters["layers.0.tokens.weight"], parameters["layers.3.output.weight"])
        optimizer.step()
        for stage in stages:
            assert stage.held == 0
            stage.zero_grad()
    return Result(losses, {name: p.detach() for name, p in parameters.items()})


def add_tied(first: nn.Parameter, last: nn.Parameter) -> None:
    assert first.grad is not None
    assert last.grad is not None
    total = first.grad + last.grad
    first.grad, last.grad = total, total.clone()


@pytest.mark.some_cases(17)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("order", [gpipe, one_at_a_time, split, late_weights])
@pytest.mark.parametrize("cut", [(4,), (2, 2), (1, 3), (1, 1, 1, 1)])
def test_split_order_and_recomputation_change_no_bit(
    cut: tuple[int, ...],
    order: Callable[[Sequence[Stage], int], list[torch.Tensor]],
    recompute: str,
) -> None:
    model = small_gpt(dropout=0.1)
    assert train(model, cut, order, recompute=recompute).equals(train(model, (4,)))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_split_changes_no_bit_in_half_precision(precision: str) -> None:
    model = small_gpt(dropout=0.1)
    whole = train(model, (4,), precision=precision)
    assert train(model, (1, 2, 1), split, precision=precision, recompute="full").equals(whole)


def test_stage_made_for_whole_backward_passes_refuses_to_split_one() -> None:
    stage = Stage(0, {0: nn.Linear(2, 2)}, num_microbatches=1, splits_backward=False)
    stage.forward(0, (torch.ones(1, 2),))
    with pytest.raises(AssertionError, match="stage 0 was made for schedules that do not split"):
        stage.backward_input(0, (torch.ones(1, 2),))


def test_tied_weights_stay_equal_in_any_split() -> None:
    model = small_gpt(tied=True)
    whole = train(model, (4,))
    assert train(model, (1, 1, 1, 1)).equals(whole)
    assert torch.equal(
        whole.parameters["layers.0.tokens.weight"], whole.parameters["layers.3.output.weight"]
    )


def test_gradients_are_those_of_the_model_without_stages() -> None:
    """Transparency: the gradients of autograd over the whole batch."""
    model = small_gpt()
    plain = nn.Sequential(*(materialise(model, index, 0, "cpu") for index in range(4)))
    inputs, targets = (
        torch.cat(part) for part in zip(*(tokens(0, m) for m in range(MICROBATCHES)), strict=True)
    )
    loss = model.loss(plain(inputs), targets)
    loss.backward()

    stages = cut_model(model, (1, 3))
    losses = gpipe(stages, 0)

    torch.testing.assert_close(sum(losses) / MICROBATCHES, loss.detach())
    gradients = [p.grad for stage in stages for p in stage.parameters()]
    for gradient, parameter in zip(gradients, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


def test_parameters_of_one_split_continue_in_another() -> None:
    """With an uneven split: names have the layer, not the stage."""
    model = small_gpt()
    learned = train(model, (1, 3)).parameters
    losses = []
    for cut in ((1, 3), (3, 1)):
        stages = cut_model(model, cut)
        parameters = dict(pair for stage in stages for pair in stage.named_parameters())
        assert parameters.keys() == learned.keys()
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(learned[name])
        losses.append([loss.item() for loss in gpipe(stages, 3)])
    assert losses[0] == losses[1]


def test_names_are_global_and_grouped_by_layer() -> None:
    _, last = cut_model(small_gpt(), (3, 1))
    names = {layer: [name for name, _ in pairs] for layer, pairs in last.layer_parameters().items()}
    assert names == {3: ["layers.3.norm.weight", "layers.3.norm.bias", "layers.3.output.weight"]}


def test_bf16_learns_nearly_as_fp32_does() -> None:
    model = small_gpt()
    full, half = (
        train(model, (2, 2), precision=precision).losses for precision in ("fp32", "bf16")
    )
    assert half != full
    assert half == pytest.approx(full, rel=0.02)


def test_dropout_differs_by_step_and_micro_batch() -> None:
    (stage,) = cut_model(small_gpt(dropout=0.5), (4,))
    inputs, targets = tokens(0, 0)
    losses = set()
    for step in range(2):
        stage.begin_step(step)
        losses |= {stage.forward(m, (inputs,), targets)[0].item() for m in range(2)}
        stage.clear()
    assert len(losses) == 4


def test_loss_scale_multiplies_gradients_alone() -> None:
    (stage,) = cut_model(small_gpt(), (4,))
    plain_losses = gpipe([stage], 0)
    plain = [p.grad for p in stage.parameters()]
    stage.zero_grad()
    stage.begin_step(0, loss_scale=8.0)
    assert gpipe([stage], 0) == plain_losses
    for parameter, grad in zip(stage.parameters(), plain, strict=True):
        torch.testing.assert_close(parameter.grad, 8 * grad)


def test_evaluation_drops_nothing_and_stashes_nothing() -> None:
    model = small_gpt(dropout=0.5)
    (stage,) = cut_model(model, (4,))
    inputs, targets = tokens(0, 0)
    (loss,) = stage.evaluate((inputs,), targets)
    (undropped,) = cut_model(small_gpt(), (4,))[0].forward(0, (inputs,), targets)
    assert loss.item() == undropped.item()
    assert stage.held == 0


def test_evaluation_leaves_each_module_in_its_mode() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5).eval())
    stage = Stage(0, {0: layer}, num_microbatches=1)
    stage.evaluate((torch.ones(1, 2),))
    assert [module.training for module in layer.modules()] == [True, True, False]


def test_held_counts_micro_batches_until_their_weight_gradients_are_made() -> None:
    stages = cut_model(small_gpt(), (4,))
    (stage,) = stages
    for m in range(2):
        forward(stages, 0, m)
    held = [stage.held]
    stage.backward_input(0, ())
    held.append(stage.held)
    stage.backward_weight(0)
    held.append(stage.held)
    stage.backward(1, ())
    assert [*held, stage.held] == [2, 2, 1, 0]


def test_clear_lets_an_aborted_step_run_again() -> None:
    stages = cut_model(small_gpt(), (4,))
    (stage,) = stages
    forward(stages, 0, 0)
    backward(stages, 0)
    forward(stages, 0, 1)
    stage.backward_input(1, ())
    forward(stages, 0, 2)
    stage.clear()
    assert stage.held == 0
    again, fresh = gpipe(stages, 0), cut_model(small_gpt(), (4,))
    assert again == gpipe(fresh, 0)
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(stage.parameters(), fresh[0].parameters(), strict=True)
    )


class FailsOnce(nn.Module):
    """Identity; its first backward pass fails, as if out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.failed = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = input * 1.0
        if output.requires_grad:
            output.register_hook(self._fail)
        return output

    def _fail(self, grad: torch.Tensor) -> None:
        if not self.failed:
            self.failed = True
            raise MemoryError


def test_clear_forgets_the_weight_gradients_of_a_backward_pass_that_failed() -> None:
    """The layers after the failed one had deferred theirs, and the next step would add them."""
    last = nn.Linear(2, 2)
    layers = {1: FailsOnce(), 2: last}
    stage = Stage(0, layers, num_microbatches=1)
    inputs = (torch.ones(1, 2),)
    grads = (torch.ones(1, 2),)
    stage.forward(0, inputs)
    with pytest.raises(MemoryError):
        stage.backward(0, grads)
    stage.clear()
    stage.forward(0, inputs)
    stage.backward(0, grads)
    assert last.weight.grad is not None
    assert torch.equal(last.weight.grad, torch.ones(2, 2))


def test_recomputation_holds_the_inputs_of_layers_alone() -> None:
    (stage,) = cut_model(small_gpt(), (4,), recompute="full")
    with torch.autograd.graph.saved_tensors_hooks(pytest.fail, lambda tensor: tensor):
        forward([stage], 0, 0)
    assert stage.held == 1


class Masked(nn.Module):
    """Takes and returns a tuple: values, an integer mask, and a scale that only the last layer
    reads.
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.linear(x) * mask[:, None], mask, scale


class Open(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, 4)

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = self.table(ids)
        return x.mean(1), (ids[:, 0] % 2), torch.full((len(ids),), 0.5)


class Close(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x * scale[:, None]).mean(1)


def squares(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(outputs, targets[:, 0].float())


TUPLES = LayeredModel((Open, Masked, Masked, Close), squares)


@pytest.mark.parametrize("cut", [(2, 2), (1, 1, 1, 1)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_boundary_may_be_a_tuple_with_a_mask(cut: tuple[int, ...], recompute: str) -> None:
    assert train(TUPLES, cut, split, recompute=recompute).equals(train(TUPLES, (4,)))


def test_gradients_go_back_for_floating_point_inputs_alone() -> None:
    stages = cut_model(TUPLES, (2, 2))
    inputs, targets = tokens(0, 0)
    between = stages[0].forward(0, (inputs,))
    stages[1].forward(0, between, targets)
    grads = stages[1].backward(0, ())
    assert [tuple(t.shape) for t in between] == [(2, 4), (2,), (2,)]
    assert [tuple(g.shape) for g in grads] == [(2, 4), (2,)]
    assert stages[0].backward(0, grads) == ()


def test_input_that_a_layer_does_not_use_gets_a_zero_gradient() -> None:
    class Ignores(nn.Module):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return x * 2

    stage = Stage(1, {1: Ignores()}, num_microbatches=1, loss=lambda x, targets: x.mean())
    stage.forward(0, (torch.ones(2), torch.ones(3)), torch.zeros(1))
    used, unused = stage.backward(0, ())
    assert used.tolist() == [1.0, 1.0]
    assert unused.tolist() == [0.0, 0.0, 0.0]


class Strides(torch.autograd.Function):
    """Identity that records the strides of its gradient."""

    strides: ClassVar[list[tuple[int, ...]]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Strides.strides.append(grad.stride())
        return grad


@pytest.mark.parametrize("cut", [(2,), (1, 1)])
def test_gradient_between_layers_is_contiguous_as_over_a_wire(cut: tuple[int, ...]) -> None:
    class Watched(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return Strides.apply(ids[:, :4] * torch.ones(1, requires_grad=True))

    class Sum(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(1)  # returns a gradient that repeats one column

    Strides.strides.clear()
    one_at_a_time(cut_model(LayeredModel((Watched, Sum), squares), cut), 0)
    assert Strides.strides == [(4, 1)] * MICROBATCHES


def test_layers_own_randomness_is_repeated_in_recomputation() -> None:
    class Noise(nn.Module):
        """Draws without an `nn.Dropout`, which the stage cannot know, so it always seeds."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * torch.rand_like(x)

    class Start(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids[:, :4].float()

    model = LayeredModel((Start, Noise, Noise), lambda x, targets: x.square().mean())
    whole = train(model, (3,))
    assert train(model, (1, 1, 1), split, recompute="full").equals(whole)


def test_input_that_changes_its_shape_is_refused() -> None:
    stages = cut_model(small_gpt(), (2, 2))
    stages[1].forward(0, (torch.zeros(2, 6, 16),), torch.zeros(2, 6, dtype=torch.int64))
    message = (
        r"stage 1, micro-batch 1: expected \(float32\[2, 6, 16\]\) .* got \(float32\[2, 5, 16\]\)"
    )
    with pytest.raises(TransferError, match=message):
        stages[1].forward(1, (torch.zeros(2, 5, 16),), torch.zeros(2, 5, dtype=torch.int64))


def test_gradient_of_another_shape_is_refused() -> None:
    stages = cut_model(small_gpt(), (2, 2))
    stages[0].forward(0, (tokens(0, 0)[0],))
    with pytest.raises(
        TransferError, match=r"stage 0, micro-batch 0: gradients of shapes \[\(3,\)\]"
    ):
        stages[0].backward(0, (torch.zeros(3),))


def test_error_in_a_layer_names_it() -> None:
    stage = Stage(2, {5: nn.Linear(3, 3)}, num_microbatches=1)
    with pytest.raises(RuntimeError) as raised:
        stage.forward(0, (torch.zeros(2, 4),))
    assert raised.value.__notes__ == ["in layer 5 (Linear) of stage 2"]


def test_outputs_carry_no_graph() -> None:
    stages = cut_model(small_gpt(), (2, 2))
    (output,) = stages[0].forward(0, (tokens(0, 0)[0],))
    assert not output.requires_grad
    (loss,) = stages[1].forward(0, (output,), tokens(0, 0)[1])
    assert not loss.requires_grad
    assert (loss.shape, loss.dtype) == ((), torch.float32)


def test_nonscalar_loss_is_refused() -> None:
    stage = Stage(
        0, {0: nn.Linear(2, 2)}, num_microbatches=1, loss=lambda x, targets: (x - targets) ** 2
    )
    with pytest.raises(RunError, match=r"the loss is of shape \[3, 2\]; it must be a scalar"):
        stage.evaluate((torch.ones(3, 2),), torch.ones(3, 2))


def test_loss_other_than_a_tensor_is_refused() -> None:
    stage = Stage(
        0, {0: nn.Linear(2, 2)}, num_microbatches=1, loss=lambda x, targets: x.mean().item()
    )
    with pytest.raises(
        RunError, match="the model's loss function returned float; it must return a scalar tensor"
    ):
        stage.evaluate((torch.ones(3, 2),), torch.ones(3, 2))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("layer", [0, 1], ids=["first", "after others"])
def test_loss_without_a_graph_is_refused(layer: int, recompute: str) -> None:
    """It would train to the end without changing any parameter."""
    own = nn.Identity() if layer else nn.Linear(2, 2)
    stage = Stage(
        0,
        {layer: own},
        num_microbatches=1,
        loss=lambda x, targets: x.mean().detach(),
        recompute=recompute,
    )
    with pytest.raises(RunError, match="the loss has no gradient, so that nothing would learn"):
        forth_and_back(stage)


def test_loss_of_a_model_that_is_frozen_needs_no_gradient() -> None:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    forth_and_back(Stage(0, {0: frozen}, num_microbatches=1, loss=lambda x, targets: x.mean()))


def forth_and_back(stage: Stage) -> None:
    stage.forward(0, (torch.ones(3, 2),), torch.ones(3))
    stage.backward(0, ())
