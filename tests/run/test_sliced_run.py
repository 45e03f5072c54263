"""Runs whose sequences are cut into slices, beside runs of whole sequences."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpipe.config.load import Config
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_inputs, load_trace, write_chrome
from dpipe.schedule.action import Op

Make = Callable[..., Config]
Losses = Callable[..., list[float]]

CUTS: dict[str, dict[str, Any]] = {
    "two stages, 1f1b": {"pipeline__stages": 2},
    "four stages, gpipe": {"pipeline__stages": 4, "pipeline__schedule": "gpipe"},
    "two stages, auto": {"pipeline__stages": 2, "pipeline__schedule": "auto"},
    "two stages, recomputed": {"pipeline__stages": 2, "pipeline__recompute": "full"},
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", CUTS)
def test_losses_of_slices_do_not_depend_on_stages_and_schedule(
    tiny: Make, losses: Losses, tmp_path: Path, name: str
) -> None:
    sliced = {"pipeline__sequence_slices": 4, "train__eval_every": 3}
    one = losses(tiny(**sliced, run__folder=str(tmp_path / "one")))
    assert losses(tiny(**sliced, **CUTS[name])) == one


@pytest.mark.slow
def test_losses_of_slices_are_those_of_whole_sequences_up_to_rounding(
    tiny: Make, losses: Losses, tmp_path: Path
) -> None:
    whole = losses(tiny(train__steps=6, run__folder=str(tmp_path / "whole")))
    cut = losses(tiny(train__steps=6, pipeline__stages=2, pipeline__sequence_slices=8))
    assert cut == pytest.approx(whole, rel=1e-5)


def test_evaluation_reads_whole_sequences(tiny: Make, losses: Losses, tmp_path: Path) -> None:
    """Before the first update, so that the parameters are the same to the bit."""

    def before_the_first_step(folder: str, **overrides: Any) -> float:
        settings = {"train__steps": 1, "train__eval_every": 1}
        losses(tiny(run__folder=str(tmp_path / folder), **settings, **overrides))
        rows = read_rows(tmp_path / folder)
        loss: float = next(row["held_out_loss"] for row in rows if "held_out_loss" in row)
        return loss

    cut = {"pipeline__stages": 2, "pipeline__sequence_slices": 4}
    assert before_the_first_step("cut", **cut) == before_the_first_step("whole")


def test_trace_knows_slices_and_what_each_sends(tiny: Make, losses: Losses) -> None:
    sliced = {"pipeline__stages": 2, "pipeline__sequence_slices": 4, "pipeline__wire": "int8"}
    config = tiny(**sliced, run__trace_steps=1)
    losses(config)
    folder = Path(config.run.folder)
    inputs = load_inputs(folder / "trace")
    assert inputs.schedule.num_slices == 4
    assert inputs.cost.num_slices == 4
    ((_, _, timeline),) = load_trace(folder).steps
    sent = [span for span in timeline.spans if span.action.op is Op.SEND_F]
    assert {span.num_bytes for span in sent} == {inputs.cost.activation_bytes[0]}
    assert {span.action.microbatch for span in sent} == set(range(16))
    write_chrome(folder)
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert any(event.get("name") == "1F15" for event in events)
