"""Parts of an encoder of transformers, such as BERT, as layers of a pipeline.

    tokens_BT ──HubEncoderEmbedding──> x_BTD ──HubEncoderBlock──> ... ──HubEncoderHead──> logits_BTV

Every token sees all others. Sequences are whole windows of a text: none has padding to be hidden.

B batch · T position · D width · V vocabulary
"""

# ruff: noqa: N803, N806 - shape suffixes

from typing import Any

import torch
from torch import nn
from transformers.masking_utils import create_bidirectional_mask

from dpipe.errors import ConfigError
from dpipe.hub.layers import draws_numbers

# What a published encoder may be besides one with the head that finds masked words.
_WITH_HEAD = ("ForMaskedLM", "ForPreTraining")


class HubEncoderEmbedding(nn.Module):
    """Of tokens, positions and types, with their norm."""

    def __init__(self, embeddings: nn.Module) -> None:
        super().__init__()
        self.embeddings = embeddings
        self.draws = draws_numbers(self)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        x_BTD: torch.Tensor = self.embeddings(tokens_BT)
        return x_BTD


class HubEncoderBlock(nn.Module):
    """One layer, as transformers has it."""

    def __init__(self, block: nn.Module, config: Any, *, draws: bool) -> None:
        super().__init__()
        self.block = block
        self._config = config
        self.draws = draws or draws_numbers(self)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        # As transformers makes it: None where its attention needs none.
        mask = create_bidirectional_mask(
            config=self._config, inputs_embeds=x_BTD, attention_mask=None
        )
        y_BTD: torch.Tensor = self.block(x_BTD, attention_mask=mask)
        return y_BTD


class HubEncoderHead(nn.Module):
    """What finds the words that were masked out: modules under their own names, in a row."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x_BTD = module(x_BTD)
        return x_BTD


def check_encoder(config: Any) -> None:
    """Raises `ConfigError` for one that continues texts, and for one with another head."""
    if getattr(config, "is_decoder", False):
        raise ConfigError(
            f"model.hf has is_decoder = true, and of {config.model_type!r} dpipe trains encoders, "
            "which find masked words; take a decoder of another family"
        )
    for name in config.architectures or ():
        if not name.endswith((*_WITH_HEAD, "Model")):
            raise ConfigError(
                f"model.hf is a {name}, and of {config.model_type!r} dpipe trains the head that "
                f"finds masked words alone: give a model that was saved as {_WITH_HEAD[0]}; heads "
                "that classify are not trained here"
            )
