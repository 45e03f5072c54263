import json
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from dpipe.config.run import TrainConfig
from dpipe.dataparallel.single import Single
from dpipe.engine.ballot import Ballot, RankReport
from dpipe.engine.update import LossScale, Update, count, learning_rate
from dpipe.errors import NumericError
from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.ranks import ParallelRanks


class OneLayer:
    """A stage of one layer with one matrix."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(torch.ones(2, 2))

    def layer_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        return {0: [("layers.0.weight", self.weight)]}

    def zero_grad(self) -> None:
        self.weight.grad = None


class Heard:
    """A gather of one rank that records the payloads."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []

    def __call__(self, key: str, payload: bytes) -> "Heard":
        self.said.append(json.loads(payload))
        return self

    def wait(self, timeout_s: float) -> Sequence[bytes]:
        return [json.dumps(self.said[-1]).encode()]


def an_update(stage: OneLayer, **train: Any) -> Update:
    settings = {"steps": 10, "learning_rate": 0.5, "decay": "none", "weight_decay": 0.0} | train
    chosen = TrainConfig(**settings)
    single = Single(
        {0: stage}, OptimizerSettings(chosen.learning_rate, chosen.weight_decay, chosen.betas)
    )
    return Update({0: stage}, chosen, single, gather=Heard(), timeout_s=1)


def one_step(
    update: Update, stage: OneLayer, grad: float, step: int = 0, stop: bool = False
) -> Any:
    stage.weight.grad = torch.full((2, 2), grad * update.loss_scale.value)
    update.begin(step)
    factor, verdict = update.vote(step, 1.5, update.measure(), stop=stop)
    update.num_updates += update.step(0, factor)
    return verdict


def ballot(
    loss: float | None, norms: dict[int, float], stop: bool = False, bad: str | None = None
) -> Ballot:
    return Ballot(loss=loss, norms=norms, bad=bad, stop=stop, report=RankReport())


@pytest.mark.parametrize(
    ("decay", "expected"),
    [
        #           warm-up   top  ......  half way  end
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.1]),
        ("cosine", [0.5, 1.0, 1.0, 0.8682, 0.55, 0.1]),
        ("none", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ],
)
def test_learning_rate_warms_up_and_decays(decay: str, expected: list[float]) -> None:
    train = TrainConfig(
        steps=10, learning_rate=1.0, min_learning_rate=0.1, warmup_steps=2, decay=decay
    )
    assert [learning_rate(train, step) for step in (0, 1, 2, 4, 6, 10)] == pytest.approx(
        expected, abs=1e-4
    )


def test_norm_is_summed_in_layer_order_for_any_split() -> None:
    squares = {0: 0.1, 1: 0.2, 2: 0.3, 3: 0.7}
    whole = count(0, [ballot(1.0, squares)])
    cut = count(0, [ballot(None, {0: 0.1, 3: 0.7}), ballot(1.0, {1: 0.2, 2: 0.3})])
    assert whole.norm == cut.norm == math.sqrt(0.1 + 0.2 + 0.3 + 0.7)


def test_verdict_stops_when_one_rank_asks() -> None:
    assert count(0, [ballot(1.0, {}), ballot(None, {}, stop=True)]).stop


def test_verdict_names_rank_and_parameter_that_overflowed() -> None:
    verdict = count(0, [ballot(1.0, {0: 1.0}), ballot(None, {1: math.inf}, bad="layers.1.weight")])
    assert verdict.culprit == "the gradient of layers.1.weight on rank 1"


def test_verdict_names_the_layer_whose_average_overflowed() -> None:
    verdict = count(0, [ballot(1.0, {0: 1.0, 1: math.inf})])
    assert verdict.culprit == "the gradient of layer 1"


def test_verdict_sums_the_replicas_norms_of_a_layer_and_averages_the_loss() -> None:
    here = ParallelRanks(rank=2, pp_size=2, dp_size=2)
    ballots = [
        ballot(None, {0: 1.0}),
        ballot(3.0, {1: 2.0}),
        ballot(None, {0: 4.0}),
        ballot(5.0, {1: 9.0}),
    ]
    assert (count(0, ballots, here).norm, count(0, ballots, here).loss) == (4.0, 4.0)
    assert count(0, ballots, here, independent=True).norm == math.sqrt(13)


