"""A family that is cut by its structure is tried: a small model of it, whole and in parts.

    config.json ──fewer layers, heads, words──> transformers' own model ──> logits
                                                      └─ its parts ──────> the same logits?

What a configuration says besides sizes, such as factors between layers, is kept: what of it our
parts do not do shows in the logits.
"""

import copy
import json
import logging
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from dpipe.errors import ConfigError
from dpipe.hub.architectures import ARCHITECTURES
from dpipe.hub.skeleton import Skeleton
from dpipe.hub.structure import NotUnderstoodError, understood

LOG = logging.getLogger("dpipe")
_LAYERS = 4
_LENGTHS = [8, 7]  # of two samples, longer than the window
_WORDS = 97
_MOST_VALUES = 300_000_000  # of a model that is tried with its own width
_TOLERANCE = 1e-4
# By the names of Llama's configuration; a key that a family does not have is left out.
_SHORT = {
    "vocab_size": _WORDS,
    "sliding_window": 6,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NARROW = {
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "head_dim": 16,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}


def try_out(config: Any) -> None:
    """Raises `ConfigError` with what was not understood of a family that architectures.py does not
    name, or where its parts do not compute what the whole does.

    It draws random numbers: call it where they are seeded.
    """
    kind = config.model_type
    if kind in ARCHITECTURES:
        return
    reason = _reason(kind, config.to_json_string(use_diff=False))
    if reason is not None:
        raise ConfigError(
            f"model.hf is of the family {kind!r}, which dpipe does not know, and cannot be cut by "
            f"its structure: {reason}; known are {', '.join(ARCHITECTURES)}; to add a family is an "
            "entry in dpipe/hub/architectures.py"
        )
    LOG.info("the family %r is cut by its structure; a small model of it computes the same", kind)


@cache
def _reason(kind: str, text: str) -> str | None:
    """Why not."""
    table = json.loads(text)
    reason: str | None = None
    # Some families do not take every width: those are tried with their own.
    for sizes in (_SHORT | _NARROW, _SHORT):
        try:
            model = _small(CONFIG_MAPPING[kind].from_dict(table), sizes)
            expected = _logits(model)
        except Exception as error:  # it depends on the family what sizes that do not fit raise
            reason = f"no small model of it can be tried: {_in_a_line(error)}"
            continue
        return _difference(model, expected) or _renamed(model)
    return reason


def _small(config: Any, sizes: Mapping[str, int]) -> Any:
    """A model of `config` but for some sizes, its values drawn; in evaluation mode."""
    table = config.to_dict()
    num_layers = _num_layers(config)
    for name, value in list(table.items()):
        # One entry a layer, as `layer_types`.
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            table[name] = value[:num_layers]
    changes = dict(sizes, num_hidden_layers=num_layers)
    if "hidden_size" in sizes:
        changes["num_key_value_heads"] = _few_heads(config)
    for name, size in changes.items():
        key = type(config).attribute_map.get(name, name)
        if isinstance(table.get(key), int) and table[key]:
            table[key] = size
    small = type(config).from_dict(table)
    with init_empty_weights(include_buffers=True):
        shape = AutoModelForCausalLM.from_config(copy.deepcopy(small))
    if sum(parameter.numel() for parameter in shape.parameters()) > _MOST_VALUES:
        raise ValueError(f"with {num_layers} layers it has more than {_MOST_VALUES:,} values")
    model = AutoModelForCausalLM.from_config(small)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)  # norms and biases too
    return model.eval()


def _num_layers(config: Any) -> int:
    """As few as have a layer of each type."""
    types = getattr(config, "layer_types", None) or []
    firsts = [types.index(each) for each in set(types)]
    most: int = config.num_hidden_layers
    return min(most, max([_LAYERS, *(first + 1 for first in firsts)]))


def _few_heads(config: Any) -> int:
    heads: int = config.num_attention_heads
    theirs: int = getattr(config, "num_key_value_heads", None) or heads
    shared = _NARROW["num_attention_heads"] if theirs == heads else 2
    return min(theirs, shared)


def _logits(model: nn.Module) -> list[torch.Tensor]:
    """transformers' own, of two samples."""
    with torch.no_grad():
        return [model(input_ids=sample, use_cache=False).logits for sample in _samples()]


def _samples() -> list[torch.Tensor]:
    tokens = torch.arange(3, 3 + sum(_LENGTHS)) * 29 % _WORDS
    return [sample[None] for sample in tokens.split(_LENGTHS)]


def _difference(model: nn.Module, expected: Sequence[torch.Tensor]) -> str | None:
    """What our parts do otherwise, alone and with the samples in one sequence."""
    config = model.config
    try:
        skeleton = Skeleton(model, config, understood(model, config))
        found = [_cut(skeleton, sample) for sample in _samples()]
        positions = torch.cat([torch.arange(length) for length in _LENGTHS])
        packed = _cut(skeleton, torch.cat(_samples(), 1), positions[None].int())
    except NotUnderstoodError as error:
        return str(error)
    except Exception as error:  # blocks that want other arguments, or return something else
        return f"its blocks do not run by themselves: {_in_a_line(error)}"
    whole = torch.cat(list(expected), 1)
    for ours, how in ((torch.cat(found, 1), ""), (packed, " with several samples in a sequence")):
        if not torch.allclose(ours, whole, rtol=_TOLERANCE, atol=_TOLERANCE):
            most = float((ours - whole).abs().max())
            return (
                f"its logits differ by up to {most:.2g}{how} from those of transformers, which "
                "does more between the layers than they show"
            )
    return None


def _renamed(model: Any) -> str | None:
    """Whether its files call a parameter otherwise than the model does: experts one by one, say."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        with safe_open(Path(folder) / "model.safetensors", "pt") as file:
            saved = set(file.keys())
    others = saved - {name for name, _ in model.named_parameters(remove_duplicate=False)}
    if not others:
        return None
    return f"its files hold {min(others)}, which the model has by no such name"


@torch.no_grad()
def _cut(skeleton: Skeleton, *inputs: torch.Tensor) -> torch.Tensor:
    for index in range(skeleton.num_layers):
        returned = skeleton.layer(index)(*inputs)
        inputs = returned if isinstance(returned, tuple) else (returned,)
    return inputs[0]


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
