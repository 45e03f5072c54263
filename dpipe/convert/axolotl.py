"""axolotl's configuration as one of dpipe's, with a report of what has no counterpart here.

axolotl's key ──_KEYS──> section.key        the same value, or what `change` makes of it
what axolotl leaves out ──_DEFAULTS──>      its own defaults, where dpipe's are others
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    "paged_adamw_32bit": "adamw",
    "adamw_8bit": "adamw_8bit",
    "adamw_torch_8bit": "adamw_8bit",
    "adamw_bnb_8bit": "adamw_8bit",
    "paged_adamw_8bit": "adamw_8bit",
    "ao_adamw_8bit": "adamw_8bit",
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
_FORMATS = {
    "chat_template": "chat",
    "sharegpt": "chat",
    "alpaca": "instruction",
    "completion": "completion",
    "pretrain": "completion",
}
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


# What a table of `datasets` may have without a word, and with which values: None is any.
_OF_DATA: dict[str, Sequence[Any] | None] = {
    "path": None,
    "type": None,
    "data_files": None,
    "split": None,
    "ds_type": ("json", "csv", "parquet", "arrow"),
    "field": ("text",),
    "text_column": ("text",),
    "field_messages": ("messages", "conversations"),
    "message_property_mappings": (
        {"role": "role", "content": "content"},
        {"role": "from", "content": "value"},
    ),
    "roles_to_train": (["assistant"], ["gpt"]),
    "train_on_eos": ("turn",),
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
    "lora_target_parameters": Counterpart("adapter.target_parameters"),
    "lora_model_dir": Counterpart("adapter.start"),
    "peft_layers_to_transform": Counterpart("adapter.layers"),
    "peft_use_dora": Counterpart("adapter.dora"),
    "peft_use_rslora": Counterpart("adapter.rslora"),
    "sample_packing": Counterpart("data.packing"),
    "excess_length_strategy": Counterpart("data.too_long", _TOO_LONG.get),
    "streaming": Counterpart("data.streaming"),
    "dataset_prepared_path": Counterpart("data.cache"),
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
    "fp16": Counterpart("train.precision", {True: "fp16"}.get),
    "torch_compile": Counterpart("train.compile", {True: True, "auto": True}.get),
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
    "logging_steps": Counterpart("run.log_every"),
    "use_wandb": Counterpart("run.trackers", {True: ["wandb"]}.get),
    # Its name is read in WANDB_PROJECT.
    "wandb_project": Counterpart("run.trackers", lambda name: ["wandb"] if name else None),
    "save_total_limit": Counterpart("run.keep"),
    "load_best_model_at_end": Counterpart("run.keep_best"),
    "output_dir": Counterpart("run.folder"),
}
_ORDER = ("model", "adapter", "data", "train", "pipeline", "run")
# What comes to several keys, or is part of one.
_TOGETHER = (
    "datasets",
    "pretraining_dataset",
    "test_datasets",
    "micro_batch_size",
    "adam_beta1",
    "adam_beta2",
    "cosine_min_lr_ratio",
    "shuffle_merged_datasets",
    "streaming_multipack_buffer_size",
)
# What is so here in any case.
_ALWAYS = {
    "train_on_inputs": False,
    "strict": False,
    "load_in_8bit": False,
    "load_in_4bit": False,
    "fp16": False,
    "streaming": False,
    "use_wandb": False,
    "torch_compile": False,
    "group_by_length": False,
    "chat_template": "tokenizer_default",
}
# How something is computed, which changes no loss but by rounding.
_OURS_TO_CHOOSE = (
    "flash_attention",
    "sdp_attention",
    "xformers_attention",
    "attn_implementation",
    "pad_to_sequence_len",
    "eval_sample_packing",
    "gradient_checkpointing_kwargs",
    "tf32",
    "model_type",
    "tokenizer_type",
    "dataset_num_proc",
)


def converted(theirs: Mapping[str, Any]) -> tuple[str, list[str]]:
    """A TOML file, and a line for each key that has no counterpart. Raises `ConfigError` where the
    rest does not make a configuration.
    """
    table: Table = {}
    for name, value in _DEFAULTS.items():
        _set(table, name, value)
    left_out = []
    for name, value in theirs.items():
        if value is None or name in _TOGETHER or _ALWAYS.get(name, ()) == value:
            continue
        made = _converted(name, value)
        if made is not None:
            _set(table, _KEYS[name].key, made)
        elif name in _OURS_TO_CHOOSE:
            left_out.append(f"{name} = {value!r:.80} is left out: dpipe chooses itself")
        else:
            left_out.append(f"{name} = {value!r:.80} has no counterpart")
    if theirs.get("lora_target_linear"):  # all of them, whatever is named besides
        _set(table, "adapter.target_modules", "all-linear")
    if theirs.get("wandb_project"):
        left_out.append(f"wandb_project is named in WANDB_PROJECT={theirs['wandb_project']!s:.80}")
    _batches(table, theirs)
    _shuffle(table, theirs)
    left_out += _data(table, theirs)
    left_out += _held_out(table, theirs)
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
    return _changed(name, value, _KEYS[name].change)


def _changed(name: str, value: Any, change: Callable[[Any], Any]) -> Any:
    try:
        return change(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} {value!r:.80} is not a value that axolotl takes there") from None


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
    share = theirs.get("cosine_min_lr_ratio")
    if share:
        highest = table["train"].get("learning_rate", 0.0)
        lowest = _changed("cosine_min_lr_ratio", share, float) * highest
        _set(table, "train.min_learning_rate", lowest)


def _shuffle(table: Table, theirs: Mapping[str, Any]) -> None:
    size = theirs.get("streaming_multipack_buffer_size")
    if theirs.get("shuffle_merged_datasets") is False:
        _set(table, "data.shuffle", "none")
    elif theirs.get("streaming") and size:
        _set(table, "data.shuffle", size)


def _data(table: Table, theirs: Mapping[str, Any]) -> list[str]:
    """Files, or one split of the hub; returns what has no counterpart."""
    left_out: list[str] = []
    files: list[str] = []
    to_read = _pretraining(table, theirs) + _sources(theirs, "datasets")
    for each in to_read:
        path = str(each.get("path"))
        left_out += _left_out_of(each, "datasets")
        kind = str(each.get("type", "")).partition(".")[0]
        if kind in _FORMATS:
            _set(table, "data.format", _FORMATS[kind])
        else:
            left_out.append(f"datasets: type {kind!r:.80} of {path} has no counterpart")
        if _FORMATS.get(kind) == "completion" and not theirs.get("excess_length_strategy"):
            _set(table, "data.too_long", "split")  # as it does with texts, and with no other rows
        split, _, part = str(each.get("split") or "train").partition("[")
        if _files(each):
            files += _files(each)
        elif files or "hub" in table["data"]:
            left_out.append(f"datasets: {path} is the second source: put its rows into one file")
        else:
            _set(table, "data.hub", f"{path}:{split}")
            if part:
                left_out.append(f"datasets: of {path} all of {split} is read, not [{part}")
    if files:
        _set(table, "data.files", files)
    return left_out


def _pretraining(table: Table, theirs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The texts that are read as a stream; they say their type by where they stand."""
    named = theirs.get("pretraining_dataset")
    if isinstance(named, str):
        named = [{"path": named}]
    found = _sources({"pretraining_dataset": named}, "pretraining_dataset")
    if found:
        _set(table, "data.streaming", True)
    return [{"type": "pretrain", **each} for each in found]


