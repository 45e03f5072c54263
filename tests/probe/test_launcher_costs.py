import pytest
import torch

from dpipe.errors import ConfigError
from dpipe.probe.launcher_costs import from_text, to_text
from dpipe.probe.layer_costs import LayerCost, probe
from dpipe.stage.gpt import gpt
from dpipe.wire.spec import TensorSpec

TOKENS = [TensorSpec((2, 6), torch.int64)]


def costs(num_layers: int) -> tuple[LayerCost, ...]:
    sizes = {"vocab_size": 13, "width": 16, "num_heads": 2, "context": 6, "dropout": 0.1}
    model = gpt(num_layers=num_layers, tied=False, **sizes)
    return probe(model, TOKENS, seed=0, dtype=torch.bfloat16)


def test_costs_come_back_as_they_were() -> None:
    probed = costs(3)
    assert from_text("d1", to_text("d1", probed)) == probed
    assert from_text("d1", to_text("d1", ())) == ()


def test_costs_of_another_configuration_are_not_used() -> None:
    assert from_text("d2", to_text("d1", costs(1))) is None
    assert from_text("d1", "") is None


@pytest.mark.parametrize("text", ["d1 ", "d1 {}", "d1 [[], [0]]"])
def test_text_that_holds_no_costs_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="the layer costs that came with the job cannot be read"):
        from_text("d1", text)


def test_costs_of_a_thousand_layers_fit_in_an_environment_variable() -> None:
    assert len(to_text("d1", costs(1000))) < 128 << 10
