"""Runs of a model made for narrow links."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import draft
from dpipe.report.trace import load_inputs, load_trace
from dpipe.run.generate import generate_text
from dpipe.schedule.action import Op

Make = Callable[..., Config]
Losses = Callable[..., list[float]]

NARROW: dict[str, Any] = {"model__num_layers": 4, "model__bottleneck_width": 3}
CUTS: dict[str, dict[str, Any]] = {
    "two stages": {"pipeline__stages": 2},
    "four stages": {"pipeline__stages": 4},
    "four stages, recomputed": {"pipeline__stages": 4, "pipeline__recompute": "full"},
    "two stages, slices": {"pipeline__stages": 2, "pipeline__sequence_slices": 2},
}


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", CUTS)
def test_losses_do_not_depend_on_the_number_of_stages(
    tiny: Make, losses: Losses, tmp_path: Path, name: str
) -> None:
    cut = {**NARROW, **CUTS[name], "train__eval_every": 3}
    one = losses(tiny(**cut | {"pipeline__stages": 1, "run__folder": str(tmp_path / "one")}))
    assert losses(tiny(**cut)) == one


def test_simulator_predicts_the_bytes_that_are_sent(tiny: Make, losses: Losses) -> None:
    config = tiny(**NARROW, pipeline__stages=2, run__trace_steps=1)
    losses(config)
    num_tokens = 2 * 16  # of a micro-batch
    numbers = num_tokens * 3 * 4
    predicted = load_inputs(Path(config.run.folder) / "trace").cost
    assert predicted.activation_bytes == (numbers + num_tokens,)  # a word has a byte
    assert predicted.gradient_bytes == (numbers,)
    ((_, _, timeline),) = load_trace(Path(config.run.folder)).steps
    num_microbatches = config.train.num_microbatches
    for op, num_bytes in ((Op.SEND_F, numbers + num_tokens), (Op.SEND_B, numbers)):
        sent = [span.num_bytes for span in timeline.spans if span.action.op is op]
        assert sum(sent) == num_microbatches * num_bytes


def test_text_is_continued_by_a_narrow_model(tiny: Make, losses: Losses) -> None:
    config = tiny(**NARROW, pipeline__stages=2)
    losses(config)
    text = generate_text(Path(config.run.folder), "The quick", tokens=4, temperature=0.8, seed=0)
    assert text.startswith("The quick")


def test_fewer_layers_than_stages_say_how_many_there_are(tiny: Make) -> None:
    config = tiny(**NARROW, model__bottleneck_every=2, pipeline__stages=4)
    with pytest.raises(ConfigError, match="2 layers cannot make 4 stages"):
        draft(config)
