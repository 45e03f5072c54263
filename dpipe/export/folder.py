"""A run as a folder that transformers opens (`from_pretrained`), or its adapter as one for peft.

model-00001-of-00032.safetensors       one file a layer of the pipeline, so that one layer at a
model.safetensors.index.json           time is in memory
config.json, the tokenizer             as they were published
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.hub.adapter import merge_adapter
from dpipe.hub.model import adapted_skeleton, layered_model, source_of
from dpipe.hub.skeleton import Skeleton
from dpipe.hub.source import SMALL_FILES, ModelSource
from dpipe.hub.tensors import file_names
from dpipe.hub.trained_adapter import WEIGHTS, adapter_name
from dpipe.hub.words import Words
from dpipe.stage.model import materialise
from dpipe.store import checkpoint
from dpipe.store.load import fill

_WRAPPED = ".base_layer"


def export_run(
    config: Config,
    url: str | None,
    folder: Path,
    *,
    only_adapter: bool = False,
    step: int | None = None,
) -> int:
    """Write the model of the newest checkpoint at `url`, or that of `step`, to `folder`, adapters
    merged; without a `url` the published model as it is. With `only_adapter` write what peft loads.
    Returns the checkpoint's step.

    Raises `ConfigError` for a folder that is not empty, and for an adapter that there is not;
    `CheckpointError` for a checkpoint that does not fit.
    """
    if only_adapter and config.adapter.kind == "none":
        raise ConfigError("the run has no adapter, because all parameters learned; drop --adapter")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty; name another folder")
    if url is not None:
        # The checkpoint has the whole adapter: what it began from may be gone.
        config = config.with_(adapter__start=None)
    # An adapter is added to the matrices as they were published, not to rounded ones.
    config = config.with_(adapter__base="full")
    source = source_of(config)
    for path in _small_files(source):
        source.refuse_link_out(path)
    skeleton = adapted_skeleton(config, source)
    learned = None
    if url is not None:
        learned = checkpoint.load(url, lambda name: name.startswith("layers."), step)
    folder.mkdir(parents=True, exist_ok=True)
    layers = _layers(config, skeleton.num_layers, learned)
    if only_adapter:
        _write_adapter(config, skeleton, layers, folder)
    else:
        _write_model(skeleton, layers, folder)
        _copy_small_files(config, source, folder)
    return 0 if learned is None else learned.step


def _layers(
    config: Config, count: int, learned: checkpoint.Loaded | None
) -> Iterator[tuple[int, nn.Module]]:
    model = layered_model(config)
    for index in range(count):
        layer = materialise(model, index, config.train.seed, "cpu")
        if learned is not None:
            named = ((f"layers.{index}.{name}", each) for name, each in layer.named_parameters())
            fill(named, learned)
        yield index, layer


def _write_model(skeleton: Skeleton, layers: Iterator[tuple[int, nn.Module]], folder: Path) -> None:
    weight_map: dict[str, str] = {}
    size = 0
    for index, layer in layers:
        merge_adapter(layer)
        file = f"model-{index + 1:05d}-of-{skeleton.num_layers:05d}.safetensors"
        tensors = dict(_published(skeleton, index, layer))
        # A tied head has no tensor of its own, and the norm of some has no weight.
        if tensors:
            save_file(tensors, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
        size += sum(tensor.nbytes for tensor in tensors.values())
    index_table = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index_table, indent=1))


def _published(
    skeleton: Skeleton, index: int, layer: nn.Module
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a layer under the names of a published checkpoint, in the model's dtype."""
    dtype = skeleton.config.dtype or torch.float32
    frozen = layer.named_buffers()
    parameters = dict(layer.named_parameters())
    for name, tensor in [*parameters.items(), *frozen]:
        if "lora_" in name or not (name in parameters or _is_frozen(layer, name)):
            continue
        published = skeleton.published_name(index, name).replace(_WRAPPED, "")
        if published == f"{skeleton.architecture.output}.weight" and skeleton.is_tied:
            continue
        value = tensor.detach().to(dtype)
        yield from _in_file(skeleton, published, value)


def _is_frozen(layer: nn.Module, name: str) -> bool:
    owner, _, key = name.rpartition(".")
    return key in getattr(layer.get_submodule(owner), "frozen", ())


def _in_file(
    skeleton: Skeleton, name: str, value: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    experts = skeleton.architecture.experts
    if experts is None or ".mlp." not in name:
        yield name, value.contiguous()
        return
    names = file_names(experts, name, skeleton)
    parts = [value] if len(names) == 1 else list(value)
    if name.endswith("gate_up_proj"):
        parts = [half for matrix in parts for half in matrix.chunk(2)]
    for each, part in zip(names, parts, strict=True):
        yield each, part.clone().contiguous()


def _write_adapter(
    config: Config, skeleton: Skeleton, layers: Iterator[tuple[int, nn.Module]], folder: Path
) -> None:
    tensors: dict[str, torch.Tensor] = {}
    for index, layer in layers:
        for name, parameter in layer.named_parameters():
            published = adapter_name(skeleton.published_name(index, name))
            tensors[published] = parameter.detach().contiguous()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    described = skeleton.adapter
    described.base_model_name_or_path = config.model.hf
    described.revision = config.model.revision
    described.inference_mode = True
    described.save_pretrained(folder)


def _copy_small_files(config: Config, source: ModelSource, folder: Path) -> None:
    """As they are, but a GGUF file's: transformers reads them out of it."""
    if source.gguf is not None:
        source.config().save_pretrained(folder)
        Words(config).save(folder)
        return
    for path in _small_files(source):
        shutil.copyfile(path, folder / path.name)


def _small_files(source: ModelSource) -> Iterator[Path]:
    for pattern in SMALL_FILES:
        for path in sorted(source.folder.glob(pattern)):
            if path.is_file() and not path.name.endswith(".index.json"):
                yield path
