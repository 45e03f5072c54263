"""Tiny models of each family, as `save_pretrained` writes them."""

from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GEMMA = {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}
MIXED = ["full_attention", "sliding_attention"] * 2
# By name: the class of its configuration, and what differs from `SIZES`. Windows are shorter than
# the sequences of the tests.
SCALED = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
SLIDES = {"use_sliding_window": True, "sliding_window": 6, "layer_types": MIXED}
FAMILIES = {
    "llama": ("LlamaConfig", {"rope_parameters": SCALED}),
    "smollm2": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "gpt2": ("GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "mistral": ("MistralConfig", {"sliding_window": 6}),
    "qwen2": ("Qwen2Config", SLIDES),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", {**GEMMA, "layer_types": MIXED, "final_logit_softcapping": 5.0}),
    "phi3": ("Phi3Config", {}),
    "olmo": ("OlmoConfig", {"clip_qkv": 0.5}),
    "olmo2": ("Olmo2Config", {}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    # By their structure: no entry names them.
    "olmo3": ("Olmo3Config", {"sliding_window": 6, "layer_types": MIXED}),
    "starcoder2": ("Starcoder2Config", {"embedding_dropout": 0.0, "residual_dropout": 0.0}),
}  # fmt: skip


def save(family: str, folder: Path, **changes) -> Path:
    """A model of that family with random weights, in `folder`."""
    name, different = FAMILIES[family]
    config = getattr(transformers, name)(**{**SIZES, **different, **changes})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # norms and biases too
    model.save_pretrained(folder)
    return folder


def reference(folder: Path):
    """transformers' own model, in training mode."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train()


def tokens(batch: int = 2, length: int = 12, vocab_size: int = 97) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, vocab_size, (batch, length), generator=generator)


TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]


def save_tokenizer(folder: Path, template: str | None = TEMPLATE, start: str | None = None) -> None:
    """A tokenizer of 97 entries: special tokens, and letters. `start` stands before each text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    letters = [chr(code) for code in range(32, 32 + 97 - len(SPECIAL))]
    vocabulary = {each: number for number, each in enumerate([*SPECIAL, *letters])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(SPECIAL)
    if start is not None:
        before = [(start, vocabulary[start])]
        tokenizer.post_processor = processors.TemplateProcessing(f"{start} $A", None, before)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", pad_token="<pad>", bos_token=start
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
