import copy
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dpipe.passes.linear import Linear, WeightGradients, defer_weight_gradients, make

Run = Callable[[nn.Module], None]


def seeded_linear(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 17, bias=bias)


def batch() -> torch.Tensor:
    return torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))


def gradients(
    module: nn.Module, x: torch.Tensor, store: WeightGradients | None = None
) -> dict[str, torch.Tensor]:
    """Gradients of two micro-batches by name, that of the input as `x`. Deferred gradients in
    `store` are made after each.
    """
    leaf = x.clone().requires_grad_()
    for _ in range(2):
        module(leaf).square().sum().backward()
        if store is not None:
            make(store.take())
    assert leaf.grad is not None
    return {"x": leaf.grad} | {
        name: p.grad for name, p in module.named_parameters() if p.grad is not None
    }


def deferring(module: nn.Module) -> tuple[nn.Module, WeightGradients]:
    converted, store = copy.deepcopy(module), WeightGradients()
    defer_weight_gradients(converted, store)
    return converted, store


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_are_those_of_nn_linear_to_the_bit(bias: bool) -> None:
    plain = seeded_linear(bias)
    converted, store = deferring(plain)
    expected, actual = gradients(plain, batch()), gradients(converted, batch(), store)
    assert expected.keys() == actual.keys()
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name


def test_output_is_that_of_nn_linear_to_the_bit() -> None:
    plain = seeded_linear()
    converted, _ = deferring(plain)
    for x in (batch(), batch()[0], batch()[0, 0], batch().transpose(0, 1)):
        assert torch.equal(plain(x), converted(x))


def test_weight_gradient_waits_until_it_is_asked_for() -> None:
    converted, store = deferring(seeded_linear())
    gradients(converted, batch())
    assert converted.weight.grad is None
    assert converted.bias.grad is not None
    assert list(store.filed) == [converted.weight]
    assert len(store.filed[converted.weight]) == 2


def test_frozen_weight_gets_no_gradient() -> None:
    frozen = seeded_linear()
    frozen.weight.requires_grad_(False)
    converted, store = deferring(frozen)
    assert torch.equal(gradients(converted, batch())["x"], gradients(frozen, batch())["x"])
    assert not store.filed


def test_linear_used_twice_gets_both_gradients_added_as_autograd_does() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(24, 24)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.linear(x).tanh())

    torch.manual_seed(0)
    plain = Twice()
    converted, store = deferring(plain)
    expected, actual = gradients(plain, batch()), gradients(converted, batch(), store)
    for name in expected:
        assert torch.equal(expected[name], actual[name]), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_as_it_does_for_nn_linear(dtype: torch.dtype) -> None:
    plain = seeded_linear()
    converted, store = deferring(plain)
    with torch.autocast("cpu", dtype):
        assert converted(batch()).dtype is dtype
        expected, actual = gradients(plain, batch()), gradients(converted, batch(), store)
    for name in expected:
        assert actual[name].dtype is torch.float32
        assert torch.equal(expected[name], actual[name]), name


def test_names_and_parameters_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    before = dict(model.named_parameters())
    defer_weight_gradients(model, WeightGradients())
    after = dict(model.named_parameters())
    assert before.keys() == after.keys()
    assert all(before[name] is after[name] for name in before)
    assert type(model[0]) is type(model[1][1]) is Linear


def test_subclass_of_linear_is_left_alone() -> None:
    class Scaled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    reparametrised = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
    model = nn.Sequential(Scaled(4, 4), reparametrised)
    kinds = [type(module) for module in model]
    defer_weight_gradients(model, WeightGradients())
    assert [type(module) for module in model] == kinds


def test_weight_made_from_other_parameters_is_left_to_autograd() -> None:
    pruned = prune.random_unstructured(seeded_linear(), "weight", amount=0.5)
    defer_weight_gradients(pruned, WeightGradients())
    pruned(batch()).sum().backward()
    assert pruned.weight_orig.grad is not None


def test_waiting_weight_gradient_keeps_nothing_but_its_factors() -> None:
    """A product holds its input through a view; a view of a tensor with a graph would keep that
    graph alive.
    """
    linear, store = deferring(seeded_linear())
    leaf = batch().requires_grad_()
    linear(leaf * 1.0).sum().backward()
    gone = weakref.ref(leaf)
    del leaf
    assert gone() is None
    assert len(store.take()) == 1
