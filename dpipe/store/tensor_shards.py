"""Checkpoints of stages that T ranks hold together: parameters whole, by the names of any run;
moments in parts.

    parameter  rank 0 [a b]   rank 1 [c d]   gathered, and written whole by one of them, each its share of the names
    moments    rank 0 [a b]   rank 1 [c d]   written where they are, as NAME[0:2] and NAME[2:4] of the row [a b c d];
                                             the index says how such a row is to be put in order

What is read is whole in any case, and each rank takes its part of it.
"""

import re
from collections.abc import Iterator, Mapping

import torch

from dpipe.ranks import ParallelRanks
from dpipe.stage.base import PipelineStage
from dpipe.stage.tensor_parallel import Shard
from dpipe.store.checkpoint import Tensors

Stages = Mapping[int, PipelineStage]

_RANGE = re.compile(r"(.+)\[(\d+):(\d+)\]")


def whole_parameters(stages: Stages, here: ParallelRanks) -> dict[str, torch.Tensor]:
    """This rank's share of the parameters, whole. All ranks of its replica that hold the stages
    together call it.
    """
    found: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        split = stage.split
        for place, (name, parameter) in enumerate(stage.named_parameters()):
            whole = parameter.detach() if split is None else split.whole(name, parameter.detach())
            if place % here.tp_size == here.tp_rank:
                found[name] = whole
    return found


def first_buffers(stages: Stages, here: ParallelRanks) -> dict[str, torch.Tensor]:
    """Those that a checkpoint has, on the one rank that writes them; copies, because layers may
    share one.
    """
    if here.dp_rank or here.tp_rank:
        return {}
    return {
        name: buffer.detach().clone()
        for stage in stages.values()
        for name, buffer in stage.named_buffers()
    }


def as_slices(
    stages: Stages, moments: Mapping[str, torch.Tensor], here: ParallelRanks
) -> tuple[dict[str, torch.Tensor], dict[str, Shard]]:
    """`moments` under the names of their places in rows of all ranks, and how each row lies in its
    whole.

    Of what every rank has whole the first one's are taken.
    """
    slices = dict[str, torch.Tensor]()
    layouts = dict[str, Shard]()
    shards = _shards(stages)
    for name, moment in moments.items():
        shard = _of(name, shards)
        if shard is None:
            if here.tp_rank == 0:
                slices[name] = moment
            continue
        match = _RANGE.fullmatch(name)
        plain, start, stop = (
            (match[1], int(match[2]), int(match[3])) if match else (name, 0, shard.num_values)
        )
        first = here.tp_rank * shard.num_values
        slices[f"{plain}[{first + start}:{first + stop}]"], layouts[plain] = moment, shard
    return slices, layouts


def take_parts(tensors: Tensors, stages: Stages, here: ParallelRanks) -> None:
    """Replace whole tensors by this rank's parts of them."""
    shards = _shards(stages)
    for name, tensor in tensors.items():
        if (
            shard := _of(name, shards)
        ) is not None and tensor.numel() == shard.num_values * shard.size:
            tensors[name] = shard.take(tensor, here.tp_rank)


def _shards(stages: Stages) -> dict[str, Shard]:
    splits = [stage.split for stage in stages.values() if stage.split is not None]
    return {name: shard for split in splits for name, shard in split.shards.items()}


def _of(name: str, shards: Mapping[str, Shard]) -> Shard | None:
    """How the parameter lies that `name` is, or is a moment of."""
    return next((shards[prefix] for prefix in _prefixes(name) if prefix in shards), None)


def _prefixes(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]
