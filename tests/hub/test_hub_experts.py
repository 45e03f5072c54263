"""LoRA on the experts of a mixture is peft's: the same matrices, gradients and logits."""

import pytest
import torch
from hub.test_hub_adapter import assert_learns_alike, config_of

from dpipe.errors import ConfigError
from dpipe.plan.run_plan import draft, make_model
from dpipe.stage.model import materialise

# peft asks transformers by a name that transformers will drop, and says of the ranks of experts,
# which count, that they do not.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings(r"ignore:The following \w+_pattern keys:RuntimeWarning"),
]
published = pytest.importorskip("hub.published")
truth = pytest.importorskip("hub.test_hub_truth")
export_folder = pytest.importorskip("export.test_export_folder")
MIXTURES = ("qwen3-moe", "mixtral")
DOWN = {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}


@pytest.mark.parametrize("adapter", [{}, DOWN], ids=["all-linear", "target_parameters"])
@pytest.mark.parametrize("family", MIXTURES)
def test_experts_learn_as_in_peft(family, adapter, tmp_path):
    from peft import get_peft_model

    from dpipe.hub.adapter import lora_config

    folder = published.save(family, tmp_path / "model")
    config = config_of(folder, **adapter)
    theirs = get_peft_model(published.reference(folder), lora_config(config.adapter))
    stages = truth.stages_of(make_model(config), (2, 4))
    learned = assert_learns_alike(stages, theirs)
    assert any("experts" in name for name in learned)


@pytest.mark.parametrize("base", ["full", "nf4"])
@pytest.mark.parametrize("options", [{"recompute": "full"}, {}], ids=["recomputed", "split"])
def test_gradients_of_experts_do_not_depend_on_how_they_are_made(options, base, tmp_path):
    model = make_model(config_of(published.save("mixtral", tmp_path / "model"), base=base))
    tokens = published.tokens()
    found = []
    for splits, settings in ((False, {}), (not options, options)):
        stages = truth.stages_of(model, (2, 4), **settings)
        with torch.no_grad():
            for stage in stages:
                for _, parameter in stage.named_parameters():
                    parameter += 0.1
        inputs = (tokens[:, :-1],)
        for stage in stages[:-1]:
            inputs = stage.forward(0, inputs)
        stages[-1].forward(0, inputs, tokens[:, 1:])
        grads = ()
        for stage in reversed(stages):
            if splits:
                grads = stage.backward_input(0, grads)
                stage.backward_weight(0)
            else:
                grads = stage.backward(0, grads)
        found.append(truth.gradients(stages))
    plain, other = found
    for name, gradient in plain.items():
        assert torch.equal(gradient, other[name])


@pytest.mark.slow
def test_forecast_of_a_mixture_counts_the_adapted_experts(tmp_path):
    folder = published.save("qwen3-moe", tmp_path / "model")
    totals = []
    for adapter in ({"target_modules": ["q_proj"]}, DOWN):
        plan = draft(config_of(folder, **adapter), reads_text=False)
        totals.append(sum(memory.total for memory in plan.forecast.memory))
    alone, with_experts = totals
    # Four layers of four experts [32, 16] in fp32, of which the graph of each keeps another one.
    assert with_experts - alone > 4 * 4 * 32 * 16 * 4


@pytest.mark.parametrize("family", MIXTURES)
def test_adapted_experts_go_to_peft_and_merged_to_transformers(family, tmp_path):
    from peft import PeftModel

    folder = published.save(family, tmp_path / "model")
    config = config_of(folder)
    tensors, x = export_folder.trained(make_model(config))
    url = str(tmp_path / "checkpoints")
    export_folder.save_checkpoint(url, tensors)
    export = export_folder.export
    export.export_run(config, url, tmp_path / "adapter", only_adapter=True)
    adapted = PeftModel.from_pretrained(published.reference(folder), tmp_path / "adapter")
    torch.testing.assert_close(export_folder.logits(adapted), x, rtol=1e-5, atol=1e-5)
    export.export_run(config, url, tmp_path / "merged")
    merged = published.reference(tmp_path / "merged")
    torch.testing.assert_close(export_folder.logits(merged), x, rtol=1e-4, atol=1e-5)
    # What was trained is where a run may go on from.
    again = make_model(config_of(folder, start=str(tmp_path / "adapter")))
    y = published.tokens()
    with torch.no_grad():
        for index in range(6):
            y = materialise(again, index, 0, "cpu").eval()(y)
    torch.testing.assert_close(y, x, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_holds_no_adapted_matrix(tmp_path):
    layer = materialise(
        make_model(config_of(published.save("mixtral", tmp_path / "model"))), 1, 0, "cpu"
    )
    before = set(layer.state_dict())
    layer(torch.randn(1, 5, 32))
    assert set(layer.state_dict()) == before
    assert all("lora_" in name for name in before)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"layers": [1]}, r"the experts of \"all-linear\", in all layers: leave it out; or name"),
        ({"layers": [1], **DOWN}, "in all layers: leave it out"),
        ({"dropout": 0.1}, r"does not work with lora_dropout"),
        ({"dora": True}, r"does not work with use_dora"),
        (
            {"target_modules": ["q_proj"], "target_parameters": ["experts.down_prj"]},
            r"target_parameters experts.down_prj cannot be .*did you mean experts.down_proj",
        ),
        (
            {"target_modules": ["q_proj", "v_projj"]},
            r"target_modules v_projj cannot be adapted: .* did you mean .*v_proj",
        ),
    ],
)
def test_what_cannot_be_adapted_is_refused(adapter, message, tmp_path):
    folder = published.save("mixtral", tmp_path / "model")
    with pytest.raises(ConfigError, match=message):
        make_model(config_of(folder, **adapter))


def test_one_layer_of_experts_is_adapted_by_its_name(tmp_path):
    folder = published.save("mixtral", tmp_path / "model")
    names = {
        "target_modules": ["layers.2.self_attn.q_proj"],
        "target_parameters": ["layers.2.mlp.experts.down_proj"],
    }
    model = make_model(config_of(folder, **names))
    assert model.frozen == 3
