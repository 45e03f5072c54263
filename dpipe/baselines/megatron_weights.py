"""Our parameters under Megatron's names, and the part of each that a tensor parallel rank has.

    ours   [q of all heads | k of all heads | v of all heads]        rows of attention.qkv
    theirs [q k v of head 0 | q k v of head 1 | ...]  rows of linear_qkv, cut in equal runs of heads

All else is stored alike: a matrix cut by columns of its output is cut along dimension 0, by rows
along dimension 1.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Source:
    """Where a parameter of theirs comes from: `name` in a layer of ours, cut along `dim` (None:
    whole on each rank).
    """

    name: str
    dim: int | None = None
    by_head: bool = False


Sources = Mapping[str, Source]  # by the name of theirs
# By the name of theirs, each parameter beside where it comes from.
Theirs = dict[str, tuple[nn.Parameter, Source]]


def _both(
    name: str,
    dim: int | None = None,
    *,
    by_head: bool = False,
) -> dict[str, Source]:
    weight = Source(f"{name}.weight", dim, by_head)
    bias = Source(f"{name}.bias", dim, by_head)
    return {"weight": weight, "bias": bias}


def _named(theirs: str, sources: Sources) -> dict[str, Source]:
    named = {}
    for kind, source in sources.items():
        named[f"{theirs}.{kind}"] = source
    return named


def _wrapped(sources: Sources) -> dict[str, Source]:
    """Our BERT's block wraps the GPT's."""
    wrapped = {}
    for name, source in sources.items():
        inner = f"block.{source.name}"
        wrapped[name] = replace(source, name=inner)
    return wrapped


@dataclass(frozen=True)
class Names:
    """Of a model: the module that has its blocks, and under what names the parameters of each layer
    come from ours.
    """

    blocks: str
    embedding: Sources
    block: Sources
    head: Sources


_EMBEDDING = {
    "embedding.word_embeddings.weight": Source("tokens.weight", 0),
    "embedding.position_embeddings.weight": Source("positions.weight"),
}
_BLOCK = {
    **_named("input_layernorm", _both("attention_norm")),
    **_named("self_attention.linear_qkv", _both("attention.qkv", 0, by_head=True)),
    "self_attention.linear_proj.weight": Source("attention.output.weight", 1),
    "self_attention.linear_proj.bias": Source("attention.output.bias"),
    **_named("pre_mlp_layernorm", _both("mlp_norm")),
    **_named("mlp.linear_fc1", _both("mlp_in", 0)),
    "mlp.linear_fc2.weight": Source("mlp_out.weight", 1),
    "mlp.linear_fc2.bias": Source("mlp_out.bias"),
}
GPT = Names(
    "decoder",
    _EMBEDDING,
    _BLOCK,
    {
        **_named("decoder.final_layernorm", _both("norm")),
        "output_layer.weight": Source("output.weight", 0),
    },
)
BERT = Names(
    "encoder",
    {**_EMBEDDING, "embedding.tokentype_embeddings.weight": Source("types.weight")},
    _wrapped(_BLOCK),
    {
        **_named("encoder.final_layernorm", _both("norm")),
        **_named("lm_head.dense", _both("transform")),
        **_named("lm_head.layer_norm", _both("transform_norm")),
        **_named("output_layer", _both("output", 0)),
        **_named("pooler.dense", _both("pooler")),
        **_named("binary_head", _both("pair")),
    },
)


def parameters_by_layer(
    model: Any,
    names: Names,
    num_layers: int,
) -> Iterator[tuple[int, Theirs]]:
    """The parameters of a Megatron model by our layer; theirs count blocks from 1, as ours are
    behind an embedding.

    Raises `KeyError` for a parameter that is not known here.
    """
    blocks = getattr(model, names.blocks).layers
    ends = dict(_outside(model, blocks))
    head = num_layers + 1
    for index, sources in ((0, names.embedding), (head, names.head)):
        # A chunk in the middle has neither end; tied embeddings leave a head without its own.
        mine = {}
        for name, source in sources.items():
            if name in ends:
                mine[name] = (ends.pop(name), source)
        if mine:
            yield index, mine
    if ends:
        raise KeyError(f"Megatron's {', '.join(ends)} have no counterpart in dpipe's model")
    for block in blocks:
        theirs = {}
        for name, parameter in block.named_parameters():
            theirs[name] = (parameter, names.block[name])
        yield block.layer_number, theirs


def _outside(model: Any, blocks: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of the model that are in none of its blocks."""
    inside = set()
    for block in blocks:
        # By identity: a parameter's name within a block is not its name within the model.
        inside |= set(map(id, block.parameters()))
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            yield name, parameter


@torch.no_grad()
def load(
    theirs: Theirs,
    layer: nn.Module,
    num_heads: int,
    rank: int,
    size: int,
) -> None:
    """Copy a layer of ours into the parameters that tensor parallel rank `rank` of `size` has of
    it.
    """
    ours = dict(layer.named_parameters())
    for parameter, source in theirs.values():
        whole = ours[source.name]
        own = part(whole, source, num_heads, rank, size)
        parameter.copy_(own)


def part(
    whole: torch.Tensor,
    source: Source,
    num_heads: int,
    rank: int,
    size: int,
) -> torch.Tensor:
    """What of a parameter of ours is on tensor parallel rank `rank` of `size`."""
    if source.by_head:
        q_k_v = whole.unflatten(0, (3, num_heads, -1))
        by_head = q_k_v.transpose(0, 1)
        whole = by_head.flatten(0, 2)
    if source.dim is None:
        return whole
    parts = whole.chunk(size, source.dim)
    return parts[rank]
