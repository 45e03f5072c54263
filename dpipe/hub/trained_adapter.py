"""An adapter that was trained before, as peft writes it: what a run may go on from.

adapter_config.json          its rank and scale, which must be those of [adapter]
adapter_model.safetensors    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight ...
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dpipe.errors import CheckpointError, ConfigError
from dpipe.hub.skeleton import Skeleton

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# peft's keys, and what they are here
_KEYS = {
    "r": "adapter.r",
    "lora_alpha": "adapter.alpha",
    "use_dora": "adapter.dora",
    "use_rslora": "adapter.rslora",
    # Of single modules; peft sets them for experts.
    "rank_pattern": "rank_pattern",
    "alpha_pattern": "alpha_pattern",
}


def adapter_name(published: str) -> str:
    """What peft's file calls the parameter that peft's model calls `published`."""
    name = published.replace(".default", "")
    if "lora_magnitude" in name:
        name = name.removesuffix(".weight")
    return f"{_PREFIX}{name}"


def check_adapter(folder: Path, skeleton: Skeleton) -> None:
    """Raises `ConfigError` for an adapter of other settings, and for one of another model; only its
    header is read.
    """
    _check_settings(folder, skeleton.adapter)
    expected = {}
    for name, parameter in skeleton.model.named_parameters():
        if "lora_" in name:
            expected[adapter_name(name)] = list(parameter.shape)
    found = {}
    with _open(folder) as file:
        for name in file.keys():  # noqa: SIM118 - it is no dictionary
            found[name] = list(file.get_slice(name).get_shape())
    names = sorted(expected.keys() | found.keys())
    differing = [name for name in names if expected.get(name) != found.get(name)]
    if differing:
        first = differing[0]
        raise ConfigError(
            f"adapter.start {folder} is of another model, or of other adapter.target_modules: "
            f"{first} is {found.get(first, 'not there')}, and this model has "
            f"{expected.get(first, 'none')}"
        )


def fill_adapter(folder: Path, skeleton: Skeleton, index: int, layer: nn.Module) -> None:
    """Give the adapter of one layer the values in `folder`."""
    with _open(folder) as file, torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "lora_" in name:
                published = skeleton.published_name(index, name)
                value: torch.Tensor = file.get_tensor(adapter_name(published))
                parameter.copy_(value)


def _check_settings(folder: Path, here: Any) -> None:
    """`here` is peft's configuration of this run's."""
    different = []
    try:
        saved = read_settings((folder / CONFIG).read_bytes(), str(folder))
    except OSError as error:
        raise _no_settings(str(folder), error) from None
    for key, ours in _KEYS.items():
        value = getattr(here, key)
        if key in saved and saved[key] != value:
            different.append(f"{ours} is {value!r:.60} and {key} there {saved[key]!r:.60}")
    if different:
        raise ConfigError(
            f"adapter.start {folder} is an adapter of other settings: {'; '.join(different)}"
        )


def read_settings(content: bytes, folder: str) -> dict[str, Any]:
    """peft's description of an adapter. Raises `ConfigError` for anything else."""
    try:
        settings = json.loads(content)
    except (RecursionError, ValueError) as error:
        raise _no_settings(folder, error) from None
    if not isinstance(settings, dict):
        raise _no_settings(folder, TypeError("it is no JSON object"))
    return settings


def _no_settings(folder: str, error: Exception) -> ConfigError:
    return ConfigError(
        f"adapter.start {folder} holds no {CONFIG} that can be read ({error}): give a folder that "
        "peft's save_pretrained, or dpipe export --adapter, has written"
    )


def _open(folder: Path) -> Any:
    try:
        return safe_open(folder / WEIGHTS, "pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"adapter.start {folder} holds no whole {WEIGHTS} ({error}): copy it there again"
        ) from None
