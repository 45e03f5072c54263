"""A whole model of transformers without memory, made from its config.json alone.

Parameters are on the meta device; buffers, such as the frequencies of a rotary embedding, are real:
no checkpoint has them.
"""

import copy
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from accelerate import init_empty_weights
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.initialization import no_init_weights

from dpipe.errors import ConfigError
from dpipe.hub.architectures import ARCHITECTURES, Architecture
from dpipe.hub.encoder import (
    HubEncoderBlock,
    HubEncoderEmbedding,
    HubEncoderHead,
    check_encoder,
)
from dpipe.hub.layers import Context, HubBlock, HubEmbedding, HubHead
from dpipe.hub.structure import NotUnderstoodError, understood

# What a configuration may ask for, by far more than any that is published does.
_MOST = {
    "num_hidden_layers": 512,
    "num_experts": 1024,
    "num_local_experts": 1024,
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "max_position_embeddings": 1 << 28,
}


@dataclass(frozen=True)
class Skeleton:
    """`model` is transformers' own, and `config` what it was made from."""

    model: nn.Module
    config: Any
    architecture: Architecture
    adapter: Any = None  # peft's configuration of what is injected in `model`

    @property
    def num_layers(self) -> int:
        """Of the pipeline: an embedding, the blocks, a head."""
        return int(self.config.num_hidden_layers) + 2

    @property
    def is_tied(self) -> bool:
        """Whether the head's weight is the embedding's."""
        return bool(self.config.tie_word_embeddings)

    def is_block(self, index: int) -> bool:
        return 0 < index < self.num_layers - 1

    def published_name(self, layer: int, name: str) -> str:
        """What transformers calls the parameter that is `name` in that layer of the pipeline."""
        parts = self.architecture
        if layer == 0:
            return f"{parts.base}.{name}"
        if layer < self.num_layers - 1:
            return f"{parts.base}.{parts.blocks}.{layer - 1}.{name.removeprefix('block.')}"
        if self.is_tied and parts.output_bias and name == f"{parts.output}.bias":
            return parts.output_bias
        if name.startswith("norm."):
            return f"{parts.base}.{parts.norm}.{name.removeprefix('norm.')}"
        # The head stands beside the base, in all families.
        return name

    def parameters(self, index: int) -> Iterator[nn.Parameter]:
        """Of layer `index`, without a copy of it."""
        parts = self.architecture
        base = self.model.get_submodule(parts.base)
        if index == 0:
            names = (parts.tokens, parts.positions)
            modules = [base.get_submodule(name) for name in names if name]
            if parts.is_encoder:
                modules = [base.get_submodule("embeddings")]
        elif self.is_block(index):
            modules = [base.get_submodule(f"{parts.blocks}.{index - 1}")]
        elif parts.is_encoder:
            modules = [self.model.get_submodule(name) for name in parts.head]
        else:
            modules = [base.get_submodule(parts.norm), self.model.get_submodule(parts.output)]
        for module in modules:
            yield from module.parameters()

    def alike(self, index: int) -> Hashable:
        """Equal for blocks that differ in nothing but their values: by their parameters, and by
        what they see.
        """
        if not self.is_block(index):
            return index
        number = index - 1
        kinds = getattr(self.config, "layer_types", None)
        block = self.model.get_submodule(f"{self.architecture.base}.{self.architecture.blocks}")
        parameters = [
            (name, tuple(parameter.shape), parameter.requires_grad)
            for name, parameter in block.get_submodule(str(number)).named_parameters()
        ]
        return (kinds and kinds[number], self._window(number), *parameters)

    def layer(self, index: int) -> nn.Module:
        """A copy of layer `index`; its parameters have no memory."""
        parts = self.architecture
        base = self.model.get_submodule(parts.base)
        if parts.is_encoder:
            return self._encoder_layer(base, index)
        if index == 0:
            names = (parts.tokens, parts.positions, parts.dropout)
            modules = {name: copy.deepcopy(getattr(base, name)) for name in names if name}
            return HubEmbedding(modules, *names)
        if index < self.num_layers - 1:
            return self._block(base, index - 1)
        return HubHead(
            copy.deepcopy(getattr(base, parts.norm)),
            copy.deepcopy(self.model.get_submodule(parts.output)),
            getattr(self.config, "final_logit_softcapping", None),
        )

    def _encoder_layer(self, base: nn.Module, index: int) -> nn.Module:
        parts = self.architecture
        if index == 0:
            return HubEncoderEmbedding(copy.deepcopy(base.get_submodule("embeddings")))
        if self.is_block(index):
            block = copy.deepcopy(base.get_submodule(f"{parts.blocks}.{index - 1}"))
            return HubEncoderBlock(block, self.config, draws=_draws(self.config))
        head = {name: self.model.get_submodule(name) for name in parts.head}
        return HubEncoderHead(copy.deepcopy(head))

    def num_positions(self) -> int | None:
        """How many a sequence may have, if they are learned."""
        name = self.architecture.positions
        if name is None:
            return None
        embedding: Any = self.model.get_submodule(f"{self.architecture.base}.{name}")
        # RoBERTa's begin behind that of padding.
        before = 0 if embedding.padding_idx is None else embedding.padding_idx + 1
        return int(embedding.num_embeddings - before)

    def _block(self, base: nn.Module, number: int) -> HubBlock:
        parts = self.architecture
        block = copy.deepcopy(getattr(base, parts.blocks)[number])
        rotary = None
        if parts.rotary is not None:
            rotary = copy.deepcopy(getattr(base, parts.rotary))
        kind = None
        if parts.rotary_by_layer:
            kind = self.config.layer_types[number]
        context = Context(self.config, rotary, kind, self._window(number))
        return HubBlock(block, context, number=number, draws=_draws(self.config))

    def _window(self, number: int) -> int | None:
        """The sliding window of block `number`; None where it sees all that is before."""
        match self.architecture.window:
            case "none":
                return None
            case "all":
                window = self.config.sliding_window
            case "by layer":
                slides = self.config.layer_types[number] == "sliding_attention"
                window = self.config.sliding_window if slides else None
        return None if window is None else int(window)