def test_gradients_are_clipped_by_the_norm() -> None:
    stage = OneLayer()
    update = an_update(stage, clip_norm=1.0)
    stage.weight.grad = torch.full((2, 2), 3.0)  # norm 6
    update.begin(0)
    stage.zero_grad = lambda: None  # type: ignore[method-assign]
    update.step(0, update.vote(0, 1.5, update.measure()).factor)
    torch.testing.assert_close(stage.weight.grad, torch.full((2, 2), 0.5))


def test_verdict_of_the_same_step_is_waited_for_when_clipping() -> None:
    stage = OneLayer()
    verdict = one_step(an_update(stage, clip_norm=1.0), stage, 1.0)
    assert (verdict.step, verdict.norm) == (0, 2.0)


def test_parts_of_a_step_are_timed_by_their_names() -> None:
    stage, parts = OneLayer(), []
    update = an_update(stage, clip_norm=1.0)
    update._timed = lambda name: nullcontext(parts.append(name))
    one_step(update, stage, 1.0)
    assert parts == [
        "optimizer-unscale-and-check-inf",
        "optimizer-clip-main-grad",
        "optimizer-inner-step",
    ]


def test_verdict_comes_one_step_late_when_nobody_needs_it() -> None:
    stage = OneLayer()
    update = an_update(stage, clip_norm=0)
    seen = [one_step(update, stage, 1.0, step) for step in (0, 1)]
    (last,) = update.drain()
    assert (seen[0], seen[1].step) == (None, 0)
    assert last is not None
    assert last.step == 1


def test_loss_scale_halves_and_the_step_is_skipped_on_overflow() -> None:
    stage = OneLayer()
    update = an_update(stage, precision="fp16", clip_norm=0)
    before = update.loss_scale.value
    one_step(update, stage, math.inf)
    assert update.loss_scale.value == before / 2
    assert update.num_updates == 0
    assert torch.equal(stage.weight, torch.ones(2, 2))


@pytest.mark.parametrize(
    ("before", "after", "goes_on_at"),
    [("fp16", "fp16", 8.0), ("fp32", "fp16", None), ("fp16", "fp32", None)],
)
def test_loss_scale_goes_on_in_the_precision_that_it_is_of(
    before: str, after: str, goes_on_at: float | None
) -> None:
    saved, restored = LossScale(before == "fp16"), LossScale(after == "fp16")
    if saved.dynamic:
        saved.value, saved.good_steps = 8.0, 5
    began = restored.value
    restored.restore(saved.state())
    assert restored.value == (goes_on_at or began)


def test_gradient_is_unscaled() -> None:
    moved = []
    for precision in ("fp32", "fp16"):
        stage = OneLayer()
        one_step(an_update(stage, precision=precision, clip_norm=0.25), stage, 0.3)
        moved.append(stage.weight.detach())
    torch.testing.assert_close(*moved)


def test_gradient_that_is_not_finite_ends_the_run_without_loss_scaling() -> None:
    stage = OneLayer()
    with pytest.raises(
        NumericError, match="step 0: the gradient of layers.0.weight on rank 0 is not finite"
    ):
        one_step(an_update(stage, clip_norm=1.0), stage, math.nan)


def test_state_restores_to_the_same_next_step() -> None:
    stage, other = OneLayer(), OneLayer()
    update, resumed = an_update(stage), an_update(other)
    one_step(update, stage, 0.3, 0)
    resumed.restore(*update.state())
    with torch.no_grad():
        other.weight.copy_(stage.weight)
    one_step(update, stage, -0.7, 1)
    one_step(resumed, other, -0.7, 1)
    assert torch.equal(stage.weight, other.weight)


def test_loss_of_a_tensor_parallel_group_counts_once() -> None:
    here, heard = ParallelRanks(rank=1, tp_size=2), Heard()
    stage = OneLayer()
    update = Update(
        {0: stage}, TrainConfig(clip_norm=0.0), Single(), gather=heard, timeout_s=1, here=here
    )
    update.begin(0)
    update.vote(0, 1.5, update.measure())
    assert heard.said[0]["loss"] is None