def _held_out(table: Table, theirs: Mapping[str, Any]) -> list[str]:
    """Files of their own; returns what has no counterpart."""
    left_out: list[str] = []
    files: list[str] = []
    for each in _sources(theirs, "test_datasets"):
        left_out += _left_out_of(each, "test_datasets")
        found = _files(each)
        files += found
        if not found:
            left_out.append(
                f"test_datasets: {each.get('path')} is not a file: download it, and name it"
            )
    if files:
        _set(table, "data.held_out", files)
    for key in ("eval_every", "patience"):
        # axolotl evaluates nothing then.
        if not table["data"]["held_out"] and table["train"].pop(key, None):
            left_out.append(f"train.{key} is left out, because nothing is held out")
    return left_out


def _sources(theirs: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    sources = theirs.get(key) or []
    if not (isinstance(sources, list) and all(isinstance(each, dict) for each in sources)):
        raise ConfigError(f"{key} {sources!r:.80} must be a list of tables, each with a path")
    return sources


def _files(source: Mapping[str, Any]) -> list[str]:
    """Of a table of `datasets`, unless it is one of the hub."""
    path = str(source.get("path"))
    named = source.get("data_files")
    if named:
        return [named] if isinstance(named, str) else list(named)
    on_hub = "." not in path.rpartition("/")[2] and path.count("/") == 1
    return [] if on_hub else [path]


def _left_out_of(source: Mapping[str, Any], key: str) -> Iterator[str]:
    for name, value in source.items():
        allowed = _OF_DATA.get(name, ())
        if value is not None and allowed is not None and value not in allowed:
            path = source.get("path")
            yield f"{key}: {name} = {value!r:.80} of {path} has no counterpart"


def _text(table: Table) -> str:
    lines = []
    for section in _ORDER:
        keys = table.get(section, {})
        if not keys:
            continue
        lines.append(f"[{section}]")
        lines += [f"{key} = {to_toml(value)}" for key, value in keys.items()]
        lines.append("")
    return "\n".join(lines)
