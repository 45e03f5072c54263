"""A run that goes on from an adapter that was trained elsewhere."""

import pytest
import torch
from hub.test_hub_adapter import config_of

from dpipe.config.load import build
from dpipe.errors import CheckpointError, ConfigError
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise

# peft asks transformers by a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
published = pytest.importorskip("hub.published")


@pytest.fixture(params=[False, True], ids=["lora", "dora"])
def trained(request, tmp_path):
    """A model, and an adapter of it that peft has saved."""
    from peft import get_peft_model

    from dpipe.hub.adapter import lora_config

    folder = published.save("smollm2", tmp_path / "model")
    config = config_of(folder, dora=request.param)
    theirs = get_peft_model(published.reference(folder), lora_config(config.adapter))
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)
    theirs.save_pretrained(tmp_path / "adapter")
    return folder, tmp_path / "adapter", theirs, request.param


def test_run_goes_on_from_what_peft_has_saved(trained):
    folder, adapter, theirs, dora = trained
    model = make_model(config_of(folder, start=str(adapter), dora=dora))
    x = published.tokens()
    with torch.no_grad():
        expected = theirs.eval()(input_ids=x).logits
        for index in range(6):
            x = materialise(model, index, 0, "cpu").eval()(x)
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-6)


def test_adapter_of_another_model_is_refused(trained, tmp_path):
    _, adapter, _, dora = trained
    other = published.save("llama", tmp_path / "other", hidden_size=64)
    with pytest.raises(ConfigError, match=r"another model.*lora_B.weight is \[32, 4\].*\[64, 4\]"):
        make_model(config_of(other, start=str(adapter), dora=dora))
    with pytest.raises(ConfigError, match=r"other adapter.target_modules: .* this model has none"):
        make_model(
            config_of(tmp_path / "model", start=str(adapter), dora=dora, target_modules=["q_proj"])
        )


def test_adapter_of_other_settings_is_refused(trained):
    folder, adapter, _, dora = trained
    with pytest.raises(ConfigError, match=r"other settings: adapter.alpha is 16.0 and lora_alpha"):
        make_model(config_of(folder, start=str(adapter), dora=dora, alpha=16.0))


def test_folder_without_an_adapter_is_refused(trained, tmp_path):
    folder, adapter, _, dora = trained
    with pytest.raises(ConfigError, match="holds no adapter_config.json that can be read"):
        make_model(config_of(folder, start=str(tmp_path / "nothing"), dora=dora))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(CheckpointError, match="holds no whole adapter_model.safetensors"):
        make_model(config_of(folder, start=str(adapter), dora=dora))


def test_start_without_an_adapter_is_refused():
    with pytest.raises(ConfigError, match=r'set adapter.kind = "lora", or leave it out'):
        build({"model": {"hf": "some/model"}, "adapter": {"start": "folder"}})
