"""The families of transformers whose decoders dpipe can cut, each declared once. No torch.

names in a model          layers of a pipeline
base.tokens               0        with the learned positions, if it has any
base.blocks.0 ..          1 ..     each with the rotary embedding and the mask of its kind
base.norm, lm_head        n + 1
"""

from dataclasses import dataclass
from typing import Literal

from dpipe.choices import Choices


@dataclass(frozen=True)
class Experts:
    """How a checkpoint names what transformers keeps in one tensor: a matrix an expert."""

    folder: str = "mlp"  # in place of `mlp` in the names of the file
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class Architecture:
    """Where the parts of a decoder are. The defaults are Llama's, which most families share."""

    # `model_type` in config.json
    name: str
    base: str = "model"
    tokens: str = "embed_tokens"
    positions: str | None = None  # an embedding of learned positions
    dropout: str | None = None  # behind the embeddings
    blocks: str = "layers"
    norm: str = "norm"
    rotary: str | None = "rotary_emb"
    # which blocks see a sliding window: none, those that `layer_types` names, or all of them
    window: Literal["none", "by layer", "all"] = "none"
    # whether there is a rotary embedding for each kind of layer
    rotary_by_layer: bool = False
    experts: Experts | None = None


ARCHITECTURES = Choices[Architecture](
    "model_type",
    Architecture("llama"),  # SmolLM and SmolLM2 too
    Architecture("mistral", window="all"),
    Architecture("qwen2", window="by layer"),
    Architecture("qwen3", window="by layer"),
    Architecture("gemma2", window="by layer"),
    Architecture("gemma3_text", window="by layer", rotary_by_layer=True),
    Architecture("phi3", window="all"),
    Architecture("olmo"),
    Architecture("olmo2"),
    Architecture(
        "gpt2",
        base="transformer",
        tokens="wte",
        positions="wpe",
        dropout="drop",
        blocks="h",
        norm="ln_f",
        rotary=None,
    ),
    Architecture(
        "mixtral",
        window="all",
        experts=Experts("block_sparse_moe", gate="w1", up="w3", down="w2"),
    ),
    Architecture("qwen3_moe", window="all", experts=Experts()),
)
