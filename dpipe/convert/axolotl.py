"""axolotl's configuration as one of dpipe's, with a report of what has no counterpart here.

axolotl's key ──_KEYS──> section.key        the same value, or what `change` makes of it
what axolotl leaves out ──_DEFAULTS──>      its own defaults, where dpipe's are others
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dpipe.config.load import build
from dpipe.errors import ConfigError
from dpipe.toml import to_toml

Table = dict[str, dict[str, Any]]
_OPTIMIZERS = {
    # One rule under three names: how it is computed is ours to choose.
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw",
    "adamw_hf": "adamw",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "adafactor": "adafactor",
    "lion_pytorch": "lion",
    "muon": "muon",
    "sgd": "sgd",
}
_DECAYS = {
    "cosine": "cosine",
    "linear": "linear",
    "constant": "none",
    "constant_with_warmup": "none",
}
_FORMATS = {"chat_template": "chat", "sharegpt": "chat", "alpaca": "instruction"}
# "drop" is left out: no sample is lost here without a word.
_TOO_LONG = {"truncate": "truncate", "raise": "refuse"}
# Where dpipe's are others.
_DEFAULTS = {
    "train.weight_decay": 0.0,
    "train.betas": [0.9, 0.999],
    "data.held_out": 0.0,
    "data.packing": False,
    "data.too_long": "truncate",
    "train.epochs": 1.0,
}


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Counterpart:
    """dpipe's key of one of axolotl's; `change` returns None for a value that there is not here."""

    key: str
    change: Callable[[Any], Any] = _same


_KEYS = {
    "base_model": Counterpart("model.hf"),
    "revision_of_model": Counterpart("model.revision"),
    "sequence_len": Counterpart("model.context"),
    "adapter": Counterpart("adapter.kind", {"lora": "lora", "qlora": "lora"}.get),
    "load_in_8bit": Counterpart("adapter.base", {True: "int8"}.get),
    "load_in_4bit": Counterpart("adapter.base", {True: "nf4"}.get),
    "lora_r": Counterpart("adapter.r"),
    "lora_alpha": Counterpart("adapter.alpha", float),
    "lora_dropout": Counterpart("adapter.dropout", float),
    "lora_target_modules": Counterpart("adapter.target_modules"),
    "lora_target_linear": Counterpart(
        "adapter.target_modules", lambda all_of_them: "all-linear" if all_of_them else None
    ),
    "lora_model_dir": Counterpart("adapter.start"),
    "peft_layers_to_transform": Counterpart("adapter.layers"),
    "peft_use_dora": Counterpart("adapter.dora"),
    "peft_use_rslora": Counterpart("adapter.rslora"),
    "sample_packing": Counterpart("data.packing"),
    "excess_length_strategy": Counterpart("data.too_long", _TOO_LONG.get),
    # A share; above 1 it is a number of samples, which dpipe does not have.
    "val_set_size": Counterpart("data.held_out", lambda size: size if 0 <= size < 1 else None),
    # What is accumulated there is what a pipeline has in flight.
    "gradient_accumulation_steps": Counterpart("train.num_microbatches"),
    "max_steps": Counterpart("train.steps"),
    "num_epochs": Counterpart("train.epochs", float),
    "learning_rate": Counterpart("train.learning_rate", float),
    "lr_scheduler": Counterpart("train.decay", _DECAYS.get),
    "warmup_steps": Counterpart("train.warmup_steps"),
    "warmup_ratio": Counterpart("train.warmup_ratio", float),
    "optimizer": Counterpart("train.optimizer", _OPTIMIZERS.get),
    "weight_decay": Counterpart("train.weight_decay", float),
    "max_grad_norm": Counterpart("train.clip_norm", float),
    "seed": Counterpart("train.seed"),
    "bf16": Counterpart("train.precision", lambda wanted: "bf16" if wanted else "fp32"),
    "fp16": Counterpart("train.precision", lambda wanted: "fp16" if wanted else "fp32"),
    "gradient_checkpointing": Counterpart(
        "pipeline.recompute", lambda wanted: "full" if wanted else "none"
    ),
    "eval_steps": Counterpart(
        "train.eval_every", lambda steps: steps if isinstance(steps, int) else None
    ),
    "early_stopping_patience": Counterpart("train.patience"),
    "save_steps": Counterpart(
        "run.checkpoint_every", lambda steps: steps if isinstance(steps, int) else None
    ),
    "save_total_limit": Counterpart("run.keep"),
    "load_best_model_at_end": Counterpart("run.keep_best"),
    "output_dir": Counterpart("run.folder"),
}
# What comes to several keys, or is part of one.
_TOGETHER = ("datasets", "micro_batch_size", "adam_beta1", "adam_beta2")
# What is so here in any case.
_ALWAYS = {
    "train_on_inputs": False,
    "strict": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
}


def converted(theirs: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A TOML file, and a line for each key that has no counterpart. Raises `ConfigError` where the
    rest does not make a configuration.
    """
    table: Table = {}
    for name, value in _DEFAULTS.items():
        _set(table, name, value)
    left_out = []
    for name, value in theirs.items():
        if value is None or name in _TOGETHER or _ALWAYS.get(name) is value:
            continue
        made = _converted(name, value)
        if made is None:
            left_out.append(f"{name} = {value!r:.80} has no counterpart")
        else:
            _set(table, _KEYS[name].key, made)
    _batches(table, theirs)
    left_out += _data(table, theirs)
    if "steps" in table["train"]:
        del table["train"]["epochs"]
    if table.get("adapter", {}).get("kind") is None:
        table.pop("adapter", None)
    build(table)
    return _text(table), left_out


