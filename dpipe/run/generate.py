"""Text from a checkpoint: all layers in this process, one token at a time."""

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn

from dpipe.config.load import Config
from dpipe.data.tokenizer import Tokenizer, open_tokenizer
from dpipe.errors import CheckpointError, ConfigError, DataError
from dpipe.plan.run_plan import make_model
from dpipe.stage.families import FAMILIES
from dpipe.stage.model import materialise, saved_buffers
from dpipe.store import checkpoint
from dpipe.store.run_folder import checkpoint_url, load_configuration

LOG = logging.getLogger("dpipe")
_COLD = (
    1e-6  # below it the likeliest token has all of the distribution, and a quotient may leave fp32
)


def generate_text(
    run: Path, prompt: str, *, tokens: int, temperature: float, seed: int, fallback: bool = False
) -> str:
    """Continue `prompt` with the newest checkpoint of `run`. Raises `ConfigError` where its model
    continues no text.
    """
    config = load_configuration(run)
    family = config.model.family
    if not family.computes:
        raise ConfigError(f"{run} is a run of replayed stages, which have learned nothing")
    if not family.continues_text:
        others = " or ".join(f'"{name}"' for name in FAMILIES if FAMILIES[name].continues_text)
        raise ConfigError(
            f'{run} is a run of model.layers "{family.name}", which continues no text; generate '
            f"from a run of {others}"
        )
    layers = load_all_layers(config, checkpoint_url(config, run), fallback=fallback)
    return _continue(
        config, layers, open_tokenizer(config.data.tokenizer), prompt, tokens, temperature, seed
    )


def sample(config: Config, tokenizer: Tokenizer, url: str, prompt: str, num_tokens: int) -> str:
    """`prompt` and what the model of the newest checkpoint makes of it."""
    return _continue(
        config, load_all_layers(config, url), tokenizer, prompt, num_tokens, temperature=0.8, seed=0
    )


def _continue(
    config: Config,
    layers: list[nn.Module],
    tokenizer: Tokenizer,
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise DataError(
            f"the prompt {prompt!a} is not UTF-8; check the terminal's encoding"
        ) from None
    ids = tokenizer.encode(prompt)
    if not ids:
        raise CheckpointError("the prompt is empty; give at least one character")
    try:
        return tokenizer.decode(
            continue_ids(
                layers,
                ids,
                num_tokens,
                config.model.context,
                tokenizer.vocab_size,
                temperature,
                seed,
            )
        )
    except Exception as error:  # whatever a user's own layers raise
        raise ConfigError(
            f"model.layers {config.model.layers!r} cannot continue a text: {type(error).__name__}: "
            f"{error}; its layers "
            "must take from one to model.context tokens and give [batch, tokens, vocabulary]"
        ) from error


def load_all_layers(config: Config, url: str, *, fallback: bool = False) -> list[nn.Module]:
    model = make_model(config)
    layers = [
        materialise(model, index, config.train.seed, "cpu").eval()
        for index in range(len(model.layers))
    ]
    parameters = {
        f"layers.{i}.{name}": p
        for i, layer in enumerate(layers)
        for name, p in layer.named_parameters()
    }
    buffers = {
        f"layers.{i}.{name}": b
        for i, layer in enumerate(layers)
        for name, b in saved_buffers(layer)
    }
    loaded = checkpoint.load(
        url, lambda name: name in parameters or name in buffers, fallback=fallback
    )
    fill(parameters.items(), loaded)
    fill_buffers(buffers.items(), loaded)
    return layers


def fill_buffers(named: Iterable[tuple[str, torch.Tensor]], loaded: checkpoint.Loaded) -> None:
    """As `fill`. One that the checkpoint has not stays as the layer made it, and the log says so:
    it is made later, or the checkpoint is older than dpipe's saving of buffers.
    """
    found = dict(named)
    if absent := sorted(found.keys() - loaded.tensors.keys()):
        LOG.warning(
            "the checkpoint holds no %s: they are as the layers make them", ", ".join(absent)
        )
    fill(((name, buffer) for name, buffer in found.items() if name in loaded.tensors), loaded)


@torch.no_grad()
def fill(named: Iterable[tuple[str, torch.Tensor]], loaded: checkpoint.Loaded) -> None:
    """Copy the checkpoint's values into the tensors; raises `CheckpointError` where one has another
    shape.
    """
    for name, tensor in named:
        saved = loaded.tensors[name]
        if saved.shape != tensor.shape:
            raise CheckpointError(
                f"{name} is {list(saved.shape)} in the checkpoint and {list(tensor.shape)} here; "
                "check [model]"
            )
        tensor.copy_(saved)


@torch.no_grad()
def continue_ids(
    layers: Sequence[nn.Module],
    ids: Sequence[int],
    num_tokens: int,
    context: int,
    vocab_size: int,
    temperature: float,
    seed: int,
) -> list[int]:
    """`num_tokens` more ids after `ids`, each drawn from the model's distribution over the last
    `context` ones.

    A model's vocabulary may be larger than the `vocab_size` of its tokenizer: what is behind that
    is no text. Every whole number is a `seed`.
    """
    draw = torch.Generator().manual_seed(seed % 2**64)
    out = list(ids)
    for _ in range(num_tokens):
        x: tuple[torch.Tensor, ...] = (torch.tensor([out[-context:]]),)
        for layer in layers:
            returned = layer(*x)
            x = returned if isinstance(returned, tuple) else (returned,)
        logits_V = x[0][0, -1, :vocab_size].float()  # noqa: N806 - V: vocabulary
        if temperature < _COLD:
            out.append(int(logits_V.argmax()))
        else:
            chances = torch.softmax(logits_V / temperature, dim=-1)
            out.append(int(torch.multinomial(chances, 1, generator=draw)))
    return out
