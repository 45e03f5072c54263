"""BERT in whole runs: as for the GPT, stages and schedule never change the result by one bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.pieces import word_pieces

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError, DataError
from dpipe.plan.costs import transformer_costs
from dpipe.plan.forecast import forecast
from dpipe.plan.run_plan import draft
from dpipe.report.metrics import read_rows
from dpipe.run.generate import generate_text
from dpipe.store.run_folder import open_folder, save_configuration

Make = Callable[..., Config]
Losses = Callable[..., list[float]]
Run = Callable[..., list[BaseException | None]]

# Relative: fp32 sums in another order, of which Adam makes a whole step where a gradient is all but
# zero. Seen: 6e-8 on one machine, 1.2e-6 on another. Replicas that read the same rows differ by
# 4e-2.
ROUNDING = 1e-5

SUBJECTS, VERBS = (
    ("the fox", "a dog", "the cat", "one bird", "an old man"),
    ("sees", "hears", "finds", "follows"),
)
SENTENCES = [
    f"{subject} {verb} {other} ." for subject in SUBJECTS for verb in VERBS for other in SUBJECTS
]
TEXT = "\n".join(SENTENCES) + "\n\n" + "\n".join(reversed(SENTENCES)) + "\n"

CUTS: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline__stages": 2, "pipeline__split": "measured"},
    "four stages": {"pipeline__stages": 4, "pipeline__schedule": "zero-bubble"},
    "recompute attention": {"pipeline__recompute": "selective"},
}


@pytest.fixture
def small(tiny: Make, tmp_path: Path) -> Make:
    """`small(pipeline__stages=2)`: a BERT of four layers on a short text."""
    (tmp_path / "sentences.txt").write_text(TEXT)
    word_pieces(TEXT).save(str(tmp_path / "pieces.json"))

    def make(**overrides: Any) -> Config:
        bert = {
            "model__layers": "bert",
            "model__tie_embeddings": True,
            "data__files": [str(tmp_path / "sentences.txt")],
            "data__tokenizer": str(tmp_path / "pieces.json"),
        }
        return tiny(**(bert | overrides))

    return make


def test_losses_are_the_same_bit_for_bit_in_any_cut(
    small: Make, losses: Losses, tmp_path: Path
) -> None:
    settings = {"model__dropout": 0.1, "train__clip_norm": 0.1}
    whole = losses(small(**settings))
    assert len(whole) == 3
    cut = {
        name: losses(small(**settings, **how, run__folder=str(tmp_path / name)))
        for name, how in CUTS.items()
    }
    assert cut == dict.fromkeys(CUTS, whole)


def test_replicas_read_the_batch_of_one_process(
    small: Make, losses: Losses, tmp_path: Path
) -> None:
    whole = losses(small(data_parallel__kind="none"))
    shared = small(
        train__num_microbatches=2,
        data_parallel__kind="all-reduce",
        data_parallel__replicas=2,
        run__folder=str(tmp_path / "two"),
    )
    assert losses(shared) == pytest.approx(whole, rel=ROUNDING)


@pytest.mark.slow
def test_tensor_parallel_stages_have_the_losses_of_one_process(
    small: Make, losses: Losses, tmp_path: Path
) -> None:
    settings = {"model__dropout": 0.1, "model__vocab_size": 64}
    whole = losses(small(**settings))
    how = {
        "tensor_parallel__size": 2,
        "tensor_parallel__sequence_parallel": True,
        "pipeline__stages": 2,
    }
    assert losses(small(**settings, **how, run__folder=str(tmp_path / "split"))) == pytest.approx(
        whole, rel=ROUNDING
    )


def test_held_out_loss_falls(small: Make, losses: Losses) -> None:
    config = small(
        train__steps=10, train__eval_every=10, data__held_out=0.4, train__learning_rate=2e-2
    )
    losses(config)
    rows = [
        row["held_out_loss"] for row in read_rows(Path(config.run.folder)) if "held_out_loss" in row
    ]
    assert rows[-1] < rows[0] - 0.3


def test_generate_refuses_a_model_that_continues_no_text(small: Make, tmp_path: Path) -> None:
    folder = open_folder(small(), resume=False)
    save_configuration(folder, small())
    with pytest.raises(
        ConfigError,
        match='run of model.layers "bert", which continues no text; generate from a run of "gpt"',
    ):
        generate_text(folder, "the fox", tokens=1, temperature=0.0, seed=0)


def test_text_without_sentence_breaks_is_refused_before_anything_is_written(
    small: Make, run_ranks: Run, tmp_path: Path
) -> None:
    (tmp_path / "sentences.txt").write_text(TEXT.replace("\n", " "))
    config = small()
    (error,) = run_ranks(config)
    assert isinstance(error, DataError)
    assert "write one sentence a line" in str(error)
    assert not Path(config.data.cache).exists()
    assert not Path(config.run.folder).exists()


def test_hop_carries_the_lengths_beside_the_activation(small: Make) -> None:
    config = small(pipeline__stages=2)
    (boundary,) = draft(config).boundaries
    assert [str(spec) for spec in boundary] == ["float32[2, 16, 16]", "int32[2]"]
    message = transformer_costs(config).messages[0]
    assert message.activation_bytes("none") == sum(spec.num_bytes for spec in boundary)
    assert message.gradient_bytes("none") == boundary[0].num_bytes


def test_forecast_counts_the_parameters_of_the_preset() -> None:
    """Of Megatron's published BERT, called 345M; its tied embedding is counted once."""
    config = build({"model": {"preset": "bert-345m"}})
    costs = transformer_costs(config)
    parameters = (sum(costs.parameter_bytes) - costs.tied_bytes) / 4
    assert parameters == pytest.approx(336e6, rel=0.01)
    assert forecast(config).memory[0].parameters == sum(costs.parameter_bytes)
