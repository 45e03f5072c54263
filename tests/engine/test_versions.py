"""A stage with two versions of its weights."""

import torch
from torch import nn

from dpipe.engine.versions import TwoVersions
from dpipe.stage.stage import Stage


def stage_of(weight: torch.Tensor) -> Stage:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.data.copy_(weight)
    return Stage(0, {0: layer}, num_microbatches=1, precision="bf16", parameters="bf16")


def test_evaluation_behind_a_step_is_of_the_newest_weights() -> None:
    """In half precision it was of those before: nobody had rounded the new ones yet."""
    torch.manual_seed(0)
    weight = torch.randn(4, 4)
    stage = TwoVersions((stage_of(weight), stage_of(weight)), num_pieces=1)
    inputs = torch.randn(2, 4).bfloat16()
    stage.begin_step(0)
    stage.forward(0, (inputs,))
    stage.backward(0, (torch.ones(2, 4).bfloat16(),))
    stage.complete()
    (parameter,) = stage.parameters()
    assert parameter.grad is not None
    parameter.data.sub_(parameter.grad)
    stage.zero_grad()
    (expected,) = stage_of(parameter.data).evaluate((inputs,))
    (evaluated,) = stage.evaluate((inputs,))
    assert torch.equal(evaluated, expected)
