"""What the stages of a published model hold: measured once for all that are made of the same, and
as torch's memory tracker says.
"""

import json
from dataclasses import replace

import pytest
from support.published_memory import SIZES, configured, predicted_and_measured

from dpipe.config.load import build
from dpipe.plan.run_plan import first_inputs, make_model, stage_runner
from dpipe.plan.text import forecast_text
from dpipe.probe import measured
from dpipe.probe.layer_costs import probe

# peft asks transformers by a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
published = pytest.importorskip("hub.published")
CUTS = ((1,) * 10, (2, 8))


@pytest.mark.slow
def test_memory_of_many_equal_layers_follows_from_that_of_a_few(tmp_path, monkeypatch):
    folder = published.save("smollm2", tmp_path / "model", num_hidden_layers=8)
    config = build(
        {"model": {"hf": str(folder), "context": 16}, "adapter": {"kind": "lora", "r": 4}}
    )
    model = make_model(config)
    probed = probe(model, first_inputs(config), 0)
    numbers = []
    measure = measured.measured

    def counted(runner, layers, inputs):
        numbers.append(len(layers))
        return measure(runner, layers, inputs)

    monkeypatch.setattr(measured, "measured", counted)
    found = []
    for each in (replace(model, alike=None), model):
        runner = stage_runner(config, each)
        found.append([measured.measured_stages(runner, probed, cut) for cut in CUTS])
    assert found[0] == found[1]
    # Each layer alone, and 10 in two stages; then one of each kind, and two and three in a row.
    assert sum(numbers[:12]) == 20
    assert numbers[12:] == [1, 1, 1, 1, 2, 3, 4]


def test_simulate_needs_the_configuration_of_a_model_alone(tmp_path):
    config = published.transformers.LlamaConfig(**published.SIZES)
    config.save_pretrained(tmp_path / "model")
    job = tmp_path / "job.toml"
    job.write_text(
        f'model = {{ hf = "{tmp_path}/model", context = 16 }}\n'
        'data = { files = ["not-here.jsonl"], format = "chat" }\n'
    )
    predicted = json.loads(forecast_text(str(job), (), None, as_json=True))
    assert predicted["step_s"] > 0
    assert predicted["memory"][0]["total"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")
@pytest.mark.parametrize(
    ("family", "way"),
    [
        ("llama", "LoRA on nf4, bf16"),
        ("gemma2", "full"),
        ("gpt2", "LoRA, bf16"),
        ("mixtral", "LoRA on nf4, bf16"),
        ("qwen2", "full, recomputed"),
        ("qwen3", "LoRA on int8"),
    ],
)
def test_ranks_hold_what_was_predicted_from_the_configuration(family, way, tmp_path):
    model = published.save(family, tmp_path / "model", **SIZES)
    for predicted, held in predicted_and_measured(configured(model, way)):
        assert predicted == pytest.approx(held, rel=0.01)
