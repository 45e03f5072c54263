"""The measured memory of a user's own layers, beside torch's memory tracker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tracked import tracked_peak
from torch import nn

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.memory.walk import LayerMemory, peak_memory
from dpipe.plan.run_plan import draft
from dpipe.probe.allocations import AllocatedBytes
from dpipe.probe.layer_costs import probe
from dpipe.probe.measured import StageRunner, _estimated, measured_stages
from dpipe.schedule.action import Action, Op
from dpipe.schedule.generate import generate
from dpipe.schedule.schedule import Schedule
from dpipe.stage.gpt import gpt
from dpipe.stage.model import LayeredModel
from dpipe.stage.stage import Stage, Tensors
from dpipe.wire.spec import TensorSpec

BATCH, CONTEXT, VOCABULARY, WIDTH = 4, 128, 512, 64
TOKENS = TensorSpec((BATCH, CONTEXT), torch.int64)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Convolution(nn.Module):
    """Convolution, batch norm, ReLU: [B, T, D] to [B, T, D], as [B, D, T] inside."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 5, padding=2)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x.transpose(1, 2)))).transpose(1, 2)


class TwoStreams(nn.Module):
    """A layer of two inputs and two outputs, at which a stage cuts its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Tensors:
        return torch.tanh(self.linear(x)) + y, x


class Fork(nn.Module):
    def forward(self, x: torch.Tensor) -> Tensors:
        return x.sin(), x.cos()


class Join(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * y


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.ReLU(), nn.Linear(4 * WIDTH, WIDTH))


def between(*layers: Callable[[], nn.Module]) -> LayeredModel:
    """Layers between an embedding and logits."""
    return LayeredModel(
        (
            lambda: nn.Embedding(VOCABULARY, WIDTH),
            *layers,
            lambda: nn.Linear(WIDTH, VOCABULARY),
        ),
        cross_entropy,
    )


MODELS = {
    "convolutions": between(*[Convolution] * 4),
    "perceptrons": between(*[perceptron] * 4),
    "ReLUs": between(nn.ReLU, perceptron, nn.ReLU, nn.ReLU),
    "streams": between(Fork, TwoStreams, TwoStreams, Join),
    "transformer": gpt(
        vocab_size=VOCABULARY,
        num_layers=4,
        width=WIDTH,
        num_heads=4,
        context=CONTEXT,
        dropout=0.1,
        tied=False,
    ),
}
WAYS: dict[str, dict[str, str]] = {
    "fp32": {},
    "recomputed": {"recompute": "full"},
    "autocast": {"precision": "bf16"},
}


# Each model, and each way and schedule with some of the models.
CASES = """
    convolutions   fp32        1f1b
    convolutions   autocast    zero-bubble
    perceptrons    fp32        zero-bubble
    perceptrons    recomputed  1f1b
    ReLUs          autocast    1f1b
    streams        recomputed  zero-bubble
    streams        autocast    1f1b
    transformer    autocast    zero-bubble
