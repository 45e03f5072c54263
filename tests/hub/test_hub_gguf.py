"""A GGUF file is a model: its configuration and its weights, quantised or not."""

import numpy as np
import pytest
import torch

from dpipe.config.load import build
from dpipe.errors import CheckpointError
from dpipe.plan.run_plan import make_model
from dpipe.stage.model import materialise

published = pytest.importorskip("hub.published")
gguf = pytest.importorskip("gguf")
SIZES = published.SIZES | {"intermediate_size": 64}  # blocks of 32 values
HEADS = {"attn_q": SIZES["num_attention_heads"], "attn_k": SIZES["num_key_value_heads"]}
PARTS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
QUANTISED = ("ffn_up", "ffn_down")


def llama_cpp_order(weight, heads):
    """The rows of a head as llama.cpp has them: the halves of a rotated pair beside each other."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def write_gguf(path, tensors):
    """What llama.cpp's converter writes of a Llama; returns the tensors as they can be read."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(SIZES["max_position_embeddings"])
    writer.add_embedding_length(SIZES["hidden_size"])
    writer.add_block_count(SIZES["num_hidden_layers"])
    writer.add_feed_forward_length(SIZES["intermediate_size"])
    writer.add_head_count(SIZES["num_attention_heads"])
    writer.add_head_count_kv(SIZES["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e4)
    writer.add_vocab_size(SIZES["vocab_size"])
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for block in range(SIZES["num_hidden_layers"]):
        for own, theirs in PARTS.items():
            names[f"blk.{block}.{own}"] = f"model.layers.{block}.{theirs}"
    read = {}
    for own, theirs in names.items():
        values = tensors[f"{theirs}.weight"].numpy()
        kind = own.rpartition(".")[2]
        if kind in QUANTISED:
            blocks = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{own}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            values = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
        else:
            stored = llama_cpp_order(values, HEADS[kind]) if kind in HEADS else values
            writer.add_tensor(f"{own}.weight", np.ascontiguousarray(stored))
        read[f"{theirs}.weight"] = torch.from_numpy(values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return read


@pytest.fixture
def model(tmp_path):
    """`(path, transformers' model with the values that the file has)`"""
    config = published.transformers.LlamaConfig(**SIZES)
    torch.manual_seed(0)
    whole = published.transformers.AutoModelForCausalLM.from_config(config)
    path = tmp_path / "model-Q8_0.gguf"
    whole.load_state_dict(write_gguf(path, whole.state_dict()))
    return path, whole.eval()


@torch.no_grad()
def test_layers_have_the_values_of_the_file(model):
    path, whole = model
    layered = make_model(build({"model": {"hf": str(path), "context": 12}}))
    tokens = published.tokens()
    x = tokens
    for index in range(len(layered.layers)):
        x = materialise(layered, index, 0, "cpu")(x)
    torch.testing.assert_close(x, whole(tokens).logits, rtol=1e-5, atol=1e-6)


def test_file_that_is_cut_short_is_named(model):
    path, _ = model
    layered = make_model(build({"model": {"hf": str(path), "context": 12}}))
    path.write_bytes(path.read_bytes()[:-2000])
    with pytest.raises(CheckpointError, match=r"model-Q8_0.gguf is not a complete GGUF file"):
        materialise(layered, 1, 0, "cpu")


def test_tensor_of_a_kind_that_is_not_read_is_named(model, monkeypatch):
    path, _ = model
    layered = make_model(build({"model": {"hf": str(path), "context": 12}}))

    # llama.cpp has it for sums alone, and the library cannot read it.
    of_sums = gguf.GGMLQuantizationType.Q8_K
    read = gguf.dequantize
    monkeypatch.setattr(gguf, "dequantize", lambda data, kind: read(data, of_sums))
    with pytest.raises(CheckpointError, match=r"token_embd.* cannot be read .*such as Q8_0 or F16"):
        materialise(layered, 0, 0, "cpu")
