"""A GPT made for narrow links: only `bottleneck_width` numbers a token go from layer to layer.

    words_BT ──Segment──> z_BTK, words_BT ──Segment──> ... z_BTK, words_BT ──Segment──> logits_BTV

    words_BT ──embedding─┐
    z_BTK ────widen─────(+)──> x_BTD ──blocks──> x_BTD ──narrow──> z_BTK

A segment is a layer, so a model can be cut nowhere else, and its bottlenecks are part of the model:
the losses do not depend on the number of stages. Both ends of a link know the words, so a segment
looks them up again in an embedding of its own, and the numbers that cross carry what blocks have
found beside them. That is from Subspace Networks (Ramasinghe et al. 2025, arXiv 2506.01260), whose
projection is orthogonal and the same everywhere, and whose second embedding is fixed; here all of
it is learned, boundary by boundary, as in a bottleneck of ResBM (2026, arXiv 2604.11947).

B batch · T position · D width · K width of a bottleneck · V vocabulary
"""

# ruff: noqa: N806 - shape suffixes

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from dpipe.stage.gpt import GptEmbedding, GptHead, TransformerBlock, word_loss
from dpipe.stage.model import LayeredModel

Narrowed = tuple[torch.Tensor, torch.Tensor]  # z_BTK, words_BT


class NarrowSegment(nn.Module):
    """Some blocks; a bottleneck in front of them unless they are the first, and one behind them
    unless they are the last.

    The words go on from segment to segment in the smallest integers that hold a vocabulary.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        width: int,
        num_heads: int,
        num_layers: int,
        context: int,
        dropout: float,
        bottleneck_width: int,
        num_blocks: int,
        is_first: bool = False,
        is_last: bool = False,
    ) -> None:
        super().__init__()
        self.words_dtype = smallest_dtype(vocab_size)
        self.draws = dropout > 0
        self.embedding = GptEmbedding(vocab_size, width, context, dropout)
        self.widen = None if is_first else nn.Linear(bottleneck_width, width, bias=False)
        self.blocks = nn.Sequential(
            *(TransformerBlock(width, num_heads, num_layers, dropout) for _ in range(num_blocks))
        )
        self.narrow = None if is_last else nn.Linear(width, bottleneck_width, bias=False)
        self.head = GptHead(vocab_size, width) if is_last else nn.Identity()
        for projection in (self.widen, self.narrow):
            if projection is not None:
                _start_alike(projection.weight)

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor | Narrowed:
        """Takes z_BTK and words_BT, the first segment words_BT alone; returns the same two, the
        last segment logits_BTV.
        """
        words_BT = inputs[-1]
        x_BTD: torch.Tensor = self.embedding(words_BT.to(torch.int32))
        if self.widen is not None:
            z_BTK = inputs[0]
            x_BTD = x_BTD + self.widen(z_BTK)
        x_BTD = self.blocks(x_BTD)
        if self.narrow is None:
            logits_BTV: torch.Tensor = self.head(x_BTD)
            return logits_BTV
        return self.narrow(x_BTD), words_BT.to(self.words_dtype)


@torch.no_grad()
def _start_alike(weight: torch.Tensor) -> None:
    """Orthogonal, and the same on both sides of every bottleneck, though each end may be made by
    another rank: at the start a bottleneck projects, and all onto one subspace.
    """
    width, bottleneck_width = sorted(weight.shape, reverse=True)
    rows_KD = torch.empty(bottleneck_width, width)
    nn.init.orthogonal_(rows_KD, generator=torch.Generator().manual_seed(0))
    is_narrowing = weight.shape == rows_KD.shape
    weight.copy_(rows_KD if is_narrowing else rows_KD.T)


def smallest_dtype(vocab_size: int) -> torch.dtype:
    """Of the integers that name each of so many words."""
    for dtype in (torch.uint8, torch.int16):
        if vocab_size <= torch.iinfo(dtype).max + 1:
            return dtype
    return torch.int32


def narrow_gpt(
    *,
    vocab_size: int,
    num_layers: int,
    width: int,
    num_heads: int,
    context: int,
    dropout: float,
    tied: bool,
    bottleneck_width: int,
    bottleneck_every: int,
) -> LayeredModel:
    """Segments of `bottleneck_every` blocks each, the first with the embedding and the last with
    the head.
    """
    segment = partial(
        NarrowSegment,
        vocab_size=vocab_size,
        width=width,
        num_heads=num_heads,
        num_layers=num_layers,
        context=context,
        dropout=dropout,
        bottleneck_width=bottleneck_width,
        num_blocks=bottleneck_every,
    )
    num_segments = num_layers // bottleneck_every
    layers: tuple[Callable[[], nn.Module], ...] = (
        partial(segment, is_first=True),
        *[segment] * (num_segments - 2),
        partial(segment, is_last=True),
    )

    def alike(index: int) -> int:
        return 1 if 0 < index < num_segments - 1 else index

    return LayeredModel(
        layers,
        word_loss,
        tied=("embedding.tokens.weight", "head.output.weight") if tied else None,
        alike=alike,
    )
