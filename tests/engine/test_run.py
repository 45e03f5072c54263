"""The promise that holds the rest together: how the work is cut never changes the result, not by one bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpipe.config import Config
from dpipe.engine.metrics import read_rows
from dpipe.errors import ConfigError, DataError

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
Run = Callable[..., list[BaseException | None]]

# what differs from one stage with everything off    | overrides
CUTS: dict[str, dict[str, Any]] = {
    "two stages, gpipe": {"pipeline__stages": 2, "pipeline__schedule": "gpipe"},
    "two stages, 1f1b": {"pipeline__stages": 2},
    "four stages, 1f1b": {"pipeline__stages": 4},
    "four stages, zero-bubble": {"pipeline__stages": 4, "pipeline__schedule": "zero-bubble"},
    "two ranks, interleaved": {
        "pipeline__stages": 4,
        "pipeline__stages_per_rank": 2,
        "pipeline__schedule": "interleaved",
    },
    "two stages, auto": {"pipeline__stages": 2, "pipeline__schedule": "auto"},
    "uneven split": {"pipeline__stages": 2, "pipeline__split": (1, 3)},
    "measured split": {"pipeline__stages": 2, "pipeline__split": "measured"},
    "recompute": {"pipeline__recompute": True},
    "recompute, two stages": {"pipeline__stages": 2, "pipeline__recompute": True},
    "two connections": {"pipeline__stages": 2, "transport__connections": 2},
}


@pytest.mark.parametrize("cut", CUTS)
def test_losses_are_the_same_bit_for_bit(cut: str, tiny: Make, losses: Losses, tmp_path: Path) -> None:
    settings = {"model__dropout": 0.1, "train__clip_norm": 0.1}
    whole = losses(tiny(**settings))
    assert losses(tiny(**settings, run__folder=str(tmp_path / "cut"), **CUTS[cut])) == whole
    assert len(whole) == 3


@pytest.mark.parametrize("stages", [2, 4])
def test_tied_embeddings_are_the_same_bit_for_bit(stages: int, tiny: Make, losses: Losses, tmp_path: Path) -> None:
    whole = losses(tiny(model__tie_embeddings=True))
    cut = tiny(model__tie_embeddings=True, pipeline__stages=stages, run__folder=str(tmp_path / "cut"))
    assert losses(cut) == whole


def test_dropout_changes_the_result(tiny: Make, losses: Losses, tmp_path: Path) -> None:
    """Else the bit-for-bit tests above would prove nothing about it."""
    assert losses(tiny(model__dropout=0.1)) != losses(tiny(run__folder=str(tmp_path / "other")))


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_learns_alike(precision: str, tiny: Make, losses: Losses, tmp_path: Path) -> None:
    full = losses(tiny(pipeline__stages=2))
    half = losses(tiny(pipeline__stages=2, train__precision=precision, run__folder=str(tmp_path / "half")))
    assert half == pytest.approx(full, rel=0.02)
    assert half != full


@pytest.mark.parametrize("wire", ["bf16", "fp16", "int8"])
def test_lossy_wire_learns_alike(wire: str, tiny: Make, losses: Losses, tmp_path: Path) -> None:
    exact = losses(tiny(pipeline__stages=2))
    lossy = losses(tiny(pipeline__stages=2, pipeline__wire=wire, run__folder=str(tmp_path / "lossy")))
    assert lossy == pytest.approx(exact, rel=0.02)
    assert lossy != exact


def test_held_out_loss_is_measured_at_both_ends_and_between(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2, train__eval_every=2, train__eval_batches=2)
    losses(config)
    rows = [row for row in read_rows(Path(config.run.folder)) if "held_out_loss" in row]
    assert [row["step"] for row in rows] == [0, 2, 3]
    assert rows[-1]["held_out_loss"] < rows[0]["held_out_loss"]


def test_rows_tell_rates_by_link(tiny: Make, losses: Losses) -> None:
    config = tiny(pipeline__stages=2)
    losses(config)
    row = read_rows(Path(config.run.folder))[-1]
    assert set(row["mb_per_s"]) == {"0->1", "1->0"}
    assert 0 <= row["bubble"] < 1
    assert set(row["memory_mb"]) == {"0", "1"}


def test_folder_of_another_run_is_not_written_over(tiny: Make, losses: Losses, run_ranks: Run) -> None:
    losses(tiny())
    (error,) = run_ranks(tiny())
    assert isinstance(error, ConfigError)
    assert "already holds a run" in str(error)


def test_text_that_is_too_short_is_refused_before_anything_is_written(tiny: Make, run_ranks: Run) -> None:
    config = tiny(model__context=100_000)
    (error,) = run_ranks(config)
    assert isinstance(error, DataError)
    assert not Path(config.run.folder).exists()


def test_vocabulary_smaller_than_the_tokenizers_is_refused(tiny: Make, run_ranks: Run) -> None:
    (error,) = run_ranks(tiny(model__vocab_size=100))
    assert isinstance(error, DataError)
    assert "256 entries, but model.vocab_size is 100" in str(error)


def test_rank_with_another_configuration_is_refused_and_the_key_named(tiny: Make, run_ranks: Run) -> None:
    errors = run_ranks(tiny(pipeline__stages=2), of_rank={1: tiny(pipeline__stages=2, train__seed=7)})
    assert all("train.seed" in str(error) for error in errors)
