"""What layers take, on layers whose time is known."""

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError
from dpipe.measure import layers
from dpipe.measure.layers import time_layers
from dpipe.measure.this_machine import _name_of, describe_this_machine
from dpipe.stage.model import LayeredModel

TINY = {"num_layers": 3, "width": 16, "num_heads": 2, "context": 8}


def config(**model: object) -> Config:
    return build({"model": {**TINY, **model}, "train": {"batch_size": 8}})


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "_STRETCH_S", 0.01)
    monkeypatch.setattr(layers, "_LONGEST_S", 0.01)


class Sleeps(torch.autograd.Function):
    """Of so many seconds a sequence, forward; backward twice as long."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(len(x) * seconds)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        time.sleep(2 * len(grad) * ctx.seconds)
        return grad, None


class Sleepy(nn.Module):
    made = 0

    def __init__(self, seconds: float) -> None:
        type(self).made += 1
        super().__init__()
        self.seconds = seconds
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Sleeps.apply(x * self.scale, self.seconds)


def sleepy() -> LayeredModel:
    from functools import partial

    slow = partial(Sleepy, 0.02)
    return LayeredModel((partial(Sleepy, 0.005), slow, slow), lambda output, targets: output.mean())


@pytest.mark.parametrize(
    ("number", "seconds", "goes_on"),
    [
        (2, 60.0, True),  # of the slowest layer three
        (3, 2.5, False),
        (11, 1.5, True),  # of a slow one twelve, if that takes no longer than two seconds
        (12, 0.4, True),
        (12, 0.6, False),
        (1000, 0.1, False),
    ],
)
def test_slow_layers_are_repeated_for_longer(
    monkeypatch: pytest.MonkeyPatch, number: int, seconds: float, goes_on: bool
) -> None:
    monkeypatch.undo()
    assert layers._goes_on(number, seconds) == goes_on


@pytest.mark.parametrize("family", ["gpt", "bert"])
def test_each_kind_of_a_transformer_is_measured_at_each_size(family: str, tmp_path: Path) -> None:
    settings = config(layers=family, vocab_size=30)
    times = time_layers(settings, (1, 2))
    kinds = [(each.kind, each.micro_batch_size) for each in times]
    assert kinds == [(kind, size) for size in (1, 2) for kind in ("embedding", "block", "head")]
    for each in times:
        assert 0 < each.forward_ms < 1e4
        assert 0 < each.backward_ms < 1e4
        assert each.backward_input_ms is not None
        assert each.backward_weight_ms is not None


@pytest.fixture
def sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's own model is `sleepy`."""
    monkeypatch.setattr(layers, "make_model", lambda config: sleepy())
    monkeypatch.setattr(layers, "vocabulary_of", lambda config: 30)
    monkeypatch.setattr(layers._Trial, "_batch", lambda self: ((torch.ones(2, 4),), torch.ones(2)))
    monkeypatch.setattr(Sleepy, "made", 0)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the clock is asked to time, in order: the layer's seconds, and the pass."""
    named = []
    timing = layers._Clock.timing

    def noted(self: layers._Clock, recipe: object, name: str):
        named.append(f"{recipe[1][0][0]:g} {name}")
        return timing(self, recipe, name)

    monkeypatch.setattr(layers._Clock, "timing", noted)
    return named


def test_layers_of_a_stage_are_measured_as_a_chain(sleeps: None, passes: list[str]) -> None:
    """Alone a layer would find its parameters in the cache, where a stage's others replace them."""
    time_layers(config(layers="some.module:model"), (2,))
    forwards = ["0.005 forward", "0.02 forward", "0.02 forward"]
    assert passes[-9:] == [
        *forwards,
        *("0.02 input", "0.02 weight", "0.02 input", "0.02 weight", "0.005 input", "0.005 weight"),
    ]
    assert [*forwards, "0.02 backward", "0.02 backward", "0.005 backward"] == passes[6:12]


@pytest.mark.parametrize(
    ("stages", "chain_bytes", "made"),
    [
        (1, 1 << 20, 6),  # all three, plain and split
        (3, 1 << 20, 4),  # a layer a stage: the third is like the second, and is not measured again
        (1, 4, 4),  # the first layer's parameters are as many as a chain should have
    ],
)
def test_chain_is_no_longer_than_a_stage_nor_than_the_cache_takes(
    sleeps: None, monkeypatch: pytest.MonkeyPatch, stages: int, chain_bytes: int, made: int
) -> None:
    monkeypatch.setattr(layers, "_CHAIN_BYTES", chain_bytes)
    settings = build(
        {
            "model": {**TINY, "layers": "some.module:model"},
            "train": {"batch_size": 8},
            "pipeline": {"stages": stages},
        }
    )
    time_layers(settings, (2,))
    assert Sleepy.made == made


def test_users_own_layers_are_measured_by_index_and_alike_ones_together(sleeps: None) -> None:
    first, second, third = time_layers(config(layers="some.module:model"), (2,))
    assert [first.kind, second.kind, third.kind] == [0, 1, 2]
    assert second.forward_ms == third.forward_ms
    for each, seconds in ((first, 0.005), (second, 0.02)):
        expected_ms = 2 * seconds * 1e3  # of two sequences
        assert each.forward_ms >= expected_ms
        assert each.backward_ms >= 2 * expected_ms
        assert each.backward_input_ms >= 2 * expected_ms
    assert second.backward_weight_ms < 40, "it has no linear layer"


@pytest.mark.gpu
def test_layers_and_memory_of_a_gpu_are_measured() -> None:
    settings = build({"model": TINY, "train": {"batch_size": 8}, "node": {"device": "cuda"}})
    here = describe_this_machine(settings, (2,), None, None)
    assert here.device.startswith("cuda ")
    assert here.devices == torch.cuda.device_count()
    assert here.memory_gb > 0
    assert [layer.kind for layer in here.layers] == ["embedding", "block", "head"]


def test_name_of_a_machine_is_that_of_its_host() -> None:
    assert _name_of("gpu-3.example.org") == "gpu-3.example.org"
    assert _name_of("my machine") == "my-machine"
    assert len(_name_of(200 * "x")) == 90
    assert _name_of("") == "machine"


def test_replay_has_no_layers() -> None:
    assert time_layers(config(layers="replay"), (1,)) == ()


def test_device_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match="node.device is 'mps'"):
        time_layers(build({"model": TINY, "node": {"device": "mps"}}), (1,))
