"""Runs whose steps overlap (`pipeline.schedule = "2bw"`): what they learn, and that it depends
neither on the cut nor on pauses, nor on being stopped.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dpipe.config.load import Config
from dpipe.data.corpus import Corpus
from dpipe.data.feed import TextFeed
from dpipe.errors import ConfigError
from dpipe.plan.forecast import without_search
from dpipe.plan.run_plan import draft
from dpipe.stage.model import LayeredModel, materialise

STEPS = 6
OVERLAPPING = {
    "pipeline__schedule": "2bw",
    "train__steps": STEPS,
    "train__eval_every": None,
    "model__tie_embeddings": False,
}


def test_each_step_computes_with_the_weights_before_the_last_step(
    tiny: Callable[..., Config], losses: Callable[..., list[float]]
) -> None:
    """W(t + 1) = W(t) - rate * gradient at W(t - 1)."""
    config = tiny(
        **OVERLAPPING,
        pipeline__stages=2,
        train__optimizer="sgd",
        train__betas=(0.0, 0.999),
        train__weight_decay=0.0,
        train__clip_norm=0.0,
        train__decay="none",
        train__learning_rate=0.5,
    )
    assert losses(config) == pytest.approx(plainly(config), rel=1e-6)


@pytest.mark.parametrize("stages", [2, 4])
def test_number_of_stages_does_not_change_a_bit(
    stages: int, tiny: Callable[..., Config], losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    one = losses(tiny(**OVERLAPPING, run__folder=str(tmp_path / "one")))
    cut = tiny(**OVERLAPPING, pipeline__stages=stages, run__folder=str(tmp_path / "cut"))
    assert losses(cut) == one
    plain = tiny(**{**OVERLAPPING, "pipeline__schedule": "1f1b"})
    assert losses(plain) != one


def test_pauses_for_evaluations_and_checkpoints_do_not_change_a_bit(
    tiny: Callable[..., Config], losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    whole = tiny(**OVERLAPPING, pipeline__stages=2, run__folder=str(tmp_path / "whole"))
    paused = {
        **OVERLAPPING,
        "train__eval_every": 2,
        "run__checkpoint_every": 3,
        "run__folder": str(tmp_path / "paused"),
    }
    assert losses(tiny(**paused, pipeline__stages=2)) == losses(whole)


def test_replicas_learn_what_one_process_learns(
    tiny: Callable[..., Config], losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    one = losses(tiny(**OVERLAPPING, run__folder=str(tmp_path / "one")))
    two = {
        "data_parallel__replicas": 2,
        "data_parallel__kind": "all-reduce",
        "train__num_microbatches": 2,
        "pipeline__stages": 2,
    }
    assert losses(tiny(**OVERLAPPING, **two)) == pytest.approx(one, rel=1e-5)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("at", [3, 4])
def test_resumed_run_goes_on_with_both_versions(
    at: int, tiny: Callable[..., Config], losses: Callable[..., list[float]], tmp_path: Path
) -> None:
    whole = losses(tiny(**OVERLAPPING, run__folder=str(tmp_path / "whole")))
    saving = {**OVERLAPPING, "run__checkpoint_every": at}
    first = tiny(**saving, pipeline__stages=2)
    losses(first)
    for later in Path(first.run.folder).glob(f"checkpoints/*{STEPS}*"):
        later.rename(tmp_path / later.name)
    resumed = losses(tiny(**saving, pipeline__stages=4), resume=True)
    assert resumed[-(STEPS - at) :] == whole[at:]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"data_parallel__replicas": 2, "data_parallel__kind": "local-sgd"},
            'needs data_parallel.kind "all-reduce", not "local-sgd"',
        ),
        ({"tensor_parallel__size": 2}, "needs tensor_parallel.size 1"),
        ({"train__precision": "fp16"}, 'needs train.precision "bf16" or "fp32"'),
    ],
)
def test_what_does_not_go_with_two_versions_is_refused(
    changes: dict[str, object], words: str, tiny: Callable[..., Config]
) -> None:
    with pytest.raises(ConfigError, match=words):
        tiny(**OVERLAPPING, **changes)


def plainly(config: Config) -> list[float]:
    """The losses of the same job by a loop over two copies of the weights."""
    plan = draft(config, choose=without_search)
    assert plan.model is not None
    assert isinstance(plan.corpus, Corpus)
    feed = TextFeed(plan.corpus, config.train, config.model.context)
    before, now = (layers_of(plan.model, config.train.seed) for _ in range(2))
    losses = []
    for step in range(config.train.steps):
        batch = feed.training(step)
        loss = torch.zeros(())
        for (inputs,), targets in zip(batch.inputs, batch.targets, strict=True):
            loss = loss + plan.model.loss(before(inputs), targets) / len(batch.inputs)
        gradients = torch.autograd.grad(loss, list(before.parameters()))
        with torch.no_grad():
            triples = zip(before.parameters(), now.parameters(), gradients, strict=True)
            for old, new, gradient in triples:
                # What steps becomes the newest; the other is what the next step computes with.
                old.copy_(new - config.train.learning_rate * gradient)
        before, now = now, before
        losses.append(loss.item())
    return losses


def layers_of(model: LayeredModel, seed: int) -> torch.nn.Sequential:
    layers = [materialise(model, layer, seed, "cpu") for layer in range(len(model.layers))]
    return torch.nn.Sequential(*layers)
