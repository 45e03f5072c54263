"""`dpipe measure` of a job that fine-tunes a published model."""

import pytest

from dpipe.config.load import build
from dpipe.measure import layers
from dpipe.measure.layers import time_layers

# peft asks transformers by a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
published = pytest.importorskip("hub.published")


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_of_a_fine_tuning_are_measured_on_samples(precision, tmp_path, monkeypatch):
    """Also those in half precision of which nothing learns."""
    monkeypatch.setattr(layers, "_STRETCH_S", 0.01)
    monkeypatch.setattr(layers, "_LONGEST_S", 0.01)
    folder = published.save("llama", tmp_path / "model", vocab_size=256)
    published.save_tokenizer(folder)
    config = build(
        {
            "model": {"hf": str(folder), "context": 11},
            "adapter": {"kind": "lora", "r": 4, "layers": [2, 3]},
            "data": {"files": ["chats.jsonl"], "format": "chat"},
            "train": {"precision": precision, "parameters": precision},
        }
    )
    times = time_layers(config, (2,))
    assert [each.kind for each in times] == [0, 1, 2, 3, 4, 5]
    for each in times:
        assert 0 < each.forward_ms < 1e4
        assert 0 <= each.backward_ms < 1e4
