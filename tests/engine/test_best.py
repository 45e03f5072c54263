"""The checkpoint of the lowest held-out loss, and the end of a run that no longer learns."""

from collections.abc import Callable
from pathlib import Path

import pytest

from dpipe.config.load import Config, build
from dpipe.config.run import TrainConfig
from dpipe.engine.best import Best
from dpipe.engine.update import learning_rate
from dpipe.errors import CheckpointError, ConfigError
from dpipe.report.metrics import read_rows
from dpipe.store import checkpoint
from dpipe.store.run_folder import checkpoint_url

Make = Callable[..., Config]


def test_best_is_the_lowest_and_gives_up_after_patience() -> None:
    best = Best(patience=2)
    heard = [best.hear(step, loss) for step, loss in ((1, 3.0), (2, 2.0), (3, 2.0))]
    assert heard == [True, True, False]
    assert not best.gives_up
    best.hear(4, float("nan"))
    assert (best.step, best.gives_up) == (2, True)


def test_best_goes_on_from_a_checkpoint() -> None:
    best = Best(patience=1)
    best.hear(7, 1.5)
    resumed = Best(patience=1)
    resumed.restore(best.state())
    assert not resumed.hear(8, 1.5)
    assert (resumed.step, resumed.gives_up) == (7, True)
    assert Best().state() == {}


@pytest.mark.parametrize("broken", [{"best_loss": "low"}, {"best_step": True}, {"best_waited": -1}])
def test_best_that_no_run_writes_is_refused(broken: dict[str, object]) -> None:
    best = Best()
    best.hear(7, 1.5)
    with pytest.raises(CheckpointError, match="the checkpoint's best loss"):
        Best().restore({**best.state(), **broken})


@pytest.mark.slow
def test_run_that_no_longer_learns_ends_and_keeps_its_best(
    tiny: Make, losses: Callable[..., list[float]]
) -> None:
    """At this rate the loss falls and then rises for good."""
    config = tiny(
        pipeline__stages=2,
        train__steps=40,
        train__learning_rate=0.3,
        train__decay="none",
        train__clip_norm=0.0,
        train__eval_every=2,
        train__patience=3,
        run__keep_best=True,
        run__keep=1,
    )
    taken = losses(config)
    assert len(taken) < 40
    rows = read_rows(Path(config.run.folder))
    held_out = {row["step"]: row["held_out_loss"] for row in rows if "held_out_loss" in row}
    del held_out[0]  # of the untrained model, whose checkpoint nobody wants
    lowest = min(held_out, key=lambda step: held_out[step])
    url = checkpoint_url(config)
    assert checkpoint.best(url) == lowest == len(taken) - 6
    assert checkpoint.load(url, lambda name: True, lowest).step == lowest
    assert checkpoint.latest(url) == len(taken)


def test_best_of_a_run_that_kept_none_is_refused(
    tiny: Make, losses: Callable[..., list[float]]
) -> None:
    config = tiny(train__steps=1)
    losses(config)
    with pytest.raises(CheckpointError, match=r"train with run.keep_best and train.eval_every"):
        checkpoint.best(checkpoint_url(config))


def test_epochs_are_as_many_steps_as_the_text_has_batches(
    tiny: Make, losses: Callable[..., list[float]]
) -> None:
    from dpipe.plan.run_plan import read_text

    config = tiny(train__epochs=0.02)
    corpus = read_text(config)
    batch = config.train.batch_size * config.model.context
    expected = -(-round(0.02 * corpus.facts.num_train_tokens / config.model.context)
                 * config.model.context // batch)  # fmt: skip
    assert len(losses(config)) == expected


def test_warmup_ratio_is_a_share_of_the_steps() -> None:
    by_ratio = TrainConfig(steps=30, warmup_ratio=0.1, decay="none", learning_rate=1.0)
    rates = [learning_rate(by_ratio, step) for step in range(4)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1.0, 1.0])


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"warmup_ratio": 0.1, "warmup_steps": 3}, "leave one out"),
        ({"patience": 3}, "set train.eval_every too"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(
    train: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        build({"train": train})


def test_epochs_of_a_replay_are_refused() -> None:
    with pytest.raises(ConfigError, match="train.epochs are of rows or texts"):
        build({"train": {"epochs": 1.0}, "model": {"layers": "replay"}})
