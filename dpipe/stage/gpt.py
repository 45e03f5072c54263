"""A decoder-only transformer (Radford et al. 2019, GPT-2) as a list of layers.

    tokens_BT ──GptEmbedding──> x_BTD ──TransformerBlock──> ... ──> x_BTD ──GptHead──> logits_BTV

B batch · T position · D width · N heads · H width of a head · V vocabulary
"""

# ruff: noqa: N803, N806 - shape suffixes

import math
from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from dpipe.passes.slices import Slices, causal_slice
from dpipe.stage.model import LayeredModel
from dpipe.stage.tensor_group import TensorGroup
from dpipe.stage.tensor_parallel import (
    ColumnLinear,
    QkvLinear,
    RowLinear,
    SequenceDropout,
    SequenceEmbedding,
    SplitModule,
    VocabularyEmbedding,
    split_cross_entropy,
    split_dropout,
)

_INIT_STD = 0.02  # of normal distributions


class GptEmbedding(nn.Module):
    """Of tokens and of learned positions, added."""

    takes_slices = True
    slices: Slices | None = None
    tensor_plan: ClassVar = {
        "tokens": VocabularyEmbedding,
        "positions": SequenceEmbedding,
        "dropout": SequenceDropout,
    }

    def __init__(self, vocab_size: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.draws = dropout > 0
        initialise(self)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        num_tokens = tokens_BT.shape[1]
        positions_T = torch.arange(num_tokens, device=tokens_BT.device)
        if self.slices is not None:
            positions_T = positions_T + self.slices.first_position(num_tokens)
        x_BTD: torch.Tensor = self.dropout(self.tokens(tokens_BT) + self.positions(positions_T))
        return x_BTD


class AttentionCore(nn.Module):
    """softmax(q k^T / sqrt(H)) v, with dropout; it has no parameters.

    `causal` masks later positions; `lengths_B` masks what lies behind the end of each sequence.
    """

    # A module of its own, though it has no parameters: what selective recomputation runs again.
    attention_core = True
    takes_slices = True
    slices: Slices | None = None

    def __init__(self, dropout: float, *, causal: bool) -> None:
        super().__init__()
        self.dropout = dropout
        self.causal = causal

    def forward(
        self,
        q_BNTH: torch.Tensor,
        k_BNTH: torch.Tensor,
        v_BNTH: torch.Tensor,
        lengths_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        slices = self.slices
        if slices is not None and slices.cut:
            return causal_slice(slices, self, q_BNTH, k_BNTH, v_BNTH)
        dropout = self.dropout if self.training else 0.0
        mask_B11T = None if lengths_B is None else _within(lengths_B, k_BNTH.shape[2])
        return F.scaled_dot_product_attention(
            q_BNTH,
            k_BNTH,
            v_BNTH,
            attn_mask=mask_B11T,
            dropout_p=dropout,
            is_causal=self.causal,
        )


class SplitAttentionCore(SplitModule, AttentionCore):
    """Some of the heads, with the dropout mask that one process would draw for them.

    No fused kernel takes a given dropout mask, so with dropout the products are written out.
    """

    def forward(
        self,
        q_BNTH: torch.Tensor,
        k_BNTH: torch.Tensor,
        v_BNTH: torch.Tensor,
        lengths_B: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not (self.training and self.dropout):
            return super().forward(q_BNTH, k_BNTH, v_BNTH, lengths_B)
        head_width = q_BNTH.shape[-1]
        scores_BNTT = q_BNTH @ k_BNTH.transpose(-2, -1) / math.sqrt(head_width)
        if self.causal:
            shape = scores_BNTT.shape[-2:]
            later_TT = torch.ones(shape, dtype=torch.bool, device=scores_BNTT.device).triu(1)
            scores_BNTT = scores_BNTT.masked_fill(later_TT, -math.inf)
        if lengths_B is not None:
            behind_B11T = ~_within(lengths_B, k_BNTH.shape[2])
            scores_BNTT = scores_BNTT.masked_fill(behind_B11T, -math.inf)
        weights_BNTT = split_dropout(scores_BNTT.softmax(-1), self.dropout, self.group, dim=1)
        return weights_BNTT.to(v_BNTH.dtype) @ v_BNTH  # autocast has made the softmax fp32


def _within(lengths_B: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Which positions [B, 1, 1, T] lie within each sequence."""
    positions_T = torch.arange(num_positions, device=lengths_B.device)
    return (positions_T < lengths_B[:, None])[:, None, None]


class Attention(nn.Module):
    """Self-attention (Vaswani et al. 2017)."""

    def __init__(self, width: int, num_heads: int, dropout: float, *, causal: bool = True) -> None:
        super().__init__()
        self.head_width = width // num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.core = AttentionCore(dropout, causal=causal)
        self.output = nn.Linear(width, width)

    def forward(self, x_BTD: torch.Tensor, lengths_B: torch.Tensor | None = None) -> torch.Tensor:
        q_BTD, k_BTD, v_BTD = self.qkv(x_BTD).chunk(3, dim=-1)
        y_BNTH: torch.Tensor = self.core(
            self._heads(q_BTD),
            self._heads(k_BTD),
            self._heads(v_BTD),
            lengths_B,
        )
        y_BTD: torch.Tensor = self.output(y_BNTH.transpose(1, 2).flatten(2))
        return y_BTD

    def _heads(self, x_BTD: torch.Tensor) -> torch.Tensor:
        x_BTNH: torch.Tensor = x_BTD.unflatten(-1, (-1, self.head_width))
        return x_BTNH.transpose(1, 2)


class TransformerBlock(nn.Module):
    """Attention, then an MLP four times as wide; each reads a normalised copy of the residual
    stream and adds to it.
    """

    tensor_plan: ClassVar = {
        "attention.qkv": QkvLinear,
        "attention.core": SplitAttentionCore,
        "attention.output": RowLinear,
        "mlp_in": ColumnLinear,
        "mlp_out": RowLinear,
        "dropout": SequenceDropout,
    }

    def __init__(
        self,
        width: int,
        num_heads: int,
        num_layers: int,
        dropout: float,
        *,
        causal: bool = True,
    ) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads, dropout, causal=causal)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)
        self.draws = dropout > 0  # a stage seeds no generator for a layer that draws nothing
        initialise(self)
        # Two additions a block make the variance of the residual stream grow; GPT-2 scales what is
        # added down by the root of their number.
        std = _INIT_STD / math.sqrt(2 * num_layers)
        for onto_stream in (self.attention.output, self.mlp_out):
            nn.init.normal_(onto_stream.weight, std=std)

    def forward(self, x_BTD: torch.Tensor, lengths_B: torch.Tensor | None = None) -> torch.Tensor:
        # Nested, because a name would keep an intermediate result in memory until the return.
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), lengths_B))
        y_BTD: torch.Tensor = self.dropout(self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x_BTD)))))
        return x_BTD + y_BTD


class GptHead(nn.Module):
    """The last norm, then the logits of every word."""

    draws = False
    tensor_plan: ClassVar = {"output": ColumnLinear}

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size, bias=False)
        initialise(self)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        logits_BTV: torch.Tensor = self.output(self.norm(x_BTD))
        return logits_BTV


def gpt(
    *,
    vocab_size: int,
    num_layers: int,
    width: int,
    num_heads: int,
    context: int,
    dropout: float,
    tied: bool,
) -> LayeredModel:
    """`num_layers` blocks between an embedding and a head: `num_layers + 2` layers."""
    block = partial(TransformerBlock, width, num_heads, num_layers, dropout)
    layers: tuple[Callable[[], nn.Module], ...] = (
        partial(GptEmbedding, vocab_size, width, context, dropout),
        *(block for _ in range(num_layers)),
        partial(GptHead, vocab_size, width),
    )
    return LayeredModel(
        layers,
        word_loss,
        tied=("tokens.weight", "output.weight") if tied else None,
        split_loss=lambda group: partial(word_loss, group=group),
    )


def word_loss(
    logits_BTV: torch.Tensor,
    targets_BT: torch.Tensor,
    group: TensorGroup | None = None,
) -> torch.Tensor:
    """Cross entropy in nats a token; with a `group`, logits are of this rank's part of the
    vocabulary.
    """
    logits_NV = logits_BTV.flatten(0, 1)
    targets_N = targets_BT.flatten()
    if group is None:
        return F.cross_entropy(logits_NV, targets_N)
    return split_cross_entropy(logits_NV, targets_N, group)


def initialise(layer: nn.Module) -> None:
    """As GPT-2: weights normal with a standard deviation of 0.02, biases zero."""
    for module in layer.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=_INIT_STD)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
