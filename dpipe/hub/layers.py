"""Parts of a transformers model as layers of a pipeline.

    tokens_BT ──HubEmbedding──> x_BTD ──HubBlock──> ... ──> x_BTD ──HubHead──> logits_BTV

With several samples in a sequence, `positions_BT` go from layer to layer beside x: each sample
begins at position 0, and no position attends to another sample (4 bytes a token on the wire).

B batch · T position · D width · V vocabulary · Q query · K key
"""

# ruff: noqa: N803, N806 - shape suffixes

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from transformers import DynamicCache
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from dpipe.errors import ConfigError

Placed = tuple[torch.Tensor, torch.Tensor]  # x_BTD, positions_BT


class Context:
    """What a block needs of the whole model besides its own modules.

    Not a module: a rotary embedding's frequencies must stay in fp32 when parameters do not.
    """

    def __init__(
        self, config: Any, rotary: nn.Module | None, kind: str | None, window: int | None
    ) -> None:
        """`kind` is the layer's in `layer_types`, for a rotary embedding that depends on it."""
        self._config = config
        self._rotary = rotary
        self._kind = kind
        self._window = window

    @property
    def config(self) -> Any:
        return self._config

    def of(
        self, x_BTD: torch.Tensor, positions_BT: torch.Tensor | None, num_seen: int = 0
    ) -> dict[str, Any]:
        """The arguments that transformers' own model would give to the block. Of `num_seen` tokens
        before these it has the keys and values: then there is one, which sees all of them.
        """
        mask = None
        if positions_BT is None:
            positions = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None] + num_seen
            if not num_seen:
                mask = self._mask(x_BTD)
        else:
            positions = positions_BT.long()
            mask = self._mask_of_samples(x_BTD, positions)
        arguments = {"attention_mask": mask, "position_ids": positions}
        if self._rotary is not None:
            # It is no part of a module that moves with its stage.
            if x_BTD.is_cuda:
                self._rotary.to(x_BTD.device)
            by_kind = () if self._kind is None else (self._kind,)
            arguments["position_embeddings"] = self._rotary(x_BTD, positions, *by_kind)
        return arguments

    def _mask(self, x_BTD: torch.Tensor) -> torch.Tensor | None:
        # Made as transformers makes it: None where its attention is causal by itself, and faster.
        make = create_causal_mask if self._window is None else create_sliding_window_causal_mask
        mask: torch.Tensor | None = make(
            config=self._config, inputs_embeds=x_BTD, attention_mask=None, past_key_values=None
        )
        return mask

    def _mask_of_samples(self, x_BTD: torch.Tensor, positions_BT: torch.Tensor) -> torch.Tensor:
        samples_BT = (positions_BT == 0).cumsum(1)
        same_BQK = samples_BT[:, :, None] == samples_BT[:, None, :]
        # Within a sample a later token has a higher position.
        distance_BQK = positions_BT[:, :, None] - positions_BT[:, None, :]
        seen_BQK = same_BQK & (distance_BQK >= 0)
        if self._window is not None:
            seen_BQK &= distance_BQK < self._window
        seen = seen_BQK[:, None]  # for all heads
        if self._config._attn_implementation == "sdpa":
            return seen
        # Other implementations add the mask to their scores.
        zeros = torch.zeros(seen.shape, dtype=x_BTD.dtype, device=x_BTD.device)
        return zeros.masked_fill(~seen, torch.finfo(x_BTD.dtype).min)


class HubEmbedding(nn.Module):
    """Of tokens, and of learned positions if the model has them."""

    def __init__(
        self, modules: dict[str, nn.Module], tokens: str, positions: str | None, dropout: str | None
    ) -> None:
        super().__init__()
        # Under their own names, by which a checkpoint has them.
        for name, module in modules.items():
            self.add_module(name, module)
        self._tokens = tokens
        self._positions = positions
        self._dropout = dropout
        self.counts = False  # whether what follows is the rest of one text
        self.num_seen = 0
        self.draws = draws_numbers(self)

    def forward(
        self, tokens_BT: torch.Tensor, positions_BT: torch.Tensor | None = None
    ) -> torch.Tensor | Placed:
        x_BTD = self.get_submodule(self._tokens)(tokens_BT)
        if self._positions is not None:
            positions = positions_BT
            if positions is None:
                positions = torch.arange(x_BTD.shape[1], device=x_BTD.device)[None]
                positions = positions + self.num_seen
                if self.counts:
                    self.num_seen += x_BTD.shape[1]
            x_BTD = x_BTD + self.get_submodule(self._positions)(positions.long())
        if self._dropout is not None:
            x_BTD = self.get_submodule(self._dropout)(x_BTD)
        return x_BTD if positions_BT is None else (x_BTD, positions_BT)