def skeleton_of(config: Any) -> Skeleton:
    """Raises `ConfigError` for a configuration that makes no model, or one that cannot be cut. A
    family that architectures.py does not name is cut by its structure; `trial.py` says whether it
    may be.
    """
    check_sizes(config)
    known = ARCHITECTURES.get(config.model_type)
    encoder = known is not None and known.is_encoder
    if encoder:
        check_encoder(config)
    # Names and shapes are wanted: a model of 70 GB must cost neither memory nor random numbers.
    try:
        with no_init_weights(), init_empty_weights(include_buffers=False):
            model = (AutoModelForMaskedLM if encoder else AutoModelForCausalLM).from_config(config)
    except Exception as error:  # it depends on the model's class what a broken configuration raises
        raise ConfigError(
            f"transformers makes no model of model.hf's configuration: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:500]}"
        ) from None
    if known is not None and known.output_bias is not None:
        # Another name of the matrix's own bias or, where nothing is tied, read by nobody.
        owner, _, name = known.output_bias.rpartition(".")
        del model.get_submodule(owner)._parameters[name]
    return Skeleton(model, model.config, known or _understood(model))


def _understood(model: Any) -> Architecture:
    try:
        return understood(model, model.config)
    except NotUnderstoodError as error:
        raise ConfigError(f"model.hf cannot be cut: {error}") from None


def check_sizes(config: Any) -> None:
    """Before a module is made of each: the configuration may be anybody's."""
    counts = {name: getattr(config, name, None) for name in _MOST}
    for name, count in counts.items():
        if count is None:
            continue
        if type(count) is not int or not 0 < count <= _MOST[name]:
            raise ConfigError(
                f"the configuration of model.hf has {name} = {count!a:.100}, which is not between "
                f"1 and {_MOST[name]}: it is damaged, or not a model"
            )


def _draws(config: Any) -> bool:
    """Whether a block may drop out without a module for it, or a router adds noise."""
    for name, value in config.to_dict().items():
        drops = "drop" in name or name == "router_jitter_noise"
        if drops and isinstance(value, float) and value > 0:
            return True
    return False
