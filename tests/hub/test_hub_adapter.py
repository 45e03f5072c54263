"""An adapter of dpipe is peft's: the same matrices, the same gradients, the same logits."""

import pytest
import torch

from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import make_model

# peft asks transformers by a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
published = pytest.importorskip("hub.published")
truth = pytest.importorskip("hub.test_hub_truth")


def config_of(folder, **adapter):
    adapter = {"kind": "lora", "r": 4, "alpha": 8.0} | adapter
    return build({"model": {"hf": str(folder), "context": 11}, "adapter": adapter})


def assert_learns_alike(stages, theirs):
    """Loss and gradients of `stages` are those of `theirs`, peft's model of the same adapter.
    Returns the names of what learns, as peft has them.
    """
    ours = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            _, layer, rest = name.split(".", 2)
            public = f"base_model.model.model.layers.{int(layer) - 1}.{rest.removeprefix('block.')}"
            ours[public] = parameter
    learned = {name: each for name, each in theirs.named_parameters() if each.requires_grad}
    assert ours.keys() == learned.keys()
    with torch.no_grad():
        for name, parameter in learned.items():
            # B is zero at first, and A has no gradient then.
            parameter += 0.1 * torch.randn_like(parameter)
            ours[name].copy_(parameter)
    tokens = published.tokens()
    logits = theirs(input_ids=tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    found = truth.train_once(stages, (tokens[:, :-1],), tokens[:, 1:])
    torch.testing.assert_close(found, loss.detach(), rtol=1e-5, atol=1e-6)
    for name, parameter in learned.items():
        torch.testing.assert_close(ours[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)
    return learned.keys()


@pytest.mark.parametrize(
    "adapter",
    [{}, {"dora": True}, {"rslora": True, "target_modules": ["q_proj", "v_proj"]}],
    ids=["lora", "dora", "rslora"],
)
def test_adapter_learns_as_in_peft(adapter, tmp_path):
    from peft import get_peft_model

    from dpipe.hub.adapter import lora_config

    folder = published.save("smollm2", tmp_path / "model")
    config = config_of(folder, **adapter)
    stages = truth.stages_of(make_model(config), (2, 4))
    theirs = get_peft_model(published.reference(folder), lora_config(config.adapter))
    assert_learns_alike(stages, theirs)


def test_adapter_alone_has_parameters_and_is_the_same_wherever_the_model_is_cut(tmp_path):
    folder = published.save("llama", tmp_path / "model")
    model = make_model(config_of(folder))
    named = []
    for cut in ((6,), (3, 3)):
        pairs = [pair for stage in truth.stages_of(model, cut) for pair in stage.named_parameters()]
        named.append(dict(pairs))
    assert all("lora_" in name for name in named[0])
    assert named[0].keys() == named[1].keys()
    for name, parameter in named[0].items():
        assert torch.equal(parameter, named[1][name])
    a = named[0]["layers.1.block.self_attn.q_proj.lora_A.default.weight"]
    b = named[0]["layers.2.block.self_attn.q_proj.lora_A.default.weight"]
    assert a.abs().sum() > 0 and not torch.equal(a, b)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_layers_below_the_first_that_learns_keep_nothing(recompute, tmp_path):
    folder = published.save("smollm2", tmp_path / "model")
    model = make_model(config_of(folder, layers=[1, 3]))
    assert model.frozen == 2
    tokens = published.tokens()
    inputs, targets = (tokens[:, :-1],), tokens[:, 1:]
    # Every layer is gone through, as if something learned in each.
    whole = truth.stages_of(model, (6,), frozen=0)
    expected = truth.train_once(whole, inputs, targets)
    stages = truth.stages_of(model, (1, 2, 3), recompute=recompute)
    handed = [inputs]
    for stage in stages[:-1]:
        handed.append(stage.forward(0, handed[-1]))
    (loss,) = stages[-1].forward(0, handed[-1], targets)
    assert loss.equal(expected)
    gradients = stages[2].backward(0, ())
    assert len(gradients) == 1
    assert stages[1].backward(0, gradients) == (), "nothing below it learns"
    assert stages[0].backward(0, ()) == ()
    assert not any(stage.held for stage in stages)
    named = truth.gradients(stages)
    for name, gradient in truth.gradients(whole).items():
        assert gradient.equal(named.pop(name))
    assert not named


def test_layers_that_are_not_there_are_refused(tmp_path):
    folder = published.save("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"adapter.layers \[4\] .* decoder layers are 0 to 3"):
        make_model(config_of(folder, layers=[4]))


def test_modules_that_are_not_there_are_refused_with_the_nearest_names(tmp_path):
    folder = published.save("llama", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"q_projj cannot be adapted.*did you mean .*q_proj"):
        make_model(config_of(folder, target_modules=["q_projj"]))


def test_layer_in_which_nothing_learns_is_stepped_in_half_precision(tmp_path):
    """As `dpipe measure` does, which times each layer alone."""
    model = make_model(config_of(published.save("llama", tmp_path / "model")))
    embedding, _ = truth.stages_of(model, (1, 5), parameters="bf16")
    embedding.zero_grad()
    embedding.begin_step(1)
    (x,) = embedding.forward(0, (published.tokens(),))
    assert x.dtype is torch.bfloat16
