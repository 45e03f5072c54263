"""Weights of a published model by name, read when a layer asks for them.

safetensors   only the bytes of the tensors that are asked for; a shard of the hub is fetched when
              the first of its tensors is
GGUF          the same, with quantised blocks made into fp32
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from dpipe.errors import CheckpointError
from dpipe.hub.architectures import Experts
from dpipe.hub.gguf_header import check_gguf
from dpipe.hub.index import read_index
from dpipe.hub.skeleton import Skeleton, skeleton_of
from dpipe.hub.source import ModelSource
from dpipe.quantised.layers import quantised

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# peft wraps the matrix that it adapts.
_WRAPPED = ".base_layer"


class Weights(Protocol):
    def __contains__(self, name: str) -> bool: ...

    def read(self, name: str) -> torch.Tensor:
        """A copy of its own. Raises `CheckpointError` for a file that is missing or damaged."""
        ...


def open_weights(source: ModelSource, skeleton: Skeleton) -> Weights:
    """Raises `CheckpointError` if there are no weights that can be read."""
    if source.gguf is not None:
        return GgufWeights(source.folder / source.gguf, skeleton)
    return SafetensorsWeights(source)


class SafetensorsWeights:
    """One file, or shards with an index."""

    def __init__(self, source: ModelSource) -> None:
        self._source = source
        index = source.folder / _INDEX
        source.refuse_link_out(index)
        if index.is_file():
            self._file_of = read_index(index.read_bytes(), str(index))
            return
        with self._open(_SINGLE) as file:
            self._file_of = dict.fromkeys(file.keys(), _SINGLE)

    @property
    def names(self) -> list[str]:
        return list(self._file_of)

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str) -> torch.Tensor:
        try:
            with self._open(self._file_of[name]) as file:
                tensor: torch.Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{self._file_of[name]} has no whole {name}: {error}") from None
        return tensor

    def _open(self, name: str) -> Any:
        path = self._source.weights_file(name)
        if path is None:
            raise CheckpointError(
                f"model.hf {self._source.folder} lacks {name}: copy it there, or, for weights in "
                "another format, save them with save_pretrained"
            )
        try:
            return safe_open(path, "pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"{path} is cut short or damaged ({error}): copy or download it again"
            ) from None


class GgufWeights:
    """A GGUF file, by the names of transformers."""

    def __init__(self, path: Path, skeleton: Skeleton) -> None:
        from gguf import GGUFReader
        from transformers import modeling_gguf_pytorch_utils as gguf_utils

        if skeleton.architecture.experts is not None:
            raise CheckpointError(
                f"{path}: experts in GGUF files are not read; give the safetensors of this model"
            )
        check_gguf(path)
        try:
            reader = GGUFReader(path)
        except Exception as error:  # its reader checks nothing: an IndexError, a KeyError
            raise CheckpointError(
                f"{path} is not a complete GGUF file ({type(error).__name__}: {error}): copy or "
                "download it again"
            ) from None
        kind = skeleton.config.model_type
        processor = gguf_utils.TENSOR_PROCESSORS.get(kind, gguf_utils.TensorProcessor)
        self._processor = processor(config=skeleton.config.to_dict())
        # Of a model without an adapter, which renames what it wraps.
        plain = skeleton_of(skeleton.config).model
        names = gguf_utils.get_gguf_hf_weights_map(plain, self._processor)
        self._names = {hub: file for file, hub in names.items()}
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def __contains__(self, name: str) -> bool:
        return self._names.get(name) in self._tensors

    def read(self, name: str) -> torch.Tensor:
        from gguf import dequantize

        file_name = self._names[name]
        tensor = self._tensors[file_name]
        try:
            values = dequantize(tensor.data, tensor.tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(
                f"{file_name} of the GGUF file cannot be read ({error}): give a file of another "
                "quantisation, such as Q8_0 or F16, or the safetensors of this model"
            ) from None
        # llama.cpp keeps some matrices in another order of rows.
        result = self._processor.process(
            weights=values, name=file_name, tensor_key_mapping={}, parsed_parameters={}
        )
        return torch.from_numpy(np.array(result.weights))


def fill_from(
    weights: Weights, skeleton: Skeleton, index: int, layer: nn.Module, dtype: torch.dtype
) -> None:
    """Give each parameter and buffer of `layer` that has no memory its published value, in `dtype`;
    an adapter's, which no published model has, are left.

    Raises `CheckpointError` for a tensor that is missing or has another shape.
    """
    for name, matrix in quantised(layer):
        matrix.take(_published(weights, skeleton, index, name, matrix.shape))
    empty = [*layer.named_parameters(), *layer.named_buffers()]
    for name, tensor in empty:
        if not tensor.is_meta or "lora_" in name:
            continue
        value = _published(weights, skeleton, index, name, tensor.shape)
        _put(layer, name, value.to(dtype).contiguous())


def _published(
    weights: Weights, skeleton: Skeleton, index: int, name: str, shape: Sequence[int]
) -> torch.Tensor:
    """Of parameter `name` of a layer. Raises `CheckpointError` as `fill_from`."""
    published = skeleton.published_name(index, name).replace(_WRAPPED, "")
    value = _value(weights, skeleton, published)
    if value.shape != shape:
        raise CheckpointError(
            f"{published} is {list(value.shape)} in the weights of model.hf, and its "
            f"config.json makes it {list(shape)}: they are of different models"
        )
    return value


def _put(layer: nn.Module, name: str, value: torch.Tensor) -> None:
    """In place of the parameter or buffer `name`, which has no memory."""
    owner_name, _, key = name.rpartition(".")
    owner = layer.get_submodule(owner_name)
    if key in owner._parameters:
        owner._parameters[key] = nn.Parameter(value)
    else:
        owner._buffers[key] = value


def _value(weights: Weights, skeleton: Skeleton, name: str) -> torch.Tensor:
    parts = skeleton.architecture
    experts = parts.experts
    if experts is not None and ".mlp." in name:
        matrices = [_read(weights, skeleton, each) for each in file_names(experts, name, skeleton)]
        if len(matrices) == 1:
            return matrices[0]
        # [experts, rows, columns]; of the gate above, of the up projection below
        if name.endswith("gate_up_proj"):
            pairs = zip(matrices[::2], matrices[1::2], strict=True)
            matrices = [torch.cat(pair) for pair in pairs]
        return torch.stack(matrices)
    return _read(weights, skeleton, name)


def file_names(experts: Experts, name: str, skeleton: Skeleton) -> Sequence[str]:
    """What a checkpoint calls the parts of `name`, expert after expert."""
    before, _, part = name.partition(".mlp.")
    folder = f"{before}.{experts.folder}"
    if not part.startswith("experts."):
        return [f"{folder}.{part}"]
    kinds = [experts.down]
    if part == "experts.gate_up_proj":
        kinds = [experts.gate, experts.up]
    return list(_expert_names(folder, kinds, skeleton))


def _expert_names(folder: str, kinds: Sequence[str], skeleton: Skeleton) -> Iterator[str]:
    for expert in range(num_experts(skeleton)):
        for kind in kinds:
            yield f"{folder}.experts.{expert}.{kind}.weight"


def num_experts(skeleton: Skeleton) -> int:
    config = skeleton.config
    return int(getattr(config, "num_experts", None) or config.num_local_experts)


def _read(weights: Weights, skeleton: Skeleton, name: str) -> torch.Tensor:
    for candidate in _names_in_files(skeleton, name):
        if candidate in weights:
            return weights.read(candidate)
    raise CheckpointError(
        f"the weights of model.hf hold no {name}: a file is missing, or they are of another model"
    )


def _names_in_files(skeleton: Skeleton, name: str) -> Iterator[str]:
    """What a checkpoint may call the parameter that transformers calls `name`."""
    parts = skeleton.architecture
    base = f"{parts.base}."
    if name == f"{parts.output}.weight" and skeleton.is_tied:
        name = f"{base}{parts.tokens}.weight"
    names = [name]
    if name == parts.output_bias:
        names.append(f"{parts.output}.bias")
    if parts.is_encoder:
        # BERT's first files, which came from TensorFlow.
        old = name.replace("LayerNorm.weight", "LayerNorm.gamma")
        names.append(old.replace("LayerNorm.bias", "LayerNorm.beta"))
    for each in names:
        yield each
        # Some were saved without the head, and so without the name of what is below it.
        yield each.removeprefix(base)
