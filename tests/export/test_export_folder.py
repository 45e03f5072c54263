"""A run goes out as it came in: transformers and peft compute the same logits."""

import json

import pytest
import torch
from hub.test_hub_adapter import config_of

from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise
from dpipe.store import checkpoint

# peft asks transformers by a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
published = pytest.importorskip("hub.published")
export = pytest.importorskip("dpipe.export.folder")


def save_checkpoint(url, tensors):
    def share(part):
        return [json.loads(json.dumps(part))]

    checkpoint.save(str(url), 3, 0, tensors, {}, {}, share, 1)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=published.tokens()).logits


def trained(model):
    """The parameters that learn, changed at random, by name; and the logits with them."""
    layers = [materialise(model, index, 0, "cpu").eval() for index in range(6)]
    tensors = {}
    with torch.no_grad():
        for index, layer in enumerate(layers):
            for name, parameter in layer.named_parameters():
                parameter += 0.1 * torch.randn_like(parameter)
                tensors[f"layers.{index}.{name}"] = parameter
        x = published.tokens()
        for layer in layers:
            x = layer(x)
    return tensors, x


@pytest.mark.parametrize("family", ["smollm2", "gpt2", "mixtral", "gemma3"])
def test_untrained_model_comes_back_to_the_bit(family, tmp_path):
    folder = published.save(family, tmp_path / "model")
    config = build({"model": {"hf": str(folder), "context": 11}})
    assert export.export_run(config, None, tmp_path / "out") == 0
    assert torch.equal(
        logits(published.reference(tmp_path / "out")), logits(published.reference(folder))
    )


def test_adapter_goes_to_peft_and_merged_to_transformers(tmp_path):
    from peft import PeftModel

    folder = published.save("llama", tmp_path / "model")
    published.save_tokenizer(folder)
    config = config_of(folder)
    tensors, x = trained(make_model(config))
    save_checkpoint(tmp_path / "checkpoints", tensors)
    url = str(tmp_path / "checkpoints")
    assert export.export_run(config, url, tmp_path / "adapter", only_adapter=True) == 3
    adapted = PeftModel.from_pretrained(published.reference(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits(adapted), x, rtol=1e-5, atol=1e-5)
    export.export_run(config, url, tmp_path / "merged")
    merged = published.reference(tmp_path / "merged")
    torch.testing.assert_close(logits(merged), x, rtol=1e-4, atol=1e-5)
    assert (tmp_path / "merged" / "tokenizer.json").exists()


def test_export_refuses_what_it_cannot_write(tmp_path):
    folder = published.save("llama", tmp_path / "model")
    config = build({"model": {"hf": str(folder), "context": 11}})
    with pytest.raises(ConfigError, match=r"has no adapter.*drop --adapter"):
        export.export_run(config, None, tmp_path / "out", only_adapter=True)
    with pytest.raises(ConfigError, match="is not empty; name another"):
        export.export_run(config, None, folder)
