"""The families of transformers that dpipe can cut, each declared once. No torch.

names in a decoder        in an encoder         layers of a pipeline
base.tokens               base.embeddings       0        with the learned positions, if it has any
base.blocks.0 ..          base.blocks.0 ..      1 ..     each with the rotary embedding and the mask
base.norm, lm_head        its head's modules    n + 1
"""

from dataclasses import dataclass
from functools import partial
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
    # of an encoder, the modules beside the base that find masked words, one behind the other
    head: tuple[str, ...] = ()
    # the matrix that makes logits, tied with the embedding in some
    output: str = "lm_head"
    # where a checkpoint has the bias of that matrix, if elsewhere
    output_bias: str | None = None

    @property
    def is_encoder(self) -> bool:
        return bool(self.head)


_encoder = partial(
    Architecture,
    tokens="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    blocks="encoder.layer",
    rotary=None,
)
_roberta = partial(
    _encoder,
    base="roberta",
    head=("lm_head",),
    output="lm_head.decoder",
    output_bias="lm_head.bias",
)


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
    _encoder(
        "bert",
        base="bert",
        head=("cls",),
        output="cls.predictions.decoder",
        output_bias="cls.predictions.bias",
    ),
    _roberta("roberta"),
    _roberta("xlm-roberta"),
    _roberta("camembert"),
    _encoder(
        "distilbert",
        base="distilbert",
        blocks="transformer.layer",
        head=("vocab_transform", "activation", "vocab_layer_norm", "vocab_projector"),
        output="vocab_projector",
    ),
)
