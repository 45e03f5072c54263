import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from dpipe.report.summary import TextScale, bits_per_byte, learned, show_summary

SCALE = TextScale(train_bytes_per_token=1.0, held_out_bytes_per_token=1.0, bigram_entropy=3.4)
ROWS = [
    {"step": 0, "held_out_loss": 5.5},
    {"step": 0, "loss": 5.0, "step_s": 0.5},
    {"step": 1, "loss": 3.0, "step_s": 0.5},
    {"step": 2, "held_out_loss": 2.0},
]


def summary(
    run: Path,
    rows: list[dict[str, float]],
    sample: str | None = None,
    shards: int = 1,
    scale: TextScale | None = SCALE,
) -> str:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    out = StringIO()
    console, url = Console(file=out, width=200), f"{run}/checkpoints"
    show_summary(console, run, scale=scale, checkpoint_url=url, sample=sample, shards=shards)
    return out.getvalue()


def test_bits_per_byte_of_a_uniform_guess_over_bytes_is_eight() -> None:
    assert bits_per_byte(5.545177, bytes_per_token=1.0) == pytest.approx(8.0, abs=1e-4)


def test_bits_per_byte_counts_the_bytes_of_a_token() -> None:
    assert bits_per_byte(5.545177, bytes_per_token=4.0) == pytest.approx(2.0, abs=1e-4)


def test_summary_has_the_held_out_loss_at_start_and_end() -> None:
    result = learned(ROWS)
    assert result is not None
    assert (result.train_start, result.held_out_start, result.held_out_end) == (5.0, 5.5, 2.0)


def test_run_without_steps_has_learned_nothing() -> None:
    assert learned([]) is None


@pytest.mark.parametrize(("held_out", "verdict"), [(2.0, "beats"), (3.0, "does not beat")])
def test_summary_says_whether_the_bigram_entropy_is_beaten(
    tmp_path: Path, held_out: float, verdict: str
) -> None:
    text = summary(tmp_path, [*ROWS[:3], {"step": 2, "held_out_loss": held_out}])
    assert (
        f"held-out loss {bits_per_byte(held_out, 1.0):.3f} {verdict} the bigram entropy 3.400"
        in text
    )


def test_summary_says_where_everything_is(tmp_path: Path) -> None:
    text = summary(tmp_path, ROWS, sample="My fellow [bold] citizens")
    assert f"{tmp_path}/metrics.jsonl" in text
    assert f"{tmp_path}/checkpoints" in text
    assert "My fellow [bold] citizens" in text
    assert "2 steps in 1 s" in text


def test_summary_names_a_folder_with_brackets_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "run [b]"
    folder.mkdir()
    assert summary(folder, ROWS).count("run [b]") == 4


def test_summary_quotes_a_folder_where_it_is_for_a_shell(tmp_path: Path) -> None:
    folder = tmp_path / "ü x"
    (folder / "tensorboard").mkdir(parents=True)
    text = summary(folder, ROWS)
    assert f"dpipe generate '{folder}' --prompt" in text
    assert f"tensorboard --logdir '{folder}/tensorboard'" in text
    assert f"metrics      {folder}/metrics.jsonl" in text


def test_summary_counts_the_steps_between_those_that_were_logged(tmp_path: Path) -> None:
    rows = [{"step": step, "loss": 3.0, "step_s": 0.5} for step in (0, 4, 7)]
    assert "8 steps in about 4 s" in summary(tmp_path, rows)


def test_summary_of_a_model_without_text_has_plain_losses(tmp_path: Path) -> None:
    text = summary(tmp_path, ROWS, scale=None)
    assert "training │ 5.000 │ 4.000" in " ".join(text.split())
    assert "bits per byte" not in text
    assert "dpipe generate" not in text


def test_summary_says_what_sharding_saves(tmp_path: Path) -> None:
    """Two replicas of two ranks; ranks 1 and 3 hold the larger stage."""
    held = {"0": 1.0, "1": 2.5, "2": 1.0, "3": 2.0}
    text = summary(
        tmp_path, [{"step": 0, "loss": 5.0, "step_s": 0.5, "optimizer_mb": held}], shards=2
    )
    assert (
        "2.50 MB on rank 1, which has most of it; unsharded 4.50 MB, so 2.00 MB are saved" in text
    )