def _converted(name: str, value: Any) -> Any:
    """None where there is nothing like it."""
    if name not in _KEYS:
        return None
    try:
        return _KEYS[name].change(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} {value!r:.80} is not what axolotl takes there") from None


def _set(table: Table, name: str, value: Any) -> None:
    section, _, key = name.partition(".")
    table.setdefault(section, {})[key] = value


def _batches(table: Table, theirs: Mapping[str, Any]) -> None:
    """A batch here is that of all micro-batches."""
    count = theirs.get("gradient_accumulation_steps") or 1
    size = theirs.get("micro_batch_size") or 1
    if not (isinstance(count, int) and isinstance(size, int)):
        raise ConfigError(
            f"gradient_accumulation_steps {count!r:.80} and micro_batch_size {size!r:.80} must be "
            "counts"
        )
    _set(table, "train.num_microbatches", count)
    _set(table, "train.batch_size", count * size)
    betas = [theirs.get("adam_beta1") or 0.9, theirs.get("adam_beta2") or 0.999]
    _set(table, "train.betas", betas)


def _data(table: Table, theirs: Mapping[str, Any]) -> list[str]:
    """Files, or one split of the hub; returns what has no counterpart."""
    left_out = []
    files = []
    sources = theirs.get("datasets") or []
    if not (isinstance(sources, list) and all(isinstance(each, dict) for each in sources)):
        raise ConfigError(f"datasets {sources!r:.80} must be a list of tables, each with a path")
    for each in sources:
        path = str(each.get("path"))
        kind = str(each.get("type", "")).partition(".")[0]
        if kind in _FORMATS:
            _set(table, "data.format", _FORMATS[kind])
        else:
            left_out.append(f"datasets: type {kind!r} of {path} has no counterpart")
        on_hub = "." not in path.rpartition("/")[2] and path.count("/") == 1
        if each.get("data_files"):
            named = each["data_files"]
            files += [named] if isinstance(named, str) else list(named)
        elif on_hub and not files and "hub" not in table["data"]:
            _set(table, "data.hub", f"{path}:{each.get('split', 'train')}")
        elif on_hub:
            left_out.append(f"datasets: {path} is the second source: put its rows into one file")
        else:
            files.append(path)
    if files:
        _set(table, "data.files", files)
    return left_out


def _text(table: Table) -> str:
    lines = []
    for section, keys in table.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {to_toml(value)}" for key, value in keys.items()]
        lines.append("")
    return "\n".join(lines)
