"""A published model as the list of layers that the rest of dpipe takes."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.hub.adapter import add_adapter, initialise_adapter
from dpipe.hub.architectures import ARCHITECTURES
from dpipe.hub.skeleton import Skeleton, check_sizes, skeleton_of
from dpipe.hub.source import ModelSource, find_source
from dpipe.hub.tensors import Weights, fill_from, open_weights
from dpipe.hub.trained_adapter import check_adapter, fill_adapter
from dpipe.hub.trial import try_out
from dpipe.passes.seeding import seeded
from dpipe.quantised.layers import matrices_of, quantise
from dpipe.stage.model import LayeredModel, Loss, freeze

_IGNORED = -100  # the target of a token that is not learned


def layered_model(config: Config) -> LayeredModel:
    """The model that `model.hf` names, with the adapter. Only its configuration is read until a
    layer is materialised.

    Raises `ConfigError`; materialising a layer raises `CheckpointError`.
    """
    source = source_of(config)
    skeleton = adapted_skeleton(config, source)
    factories: list[Callable[[], nn.Module]] = []
    for index in range(skeleton.num_layers):
        factories.append(partial(_layer, skeleton, index, config.adapter.base))
    learns_all = config.adapter.kind == "none"
    parts = skeleton.architecture
    tied = (f"{parts.tokens}.weight", f"{parts.output}.weight")
    accuracy = _scored(config, text_accuracy, sample_accuracy)
    # Opened when the first layer is filled: a prediction needs none.
    weights = cache(partial(open_weights, source, skeleton))
    return LayeredModel(
        tuple(factories),
        _scored(config, text_loss, sample_loss),
        tied=tied if learns_all and skeleton.is_tied else None,
        fill=partial(_fill, weights, skeleton, config.adapter.start),
        frozen=_frozen(skeleton),
        alike=skeleton.alike,
        accuracy=masked_accuracy if parts.is_encoder else accuracy,
    )


def vocabulary(config: Config) -> int:
    """Entries of the vocabulary of `model.hf`, by its config.json. Raises `ConfigError`."""
    return int(source_of(config).config().vocab_size)


def is_encoder(config: Config) -> bool:
    """Whether `model.hf` finds masked words, and continues no text. Raises `ConfigError`."""
    known = ARCHITECTURES.get(source_of(config).config().model_type)
    return known is not None and known.is_encoder


def _check_use(skeleton: Skeleton, config: Config) -> None:
    if skeleton.architecture.is_encoder and config.data.has_samples:
        raise ConfigError(
            f"model.hf is an encoder, which learns masked words of a text, and data.format is "
            f'"{config.data.format}": give texts, and data.format = "text"'
        )
    most = skeleton.num_positions()
    if most is not None and config.model.context > most:
        raise ConfigError(
            f"model.context {config.model.context} is longer than the {most} positions that "
            "model.hf has learned: lower it"
        )


def _frozen(skeleton: Skeleton) -> int:
    """How many layers are in front of the first that learns."""
    for index in range(skeleton.num_layers):
        if any(parameter.requires_grad for parameter in skeleton.parameters(index)):
            return index
    return 0


@cache
def source_of_name(name: str, revision: str | None) -> ModelSource:
    return find_source(name, revision)


def source_of(config: Config) -> ModelSource:
    """Raises `ConfigError` where model.hf names nothing that is here."""
    assert config.model.hf is not None
    return source_of_name(config.model.hf, config.model.revision)


def commit_of(name: str, revision: str | None) -> str | None:
    """Of a model on the hub, which every rank must read alike; None of a folder or a file."""
    return source_of_name(name, revision).commit


def adapted_skeleton(config: Config, source: ModelSource) -> Skeleton:
    published = source.config()
    # Under its lock: meanwhile transformers lets no module of the process draw its first values,
    # and other threads may be making layers.
    with seeded("skeleton"):
        check_sizes(published)
        try_out(published)
        skeleton = skeleton_of(published)
        _check_use(skeleton, config)
        skeleton = add_adapter(skeleton, config.adapter)
    if config.adapter.base != "full":
        _check_base(skeleton, config.adapter.base)
    if config.adapter.start is not None:
        check_adapter(Path(config.adapter.start), skeleton)
    return skeleton


def _check_base(skeleton: Skeleton, kind: str) -> None:
    """Raises `ConfigError` for a model most of whose values would stay as they are."""
    block = skeleton.layer(1)
    matrices = matrices_of(block)
    values = sum(parameter.numel() for parameter in block.parameters())
    if sum(matrix.numel() for matrix in matrices) < values / 2:
        raise ConfigError(
            f'adapter.base "{kind}" is of linear layers and of experts, and most of a block of '
            f"{skeleton.config.model_type!r} is neither: leave it out"
        )
    if kind == "nf4" and any(matrix.shape[-1] % 2 for matrix in matrices):
        raise ConfigError('adapter.base "nf4" needs matrices of even width: take "int8"')


def _layer(skeleton: Skeleton, index: int, base: str) -> nn.Module:
    layer = skeleton.layer(index)
    freeze(layer)
    if base != "full" and skeleton.is_block(index):
        quantise(layer, base)
    return layer


def _fill(
    weights: Callable[[], Weights],
    skeleton: Skeleton,
    start: str | None,
    index: int,
    layer: nn.Module,
) -> None:
    fill_from(weights(), skeleton, index, layer, torch.float32)
    # An empty module of peft's costs its import.
    if any(parameter.is_meta for parameter in layer.parameters()):
        initialise_adapter(layer)
        if start is not None:
            fill_adapter(Path(start), skeleton, index, layer)


def _scored(config: Config, of_text: Loss, of_samples: Loss) -> Loss:
    if not config.data.has_samples:
        return of_text
    parts = config.train.num_microbatches * config.data_parallel.replicas
    return partial(of_samples, num_parts=parts)


def text_loss(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Cross entropy in nats, the mean over all tokens; of an encoder over those masked out, of
    which each sequence has as many (`data/masked.py`).
    """
    return F.cross_entropy(logits_BTV.flatten(0, 1).float(), targets_BT.flatten())


