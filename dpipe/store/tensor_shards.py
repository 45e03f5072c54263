"""Checkpoints of a tensor-parallel group: parameters whole, named as in any run; moments in parts.

    parameter  rank 0 [a b]  rank 1 [c d]   gathered; each rank writes some of them, whole
    moments    rank 0 [a b]  rank 1 [c d]   each rank writes its own, as NAME[0:2] and NAME[2:4] of
                                            the row [a b c d]; the index says how a row is put in
                                            the order of the whole tensor

What is read is whole in either case, and each rank takes its part of it.
"""

from collections.abc import Mapping

import torch

from dpipe.ranks import ParallelRanks
from dpipe.stage.base import PipelineStage
from dpipe.stage.tensor_parallel import Shard
from dpipe.store.checkpoint import Tensors, parse_slice

Stages = Mapping[int, PipelineStage]


def whole_parameters(stages: Stages, here: ParallelRanks) -> dict[str, torch.Tensor]:
    """This rank's share of the parameters, each whole. A collective call of the tensor-parallel
    group.
    """
    parameters: dict[str, torch.Tensor] = {}
    for stage in stages.values():
        split = stage.split
        for number, (name, parameter) in enumerate(stage.named_parameters()):
            whole = parameter.detach()
            if split is not None:
                whole = split.whole(name, whole)
            # In turns, so that the ranks of a group write as much each.
            if number % here.tp_size == here.tp_rank:
                parameters[name] = whole
    return parameters


def first_buffers(stages: Stages, here: ParallelRanks) -> dict[str, torch.Tensor]:
    """Copies of the buffers that a checkpoint has, on the one rank that writes them; empty on the
    others. Copies, because layers may share a buffer.
    """
    if here.dp_rank or here.tp_rank:
        return {}
    copies = {}
    for stage in stages.values():
        for name, buffer in stage.named_buffers():
            copies[name] = buffer.detach().clone()
    return copies


def as_slices(
    stages: Stages, moments: Mapping[str, torch.Tensor], here: ParallelRanks
) -> tuple[dict[str, torch.Tensor], dict[str, Shard]]:
    """`moments` named by their range in the row of all ranks, and by name how a row is ordered.

    Moments of what every rank has whole are rank 0's alone.
    """
    slices = dict[str, torch.Tensor]()
    layouts = dict[str, Shard]()
    shards = _shards(stages)
    for name, moment in moments.items():
        shard = _shard_of(name, shards)
        if shard is None:
            if here.tp_rank == 0:
                slices[name] = moment
            continue
        # A sharded optimizer has only a range of it.
        plain, start, stop = parse_slice(name) or (name, 0, shard.num_values)
        first = here.tp_rank * shard.num_values  # behind the parts of the ranks before
        slices[f"{plain}[{first + start}:{first + stop}]"] = moment
        layouts[plain] = shard
    return slices, layouts


def take_parts(tensors: Tensors, stages: Stages, here: ParallelRanks) -> None:
    """Replace whole tensors by this rank's parts, in place."""
    shards = _shards(stages)
    for name, tensor in tensors.items():
        shard = _shard_of(name, shards)
        if shard is None:
            continue
        if tensor.numel() == shard.num_values * shard.size:
            tensors[name] = shard.take(tensor, here.tp_rank)


def _shards(stages: Stages) -> dict[str, Shard]:
    """How parameters are cut, by name."""
    shards: dict[str, Shard] = {}
    for stage in stages.values():
        if stage.split is not None:
            shards.update(stage.split.shards)
    return shards


def _shard_of(name: str, shards: Mapping[str, Shard]) -> Shard | None:
    """How the parameter called `name` is cut, or the one whose moment it is: NAME.exp_avg."""
    while name:
        if name in shards:
            return shards[name]
        name = name.rpartition(".")[0]
    return None
