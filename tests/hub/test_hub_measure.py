"""`dpipe measure` of a job that fine-tunes a published model."""

import pytest

from dpipe.config.load import build
from dpipe.measure import layers
from dpipe.measure.layers import time_layers
from dpipe.tokenizer.tokenizer import vocabulary_of

# peft asks transformers by a name that transformers will drop.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
published = pytest.importorskip("hub.published")


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(layers, "_STRETCH_S", 0.01)
    monkeypatch.setattr(layers, "_LONGEST_S", 0.01)


def fine_tuning(folder, precision="fp32"):
    return build(
        {
            "model": {"hf": str(folder), "context": 11},
            "adapter": {"kind": "lora", "r": 4, "layers": [2, 3]},
            "data": {"files": ["chats.jsonl"], "format": "chat"},
            "train": {"precision": precision, "parameters": precision},
        }
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_of_a_fine_tuning_are_measured_on_samples(precision, tmp_path, quick):
    """Also those in half precision of which nothing learns."""
    folder = published.save("llama", tmp_path / "model", vocab_size=256)
    published.save_tokenizer(folder)
    times = time_layers(fine_tuning(folder, precision), (2,))
    assert [each.kind for each in times] == [0, 1, 2, 3, 4, 5]
    for each in times:
        assert 0 < each.forward_ms < 1e4
        assert 0 <= each.backward_ms < 1e4


def test_a_published_model_of_few_words_is_measured_with_those(tmp_path, quick):
    """Its vocabulary is its own, not that of bytes: an embedding ends in an error beyond it."""
    folder = published.save("llama", tmp_path / "model", vocab_size=40)
    config = fine_tuning(folder)
    assert vocabulary_of(config) == 40
    assert len(time_layers(config, (1,))) == 6