def sample_loss(
    logits_BTV: torch.Tensor,  # noqa: N803
    targets: torch.Tensor,
    *,
    num_parts: int,
) -> torch.Tensor:
    """Cross entropy of a micro-batch's learned tokens, as its share of the mean over all of the
    batch: the mean of the `num_parts` micro-batches is the mean over tokens.

    `targets` are [B, T + 1]: the last column has the number of learned tokens in the whole batch.
    """
    count = targets[0, -1]
    flat = targets[:, :-1].flatten()
    total = F.cross_entropy(
        logits_BTV.flatten(0, 1).float(), flat, ignore_index=_IGNORED, reduction="sum"
    )
    return total * num_parts / count


def text_accuracy(logits_BTV: torch.Tensor, targets_BT: torch.Tensor) -> torch.Tensor:  # noqa: N803
    """Share of the tokens that are the likeliest."""
    return (logits_BTV.argmax(-1) == targets_BT).float().mean()


def masked_accuracy(
    logits_BTV: torch.Tensor,  # noqa: N803
    targets_BT: torch.Tensor,  # noqa: N803
) -> torch.Tensor:
    """Of the words that were masked out, as many in each sequence."""
    masked = targets_BT != _IGNORED
    return (logits_BTV.argmax(-1) == targets_BT)[masked].float().mean()


def sample_accuracy(
    logits_BTV: torch.Tensor,  # noqa: N803
    targets: torch.Tensor,
    *,
    num_parts: int,
) -> torch.Tensor:
    """Of a micro-batch's learned tokens, with the arguments of `sample_loss`, and as its share."""
    count = targets[0, -1]
    # No token is `_IGNORED`.
    right = (logits_BTV.argmax(-1) == targets[:, :-1]).sum()
    return right * num_parts / count
