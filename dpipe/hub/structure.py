"""Where the parts of a decoder are that no entry of architectures.py names, by what they are.

model.get_input_embeddings()      tokens
the other nn.Embedding            learned positions, if there is one
nn.Dropout                        dropout behind the embeddings
nn.ModuleList                     blocks
"Rotary" in its class, no values  rotary embedding
what is left with parameters      the last norm

Whatever else is there is named, and the family refused. That the parts are put together as here is
shown by `trial.py`.
"""

import inspect
import re
from typing import Any, Literal

from torch import nn

from dpipe.hub.architectures import Architecture

_HEAD = "lm_head"
_DROPS = re.compile("emb.*drop")


class NotUnderstoodError(Exception):
    """What of a model dpipe cannot cut, in words. It does not leave this room."""


def understood(model: Any, config: Any) -> Architecture:
    """Raises `NotUnderstoodError`."""
    prefix = str(model.base_model_prefix)
    base = getattr(model, prefix, None)
    if not isinstance(base, nn.Module) or base is model:
        raise NotUnderstoodError("it has no decoder beside its head")
    others = {name for name, _ in model.named_children()} - {prefix}
    if others != {_HEAD}:
        raise NotUnderstoodError(f"beside {prefix} it has {_listed(others)}, in place of {_HEAD}")
    parts = _by_kind(base, model.get_input_embeddings())
    _check(parts, prefix)
    dropout = _only(parts["dropout"])
    if dropout is None:
        _check_dropout(config)
    tokens, blocks, norm = (parts[kind][0] for kind in ("tokens", "blocks", "norm"))
    rotary = _only(parts["rotary"])
    return Architecture(
        str(config.model_type),
        base=prefix,
        tokens=tokens,
        positions=_only(parts["positions"]),
        dropout=dropout,
        blocks=blocks,
        norm=norm,
        rotary=rotary,
        rotary_by_layer=rotary is not None and _takes_kind(getattr(base, rotary)),
        window=_window(config),
    )


def _by_kind(base: nn.Module, tokens: nn.Module) -> dict[str, list[str]]:
    """The names of the parts of `base`."""
    kinds = ("tokens", "positions", "dropout", "blocks", "rotary", "norm")
    parts: dict[str, list[str]] = {kind: [] for kind in kinds}
    for name, part in base.named_children():
        kind = "tokens" if part is tokens else _kind(part)
        parts[kind].append(name)
    return parts


def _kind(part: nn.Module) -> str:
    match part:
        case nn.Embedding():
            return "positions"
        case nn.Dropout():
            return "dropout"
        case nn.ModuleList():
            return "blocks"
    has_values = any(True for _ in part.parameters())
    if "Rotary" in type(part).__name__ and not has_values:
        return "rotary"
    return "norm"


def _check(parts: dict[str, list[str]], prefix: str) -> None:
    wanted = {"tokens": "embedding of its tokens", "blocks": "list of blocks", "norm": "last norm"}
    for kind, names in parts.items():
        if kind in wanted and not names:
            raise NotUnderstoodError(f"{prefix} has no {wanted[kind]} of its own")
        if len(names) > 1:
            raise NotUnderstoodError(f"one of {_listed(names)} in {prefix} has no place here")


def _check_dropout(config: Any) -> None:
    # What a forward pass drops without a module is not seen by a trial, which drops nothing.
    for name, value in config.to_dict().items():
        if _DROPS.search(name) and isinstance(value, float) and value > 0:
            raise NotUnderstoodError(f"{name} = {value} has no module that applies it")


def _window(config: Any) -> Literal["none", "by layer", "all"]:
    if getattr(config, "layer_types", None):
        return "by layer"
    return "all" if getattr(config, "sliding_window", None) else "none"


def _takes_kind(rotary: nn.Module) -> bool:
    return "layer_type" in inspect.signature(rotary.forward).parameters


def _only(names: list[str]) -> str | None:
    return names[0] if names else None


def _listed(names: set[str] | list[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
