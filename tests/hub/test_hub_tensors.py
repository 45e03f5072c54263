"""Weights are read layer by layer, and what is missing or damaged is named."""

import json

import pytest
import torch

from dpipe.config.load import build
from dpipe.errors import CheckpointError, ConfigError
from dpipe.hub.index import read_index
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise

published = pytest.importorskip("hub.published")
tensors = pytest.importorskip("dpipe.hub.tensors")


def model_in(folder):
    return make_model(build({"model": {"hf": str(folder), "context": 11}}))


@pytest.fixture
def shards(tmp_path):
    """A model in several files."""
    folder = published.save("llama", tmp_path / "model")
    whole = published.reference(folder)
    (folder / "model.safetensors").unlink()
    whole.save_pretrained(folder, max_shard_size="20KB")
    return folder


def test_layer_reads_the_bytes_of_its_own_tensors(shards, monkeypatch):
    read = []
    plain = tensors.SafetensorsWeights.read

    def counted(self, name):
        tensor = plain(self, name)
        read.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(tensors.SafetensorsWeights, "read", counted)
    model = model_in(shards)
    assert not read, "a configuration needs no weights"
    total = 0
    for index in range(6):
        read.clear()
        layer = materialise(model, index, 0, "cpu")
        own = sum(parameter.nbytes for parameter in layer.parameters())
        assert sum(read) == own
        total += own
    files = shards.glob("*.safetensors")
    assert total <= sum(path.stat().st_size for path in files) < 1.2 * total


def test_shard_that_is_cut_short_is_named(shards):
    table = json.loads((shards / "model.safetensors.index.json").read_text())
    file = shards / table["weight_map"]["model.layers.2.self_attn.q_proj.weight"]
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    model = model_in(shards)
    materialise(model, 0, 0, "cpu")
    with pytest.raises(CheckpointError, match=rf"{file.name} is cut short or damaged"):
        materialise(model, 3, 0, "cpu")


def test_shard_that_is_missing_is_named(shards):
    table = json.loads((shards / "model.safetensors.index.json").read_text())
    name = table["weight_map"]["model.layers.2.self_attn.q_proj.weight"]
    (shards / name).unlink()
    with pytest.raises(CheckpointError, match=rf"lacks {name}"):
        materialise(model_in(shards), 3, 0, "cpu")


def test_weights_of_another_model_are_refused(tmp_path):
    folder = published.save("llama", tmp_path / "model")
    other = published.save("llama", tmp_path / "wide", intermediate_size=64)
    (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match="they are of different models"):
        materialise(model_in(folder), 1, 0, "cpu")
    third = published.save("phi3", tmp_path / "phi3")
    (folder / "model.safetensors").write_bytes((third / "model.safetensors").read_bytes())
    with pytest.raises(CheckpointError, match=r"hold no model\.layers\.0\.self_attn\.q_proj"):
        materialise(model_in(folder), 1, 0, "cpu")


def test_index_that_is_none_is_refused():
    for content in (b"{", b"[]", b'{"weight_map": 3}', b'{"weight_map": {"a": 3}}'):
        with pytest.raises(CheckpointError, match="is not an index of shards"):
            read_index(content, "index.json")


def test_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        model_in(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no configuration that transformers can read"):
        model_in(tmp_path)
    with pytest.raises(ConfigError, match="is not a folder, a GGUF file or the name"):
        model_in(tmp_path / "absent" / "deep")


def test_one_of_several_gguf_files_must_be_named(tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"holds 2 GGUF files; name one of them: a.gguf, b.gguf"):
        model_in(tmp_path)


def test_revision_of_a_folder_is_refused(tmp_path):
    folder = published.save("llama", tmp_path / "model")
    config = build({"model": {"hf": str(folder), "revision": "main"}})
    with pytest.raises(ConfigError, match=r"revision is of the hub, and model.hf .* is a folder"):
        make_model(config)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": "megatron-bert"}, "beside bert it has cls, in place of lm_head; known"),
        ({"model_type": "bloom"}, "one of ln_f, word_embeddings_layernorm in transformer has no"),
        ({"model_type": "mpt"}, r"its blocks do not run by themselves: .*position_bias"),
        ({"model_type": "gpt_neox"}, "its files hold embed_out.weight, which the model has by no"),
        ({"model_type": "granite", "embedding_multiplier": 12.0}, "logits differ by up to .* does"),
        ({"model_type": "starcoder2", "embedding_dropout": 0.1}, "dropout = 0.1 has no module"),
        ({"model_type": "nemotron"}, "no small model of it can be tried"),
    ],
)  # fmt: skip
def test_family_that_is_not_understood_is_refused_with_what_is_not(changes, what, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(changes))
    with pytest.raises(ConfigError, match=f"of the family '{changes['model_type']}'.*{what}"):
        model_in(tmp_path)


def test_half_precision_weights_learn_in_fp32(tmp_path):
    folder = published.save("llama", tmp_path / "model")
    published.reference(folder).to(torch.bfloat16).save_pretrained(folder)
    layer = materialise(model_in(folder), 1, 0, "cpu")
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.float32}
