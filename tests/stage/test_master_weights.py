"""Half-precision parameters with fp32 master weights: the dtype of each computation, and that
nothing else changes.
"""

from contextlib import nullcontext
from functools import partialmethod

import pytest
import torch

from dpipe.stage.gpt import gpt
from dpipe.stage.model import materialise
from dpipe.stage.stage import Stage

M = 4


def stages(cut: list[int], parameters: str = "bf16", device: str = "cpu", **options) -> list[Stage]:
    model = gpt(
        vocab_size=32, num_layers=2, width=16, num_heads=2, context=8, dropout=0.0, tied=False
    )
    bounds = [0, *cut, 4]
    return [
        Stage(
            s,
            {layer: materialise(model, layer, 0, device) for layer in range(*bounds[s : s + 2])},
            num_microbatches=M,
            loss=model.loss if bounds[s + 1] == 4 else None,
            parameters=parameters,
            device=device,
            **options,
        )
        for s in range(len(bounds) - 1)
    ]


def train(stages_: list[Stage], num_steps: int = 5) -> list[float]:
    """The loss of each step on the same batch."""
    tokens = torch.randint(32, (M, 2, 9), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW([p for s in stages_ for p in s.parameters()], lr=1e-2)
    losses = []
    for step in range(num_steps):
        loss = 0.0
        for s in stages_:
            s.begin_step(step)
        for m in range(M):
            tensors = (tokens[m, :, :-1],)
            for s in stages_:
                tensors = s.forward(m, tensors, tokens[m, :, 1:])
            loss += tensors[0].item() / M
            grads: tuple[torch.Tensor, ...] = ()
            for s in reversed(stages_):
                grads = s.backward(m, grads)
        optimizer.step()
        for s in stages_:
            s.zero_grad()
        losses.append(loss)
    return losses


def test_master_weights_are_visible_and_are_updated() -> None:
    (stage,) = stages([])
    assert {p.dtype for p in stage.parameters()} == {torch.float32}
    losses = train([stage])
    assert losses[-1] < losses[0] - 0.3


def test_layers_compute_in_half_precision_and_pass_it_on() -> None:
    first, _ = stages([2])
    (output,) = first.forward(0, (torch.zeros(2, 8, dtype=torch.long),))
    assert output.dtype == torch.bfloat16


def test_gradients_are_added_up_in_single_precision() -> None:
    """Beyond 256 equal terms a sum in bf16 does not change any more."""
    layer = torch.nn.Linear(1, 1, bias=False)
    stage = Stage(0, {0: layer}, num_microbatches=1, loss=lambda y, t: y.sum(), parameters="bf16")
    for m in range(300):
        stage.forward(m, (torch.ones(1, 1, dtype=torch.bfloat16),), torch.zeros(1))
        stage.backward(m, ())
    (master,) = stage.parameters()
    assert master.grad.item() == 300.0


@pytest.mark.parametrize("cut", [[1], [2], [1, 3]], ids=str)
def test_split_changes_no_bit(cut: list[int]) -> None:
    assert train(stages(cut)) == train(stages([]))


def test_half_precision_learns_nearly_like_fp32() -> None:
    half, single = train(stages([])), train(stages([], "fp32"))
    assert half == pytest.approx(single, abs=0.02)


def test_split_backward_accumulates_the_same_gradients() -> None:
    whole, split = stages([])[0], stages([])[0]
    tokens = torch.arange(16).view(2, 8)
    for stage in (whole, split):
        stage.forward(0, (tokens,), tokens)
    whole.backward(0, ())
    split.backward_input(0, ())
    split.backward_weight(0)
    assert all(
        torch.equal(a.grad, b.grad)
        for a, b in zip(whole.parameters(), split.parameters(), strict=True)
    )


def test_evaluation_after_a_step_uses_the_updated_parameters() -> None:
    (stage,) = stages([])
    tokens = torch.arange(16).view(2, 8)
    before = stage.evaluate((tokens,), tokens)[0].item()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
    stage.zero_grad()
    assert stage.evaluate((tokens,), tokens)[0].item() != before


def test_copies_between_masters_and_parameters_are_timed() -> None:
    names: list[str] = []
    train(stages([], timed=lambda name: nullcontext(names.append(name))), num_steps=2)
    assert names == 2 * [
        "optimizer-copy-main-to-model-params",
        *M * ["optimizer-copy-to-main-grad"],
    ]


def test_aborted_step_leaves_no_gradient() -> None:
    (stage,) = stages([])
    tokens = torch.arange(16).view(2, 8)
    stage.forward(0, (tokens,), tokens)
    stage.backward(0, ())
    stage.clear()
    assert all(p.grad is None for p in stage.parameters())


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning"
)  # a warning of torch itself, when it loads its compiler
def test_compiled_layers_give_the_same_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the last step, which compiles the traced code to machine code and takes a minute."""
    traced = partialmethod(torch.nn.Module.compile, backend="eager")
    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    results = []
    for compiled in (True, False):
        torch.manual_seed(0)
        layer = torch.nn.Linear(4, 2)
        stage = Stage(
            0,
            {0: layer},
            num_microbatches=1,
            loss=lambda y, t: (y - t).square().mean(),
            compiled=compiled,
        )
        (loss,) = stage.forward(0, (torch.ones(3, 4),), torch.zeros(3, 2))
        stage.backward(0, ())
        assert (layer._compiled_call_impl is not None) == compiled
        results.append((loss.item(), layer.weight.grad))
    assert results[0][0] == pytest.approx(results[1][0])
    assert torch.allclose(results[0][1], results[1][1])


@pytest.mark.gpu
def test_fused_optimizer_is_resumed() -> None:
    from dpipe.dataparallel.optimizer import Optimizer, trained, whole
    from dpipe.optimizers.kinds import OptimizerSettings

    (stage,) = stages([], device="cuda")
    optimizer = Optimizer(
        whole(trained(stage)), OptimizerSettings(1e-3, 0.1, (0.9, 0.95)), whole=True
    )
    for parameter in stage.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step(1e-3)
    optimizer.restore(1, {name: value.cpu() for name, value in optimizer.state().items()})
    optimizer.step(1e-3)
    # One kernel for all parameters counts its steps where they are.
    assert all(count.is_cuda for count in optimizer._counts.values())