"""


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("case", CASES.strip().splitlines())
def test_any_models_stages_hold_what_is_measured(case: str) -> None:
    model, way, name = case.split()
    runner = StageRunner(MODELS[model], (TOKENS,), TOKENS, **WAYS[way])
    schedule = generate(name, 2, 3)
    layers = probe(runner.model, runner.inputs, seed=0)
    ranks = peak_memory(schedule, measured_stages(runner, layers, (3, 3)))
    assert [rank.total for rank in ranks] == [
        pytest.approx(peak_by_torch(schedule, rank, runner, layers[2].outputs), rel=0.005)
        for rank in range(2)
    ]


def peak_by_torch(
    schedule: Schedule, rank: int, runner: StageRunner, sent: tuple[TensorSpec, ...]
) -> int:
    """`sent` from the first stage to the second, of three layers each."""

    def a_stage(index: int) -> Stage:
        return Stage(
            3 * index,
            {layer: runner.model.layers[layer]() for layer in range(3 * index, 3 * index + 3)},
            num_microbatches=schedule.num_microbatches,
            loss=runner.model.loss if index else None,
            recompute=runner.recompute,
            precision=runner.precision,
            splits_backward=schedule.splits,
        )

    def act(stage: Stage, action: Action) -> None:
        assert action.microbatch is not None
        last = action.stage == 1
        match action.op:
            case Op.F:
                inputs = made(sent if last else runner.inputs)
                stage.forward(action.microbatch, inputs, TOKENS.empty() if last else None)
            case Op.B:
                stage.backward(action.microbatch, () if last else made(sent))
            case Op.I:
                stage.backward_input(action.microbatch, () if last else made(sent))
            case _:
                stage.backward_weight(action.microbatch)

    return tracked_peak(schedule, rank, a_stage, act)


def made(specs: tuple[TensorSpec, ...]) -> Tensors:
    return tuple(spec.empty() for spec in specs)


LOOKS_AT_VALUES = """
from torch import nn
def layers():
    def loss(logits, targets):
        chosen = targets.flatten() > 9
        return nn.functional.cross_entropy(logits.flatten(0, 1)[chosen], targets.flatten()[chosen])
    return [nn.Embedding(256, 8), nn.Linear(8, 256)], loss
"""


def test_layers_that_depend_on_values_are_estimated_with_a_warning(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "masked_layers.py").write_text(LOOKS_AT_VALUES)
    monkeypatch.syspath_prepend(str(tmp_path))
    own: dict[str, Any] = {"model__layers": "masked_layers:layers", "pipeline__stages": 2}
    with pytest.warns(UserWarning, match="memory of layers 1 to 1 is a rough estimate, because"):
        first, last = draft(tiny(**own)).forecast.memory
    assert last.working > 0
    assert first.total > 4 * first.parameters


def test_estimate_counts_weights_as_they_are_stored() -> None:
    model = LayeredModel((lambda: nn.Embedding(VOCABULARY, WIDTH),), cross_entropy)
    stored_as: dict[torch.dtype, LayerMemory] = {}
    for dtype in (torch.float32, torch.bfloat16):
        runner = StageRunner(model, (TOKENS,), TOKENS, stored=dtype)
        layers = probe(model, (TOKENS,), 0, dtype)
        [stored_as[dtype]] = _estimated(runner, layers, (TOKENS,))
    whole = stored_as[torch.float32]
    half = stored_as[torch.bfloat16]
    assert whole.weight_bytes == 4 * VOCABULARY * WIDTH
    for key in ("parameter_bytes", "gradient_bytes", "update_bytes", "weight_bytes"):
        assert getattr(half, key) == getattr(whole, key) / 2, key


def test_users_model_that_does_not_fit_is_refused(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain_layers.py").write_text(LOOKS_AT_VALUES.replace("[chosen]", ""))
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny(model__layers="plain_layers:layers")
    held = draft(config).forecast.memory[0].total / 1e9
    tight = config.with_(pipeline__memory_gb=0.9 * held)
    with pytest.raises(ConfigError, match="rank 0 would hold"):
        draft(tight, predicts_memory=False)


def test_a_run_without_a_limit_measures_nothing(
    tiny: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes as long as some passes over the model, on every rank."""
    (tmp_path / "quick_layers.py").write_text(LOOKS_AT_VALUES)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = tiny(model__layers="quick_layers:layers")
    assert draft(config, predicts_memory=False).forecast.memory == ()


def test_allocated_bytes_follow_a_storage_to_its_last_tensor() -> None:
    kept = []
    with AllocatedBytes() as allocated:
        whole = torch.zeros(256)
        kept.append(whole[:1])
        assert allocated.now == 1024
        del whole
        assert allocated.now == 1024
        kept.clear()
        assert (allocated.now, allocated.peak) == (0, 1024)
        assert allocated.take_peak() == 1024
        assert allocated.take_peak() == 0
