"""Text from a checkpoint: all layers in this process, one token at a time."""

import logging
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn

from dpipe.config.load import Config
from dpipe.data.sampling import KeyCache, continue_ids
from dpipe.errors import CheckpointError, ConfigError, DataError
from dpipe.hub.extra import hub_function
from dpipe.passes.seeding import Undrawn
from dpipe.plan.run_plan import make_model
from dpipe.stage.families import FAMILIES
from dpipe.stage.model import materialise, saved_buffers
from dpipe.store import checkpoint
from dpipe.store.load import fill, fill_buffers
from dpipe.store.run_folder import checkpoint_url, load_configuration
from dpipe.tokenizer.tokenizer import Tokenizer, tokenizer_of, words_of

LOG = logging.getLogger(__name__)


def generate_text(
    run: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    fallback: bool = False,
    trust_code: bool = False,
    chat: bool = False,
    best: bool = False,
) -> str:
    """Continue `prompt` with the newest checkpoint of `run`, or its `best`; with `chat` it is a
    user's turn, and what is returned is the assistant's answer.

    Raises `ConfigError` if its model continues no text or is code from elsewhere without
    `trust_code`, `DataError` for a prompt that is not UTF-8,
    `CheckpointError` for an empty one, or for a checkpoint that does not fit.
    """
    config = load_configuration(run, trust_code=trust_code)
    family = config.model.family
    if not family.computes:
        raise ConfigError(f"{run} is a run of replayed stages, which have learned nothing")
    if not family.continues_text:
        others = " or ".join(f'"{name}"' for name in FAMILIES if FAMILIES[name].continues_text)
        raise ConfigError(
            f'{run} is a run of model.layers "{family.name}", which continues no text; generate '
            f"from a run of {others}"
        )
    url = checkpoint_url(config, run)
    step = checkpoint.best(url) if best else None
    layers = load_all_layers(config, url, fallback=fallback, step=step)
    tokenizer = tokenizer_of(config)
    if chat:
        return _answer(config, layers, prompt, tokens, temperature, seed)
    return _continue(config, layers, tokenizer, prompt, tokens, temperature, seed)


def _answer(
    config: Config,
    layers: list[nn.Module],
    prompt: str,
    num_tokens: int,
    temperature: float,
    seed: int,
) -> str:
    if config.model.hf is None:
        raise ConfigError("--chat is for runs of model.hf, whose tokenizer has a chat template")
    words = words_of(config)
    asked: str = words.chat([{"role": "user", "content": prompt}], asks=True)
    ids = words.encode(asked)
    context = config.model.context
    vocab_size = words.vocab_size
    continued = continue_ids(
        layers,
        ids,
        num_tokens,
        context,
        vocab_size,
        temperature,
        seed,
        end=words.end,
        keys=_keys_of(config, layers),
        device=_placed(config, layers),
    )
    answer = continued[len(ids) :]
    if answer and answer[-1] == words.end:
        answer = answer[:-1]
    return str(words.decode(answer))


def sample(config: Config, tokenizer: Tokenizer, url: str, prompt: str, num_tokens: int) -> str:
    """`prompt`, continued by the model of the newest checkpoint at `url`. Raises as
    `generate_text`.
    """
    layers = load_all_layers(config, url)
    return _continue(config, layers, tokenizer, prompt, num_tokens, temperature=0.8, seed=0)


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
    of_prompt = tokenizer.encode(prompt)
    if not of_prompt:
        raise CheckpointError("the prompt is empty; give at least one character")
    start = list(tokenizer.start)
    ids = start + of_prompt
    keys = _keys_of(config, layers)
    device = _placed(config, layers)
    try:
        continued = continue_ids(
            layers,
            ids,
            num_tokens,
            config.model.context,
            tokenizer.vocab_size,
            temperature,
            seed,
            keys=keys,
            device=device,
        )
        return tokenizer.decode(continued[len(start) :])
    except Exception as error:  # whatever a user's own layers raise
        raise ConfigError(
            f"model.layers {config.model.layers!r} cannot continue a text: {type(error).__name__}: "
            f"{error}; its layers must take from one to model.context tokens and return "
            "[batch, tokens, vocabulary]"
        ) from error


def _keys_of(config: Config, layers: list[nn.Module]) -> KeyCache | None:
    """Of a published model alone: dpipe's own, and a user's, see the whole text at each token."""
    if config.model.hf is None:
        return None
    cache: KeyCache = hub_function("layers:HubKeyCache")(layers)
    return cache


def _placed(config: Config, layers: list[nn.Module]) -> str:
    """Where the layers are from here on: on the run's GPU, if it is here and has room."""
    device = config.node.device
    if not device.startswith("cuda") or not torch.cuda.is_available():
        return "cpu"
    try:
        for layer in layers:
            layer.to(device)
    except torch.OutOfMemoryError:
        for layer in layers:
            layer.to("cpu")
        LOG.warning("%s has no room for the whole model: the text is written on the CPU", device)
        return "cpu"
    return device


def load_all_layers(
    config: Config, url: str, *, fallback: bool = False, step: int | None = None
) -> list[nn.Module]:
    """All layers of the newest checkpoint at `url`, or of that of `step`, on the CPU, in evaluation
    mode.
    """
    # What an adapter began from may be gone: the checkpoint has all of it.
    model = make_model(config.with_(adapter__start=None))
    # A user's own layers may compute something from what they have drawn.
    is_ours = config.model.family.builder is not None
    with Undrawn() if is_ours else nullcontext():
        layers = [
            materialise(model, index, config.train.seed, "cpu").eval()
            for index in range(len(model.layers))
        ]
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for index, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            parameters[f"layers.{index}.{name}"] = parameter
        for name, buffer in saved_buffers(layer):
            buffers[f"layers.{index}.{name}"] = buffer

    def is_wanted(name: str) -> bool:
        return name in parameters or name in buffers

    # By a test, not by names: those of buffers that are missing in the checkpoint are no error.
    loaded = checkpoint.load(url, is_wanted, step, fallback=fallback)
    fill(parameters.items(), loaded)
    fill_buffers(buffers.items(), loaded)
    return layers
