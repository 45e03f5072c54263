from functools import partial
from typing import ClassVar

import pytest
import torch
from torch import nn

from dpipe.errors import ConfigError, RunError
from dpipe.probe import layer_costs as probing
from dpipe.probe.layer_costs import measure, probe
from dpipe.stage.gpt import gpt
from dpipe.stage.model import LayeredModel
from dpipe.stage.stage import Stage
from dpipe.wire.spec import TensorSpec

TOKENS = [TensorSpec((2, 6), torch.int64)]
GPT = gpt(vocab_size=13, num_layers=1, width=16, num_heads=2, context=6, dropout=0.1, tied=True)


def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return outputs.mean()


def test_probe_follows_shapes_from_layer_to_layer() -> None:
    outputs = [" ".join(map(str, cost.outputs)) for cost in probe(GPT, TOKENS, seed=0)]
    assert outputs == ["float32[2, 6, 16]", "float32[2, 6, 16]", "float32[2, 6, 13]"]


def test_probe_counts_parameters() -> None:
    embedding, block, head = (cost.parameter_bytes // 4 for cost in probe(GPT, TOKENS, seed=0))
    assert embedding == 13 * 16 + 6 * 16
    assert block == 12 * 16**2 + 13 * 16
    assert head == 16 * 13 + 2 * 16


def test_half_precision_parameters_count_as_master_weights() -> None:
    """Replicas exchange the gradients of the master weights."""
    half, whole = (
        probe(GPT, TOKENS, seed=0, dtype=dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    assert [cost.parameter_bytes for cost in half] == [cost.parameter_bytes for cost in whole]
    assert half[1].outputs[0].dtype is torch.bfloat16


class Counted(nn.Linear):
    """A layer that counts how often one is made."""

    made: ClassVar[int] = 0

    def __init__(self, width: int, out: int) -> None:
        type(self).made += 1
        super().__init__(width, out)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    monkeypatch.setattr(probing, "_KNOWN", {})
    monkeypatch.setattr(Counted, "made", 0)
    return Counted


def test_equal_layers_are_probed_once(counted: type[Counted]) -> None:
    same = [partial(counted, 8, 8) for _ in range(5)]
    inputs = [TensorSpec((2, 8), torch.float32)]
    costs = probe(LayeredModel((*same, partial(counted, 8, 3)), mean), inputs, seed=0)
    assert counted.made == 2
    assert len(set(costs[:5])) == 1
    assert (costs[4].outputs[0].shape, costs[5].outputs[0].shape) == ((2, 8), (2, 3))
    assert [cost.parameter_bytes for cost in costs[4:]] == [4 * 72, 4 * 27]


def test_layers_that_a_model_says_are_alike_are_probed_once(counted: type[Counted]) -> None:
    def wide() -> Counted:
        return counted(8, 8)

    def narrow() -> Counted:
        return counted(8, 3)

    model = LayeredModel((wide, wide, wide, narrow), mean, alike=lambda index: index == 3)
    inputs = [TensorSpec((2, 8), torch.float32)]
    costs = probe(model, inputs, seed=0)
    assert counted.made == 2
    assert [cost.parameter_bytes for cost in costs] == [4 * 72] * 3 + [4 * 27]
    # Of another model, layers that it calls the same are others.
    other = LayeredModel((narrow,), mean, alike=lambda index: index == 3)
    assert probe(other, inputs, seed=0)[0].parameter_bytes == 4 * 27


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 8), torch.float32), ((2, 8), torch.float64)], ids=["shape", "dtype"]
)
def test_layer_is_probed_again_for_other_inputs(
    counted: type[Counted], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    model = LayeredModel((partial(counted, 8, 8),), mean)
    probe(model, [TensorSpec((2, 8), torch.float32)], seed=0)
    (cost,) = probe(model, [TensorSpec(shape, dtype)], seed=0, dtype=dtype)
    assert counted.made == 2
    assert cost.outputs == (TensorSpec(shape, dtype),)


def test_layer_is_probed_again_in_another_precision(counted: type[Counted]) -> None:
    model = LayeredModel((partial(counted, 8, 8),), mean)
    inputs = [TensorSpec((2, 8), torch.float32)]
    probe(model, inputs, seed=0)
    probe(model, inputs, seed=0, dtype=torch.bfloat16)
    assert counted.made == 2


def test_function_may_make_another_layer_each_time(counted: type[Counted]) -> None:
    widths = iter((8, 3))
    make = partial(lambda: counted(8, next(widths)))
    costs = probe(LayeredModel((make, make), mean), [TensorSpec((2, 8), torch.float32)], seed=0)
    assert [cost.outputs[0].shape[-1] for cost in costs] == [8, 3]


def test_layer_with_unhashable_arguments_is_probed_each_time() -> None:
    class Listed(nn.Linear):
        def __init__(self, sizes: list[int]) -> None:
            super().__init__(*sizes)

    model = LayeredModel((partial(Listed, [8, 8]), partial(Listed, [8, 3])), mean)
    costs = probe(model, [TensorSpec((2, 8), torch.float32)], seed=0)
    assert [cost.outputs[0].shape[-1] for cost in costs] == [8, 3]


def test_probe_needs_no_memory_for_a_model_that_would_not_fit() -> None:
    huge = LayeredModel((lambda: nn.Linear(1 << 20, 1 << 20),), mean)
    (cost,) = probe(huge, [TensorSpec((1, 1 << 20), torch.float32)], seed=0)
    assert cost.parameter_bytes == 4 * ((1 << 40) + (1 << 20))
    assert cost.forward_flops == 2.0 * (1 << 40)


def test_probe_follows_a_tuple() -> None:
    class Pair(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x.float(), x > 0

    (cost,) = probe(LayeredModel((Pair,), mean), TOKENS, seed=0)
    assert [str(spec) for spec in cost.outputs] == ["float32[2, 6]", "bool[2, 6]"]


def test_probe_names_the_layer_that_needs_values() -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(
        ConfigError, match=r"layer 1 cannot take \(int64\[2, 6\]\), or its shapes depend on values"
    ):
        probe(LayeredModel((nn.Identity, Branches), mean), TOKENS, seed=0)


@pytest.mark.parametrize(
    ("returned", "kind"),
    [
        (None, "NoneType"),
        ([torch.ones(2)], "list"),
        ({"x": torch.ones(2)}, "dict"),
        ((torch.ones(2), None), r"a tuple of \(Tensor, NoneType\)"),
        ((), r"a tuple of \(\)"),
    ],
)
def test_layer_that_returns_no_tensors_is_named(returned: object, kind: str) -> None:
    class Wrong(nn.Module):
        def forward(self, x: torch.Tensor) -> object:
            return returned

    message = (
        rf"^layer 1 \(Wrong\) returned {kind}; a layer must return a tensor or a tuple of tensors"
    )
    with pytest.raises(ConfigError, match=message):
        probe(LayeredModel((nn.Identity, Wrong), mean), TOKENS, seed=0)
    stage = Stage(0, {1: Wrong()}, num_microbatches=1)
    with pytest.raises(RunError, match=message):
        stage.forward(0, (torch.ones(2),))


def test_layers_are_measured_as_they_will_run() -> None:
    class Sees(nn.Module):
        seen: ClassVar[list[str]] = []

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x.to(self.linear.weight.dtype))
            self.seen.append(f"{self.linear.weight.dtype} makes {y.dtype} on {y.device.type}")
            return y

    tokens = torch.ones(2, 6, dtype=torch.int64)
    measure(LayeredModel((Sees,), mean), (tokens,), tokens, seed=0, precision="bf16")
    measure(
        LayeredModel((Sees,), mean), (tokens,), tokens, seed=0, precision="bf16", parameters="bf16"
    )
    assert list(dict.fromkeys(Sees.seen)) == [
        "torch.float32 makes torch.bfloat16 on cpu",
        "torch.bfloat16 makes torch.bfloat16 on cpu",
    ]


def test_measure_finds_the_expensive_layer() -> None:
    class Start(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.float()

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(100)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x)

    tokens = torch.ones(2, 6, dtype=torch.int64)
    model = LayeredModel((Start, lambda: nn.Linear(6, 6), Deep, lambda: nn.Linear(6, 1)), mean)
    seconds = measure(model, (tokens,), tokens, seed=0)
    assert max(range(4), key=seconds.__getitem__) == 2
    assert all(s > 0 for s in seconds)
