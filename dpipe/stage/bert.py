"""BERT (Devlin et al. 2019) as a list of layers. It predicts masked words and whether two passages
follow each other.

    tokens_BT, types_BT, lengths_B ──BertEmbedding──> x_BTD, lengths_B ──BertBlock──> ...
        ... ──> x_BTD, lengths_B ──BertHead──> logits_BTV, pair_B2

Norms are where Megatron's BERT 345M has them: each block normalises what it reads and adds to an
unnormalised stream, with one norm behind the last block (Shoeybi et al. 2019, section 5.3);
normalising the sum, as Devlin et al. do, did not train at that size. So the blocks are the GPT's,
without its causal mask. Attention masks what lies behind a sequence's end by its length, which
crosses every stage boundary beside the activation: 4 bytes a sequence.

B batch · T position · D width · V vocabulary
"""

# ruff: noqa: N803, N806 - shape suffixes

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from dpipe.stage.gpt import TransformerBlock, initialise, word_loss
from dpipe.stage.model import LayeredModel
from dpipe.stage.tensor_group import TensorGroup
from dpipe.stage.tensor_parallel import (
    ColumnLinear,
    FirstPositionLinear,
    SequenceDropout,
    SequenceEmbedding,
    VocabularyEmbedding,
)

IGNORED = -100  # the target of a word that was not masked
NUM_TYPES = 2  # token types: the first passage of a pair, and the second

Masked = tuple[torch.Tensor, torch.Tensor]  # x_BTD, lengths_B


class BertEmbedding(nn.Module):
    """Of tokens, of learned positions and of token types, added."""

    tensor_plan: ClassVar = {
        "tokens": VocabularyEmbedding,
        "positions": SequenceEmbedding,
        "types": SequenceEmbedding,
        "dropout": SequenceDropout,
    }

    def __init__(self, vocab_size: int, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab_size, width)
        self.positions = nn.Embedding(context, width)
        self.types = nn.Embedding(NUM_TYPES, width)
        self.dropout = nn.Dropout(dropout)
        self.draws = dropout > 0
        initialise(self)

    def forward(
        self,
        tokens_BT: torch.Tensor,
        types_BT: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> Masked:
        positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTD = self.tokens(tokens_BT) + self.positions(positions_T) + self.types(types_BT)
        # The lengths go on from layer to layer: any block may be the first of a stage.
        return self.dropout(x_BTD), lengths_B


class BertBlock(nn.Module):
    """A GPT's block whose attention sees both directions, within each sequence's length."""

    tensor_plan: ClassVar = {
        f"block.{name}": kind for name, kind in TransformerBlock.tensor_plan.items()
    }

    def __init__(self, width: int, num_heads: int, num_layers: int, dropout: float) -> None:
        super().__init__()
        self.block = TransformerBlock(width, num_heads, num_layers, dropout, causal=False)
        self.draws = self.block.draws  # a stage asks its layers, not what is in them

    def forward(self, x_BTD: torch.Tensor, lengths_B: torch.Tensor) -> Masked:
        return self.block(x_BTD, lengths_B), lengths_B


class BertHead(nn.Module):
    """Logits of every word at every position, and of the pair from the first token.

    A word's logits come from a transform and a product with the embedding table, plus a bias; the
    pair's two from the pooled first token.
    """

    draws = False
    tensor_plan: ClassVar = {"output": ColumnLinear, "pair": FirstPositionLinear}

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.transform = nn.Linear(width, width)
        self.transform_norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, vocab_size)
        self.pooler = nn.Linear(width, width)
        self.pair = nn.Linear(width, 2)
        initialise(self)

    def forward(
        self,
        x_BTD: torch.Tensor,
        lengths_B: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x_BTD = self.norm(x_BTD)
        # Nested, because a name would keep an intermediate result in memory until the return.
        logits_BTV = self.output(self.transform_norm(F.gelu(self.transform(x_BTD))))
        pair_B2 = self.pair(torch.tanh(self.pooler(x_BTD[:, 0])))
        return logits_BTV, pair_B2


def bert(
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
    block = partial(BertBlock, width, num_heads, num_layers, dropout)
    layers: tuple[Callable[[], nn.Module], ...] = (
        partial(BertEmbedding, vocab_size, width, context, dropout),
        *(block for _ in range(num_layers)),
        partial(BertHead, vocab_size, width),
    )
    return LayeredModel(
        layers,
        masked_and_pair_loss,
        tied=("tokens.weight", "output.weight") if tied else None,
        split_loss=lambda group: partial(masked_and_pair_loss, group=group),
    )


def masked_and_pair_loss(
    logits_BTV: torch.Tensor,
    pair_B2: torch.Tensor,
    targets_BT: torch.Tensor,
    group: TensorGroup | None = None,
) -> torch.Tensor:
    """Cross entropy in nats: the mean over the masked words, plus the mean over the pairs.

    Position 0 is [CLS], which is never masked: its target is the pair's, 0 if the second passage
    follows the first and 1 if it is from elsewhere. The other targets are a word or `IGNORED`.
    """
    words_BT = targets_BT.clone()
    words_BT[:, 0] = IGNORED
    words = word_loss(logits_BTV, words_BT, group)
    return words + F.cross_entropy(pair_B2, targets_BT[:, 0])