class HubBlock(nn.Module):
    """One decoder layer, as transformers has it."""

    def __init__(self, block: nn.Module, context: Context, *, number: int, draws: bool) -> None:
        super().__init__()
        self.block = block
        self.number = number
        self.keys: DynamicCache | None = None  # of all blocks
        self.context = context
        self.draws = draws or draws_numbers(self)

    def forward(
        self, x_BTD: torch.Tensor, positions_BT: torch.Tensor | None = None
    ) -> torch.Tensor | Placed:
        keys = self.keys
        num_seen = 0 if keys is None else int(keys.get_seq_length(self.number))
        arguments = self.context.of(x_BTD, positions_BT, num_seen)
        # Without values, only sizes are asked for.
        sized = x_BTD.is_meta or isinstance(x_BTD, FakeTensor)
        # While it trains, without a cache: it would keep the keys of one micro-batch for the next.
        with _GroupedSizes() if sized else nullcontext():
            x_BTD = self.block(x_BTD, past_key_values=keys, use_cache=keys is not None, **arguments)
        return x_BTD if positions_BT is None else (x_BTD, positions_BT)


class _GroupedSizes(TorchFunctionMode):
    """Inside, a product with the matrices of experts [E, K, N] is a `_GroupedProduct`: torch's rule
    for the sizes of a grouped product refuses all precisions but bf16, though its kernels compute
    in fp32 too.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in (torch.nn.functional.grouped_mm, torch._grouped_mm):
            return func(*args, **(kwargs or {}))
        x, experts = args[:2]
        return _GroupedProduct.apply(x, experts)  # type: ignore[no-untyped-call]


class _GroupedProduct(torch.autograd.Function):
    """A product with the first expert, which takes as many operations; its graph keeps and makes
    what that with all of them would.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, experts)
        return x @ experts[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        _, experts = ctx.saved_tensors
        grad_experts = None
        if ctx.needs_input_grad[1]:
            grad_experts = torch.empty_like(experts)
        return grad @ experts[0].t(), grad_experts


class HubHead(nn.Module):
    """The last norm, and the logits, with the soft cap of those that have one."""

    def __init__(self, norm: nn.Module, lm_head: nn.Module, soft_cap: float | None) -> None:
        super().__init__()
        self.norm = norm
        self.lm_head = lm_head
        self._soft_cap = soft_cap
        self.draws = draws_numbers(self)

    def forward(
        self, x_BTD: torch.Tensor, positions_BT: torch.Tensor | None = None
    ) -> torch.Tensor:
        logits_BTV: torch.Tensor = self.lm_head(self.norm(x_BTD))
        if self._soft_cap is None:
            return logits_BTV
        # Before the loss, as Gemma 2 was trained.
        return torch.tanh(logits_BTV / self._soft_cap) * self._soft_cap


class HubKeyCache:
    """Keys and values of a text that grows, for all layers of a model in one process
    (`data/sampling.py`).
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._embeddings = [layer for layer in layers if isinstance(layer, HubEmbedding)]
        self._blocks = [layer for layer in layers if isinstance(layer, HubBlock)]
        if not self._blocks:
            raise ConfigError("model.hf is an encoder, which finds words and continues no text")

    def begin(self) -> None:
        config = self._blocks[0].context.config
        self._set(DynamicCache(config=config))

    def end(self) -> None:
        self._set(None)

    def _set(self, keys: DynamicCache | None) -> None:
        for embedding in self._embeddings:
            embedding.counts = keys is not None
            embedding.num_seen = 0
        for block in self._blocks:
            block.keys = keys


def draws_numbers(module: nn.Module) -> bool:
    """Whether a forward pass in training draws random numbers."""
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules())
