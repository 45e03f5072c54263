"""Resuming from a checkpoint: which one every rank has whole, and copying its values in."""

import logging
from collections.abc import Iterable, Mapping

import torch

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.engine.update import Update
from dpipe.errors import CheckpointError
from dpipe.plan.run_plan import RunPlan
from dpipe.ranks import ParallelRanks
from dpipe.schedule.schedule import Schedule
from dpipe.stage.base import PipelineStage
from dpipe.store import checkpoint
from dpipe.store.run_folder import checkpoint_url
from dpipe.store.tensor_shards import take_parts

LOG = logging.getLogger("dpipe")


def stages_at(schedule: Schedule, pp_rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == pp_rank]


def find_start(
    config: Config,
    run_plan: RunPlan,
    rank: int,
    *,
    step: int | None = None,
    fallback: bool = False,
) -> checkpoint.Loaded:
    """What `rank` needs of the newest checkpoint, or of that of `step`.

    Raises `CheckpointError` naming a file that is damaged; with `fallback` it takes the checkpoint
    before instead.
    """
    stages = stages_at(run_plan.forecast.schedule, config.ranks_of(rank).pp_rank)
    layers = {layer for stage in stages for layer in run_plan.layers_of(stage)}

    def is_wanted(name: str) -> bool:
        _, layer, *_ = name.split(".")
        return int(layer) in layers

    return checkpoint.load(checkpoint_url(config), is_wanted, step, fallback)


def agreed_start(
    config: Config,
    run_plan: RunPlan,
    start: checkpoint.Loaded | None,
    coordinator: Coordination,
    fallback: bool,
) -> checkpoint.Loaded:
    """The newest checkpoint that every rank has whole: the oldest of those that the ranks have
    loaded as their `start`. All ranks call it.

    It is loaded again if it is another, and if a measured split may have given this rank other
    layers. Raises `CheckpointError` if the ranks' differ, unless `fallback` allows it.
    """
    assert start is not None
    steps = coordinator.share("checkpoint found", start.step, config.timeouts.transfer)
    if len(set(steps)) > 1 and not fallback:
        raise CheckpointError(
            f"the ranks' newest checkpoints are of different steps, by rank {steps}; collect the "
            f"files in one place, or --fallback to step {min(steps)}"
        )
    if start.step == min(steps) and config.pipeline.split != "measured":
        return start
    return find_start(config, run_plan, coordinator.rank, step=min(steps))


def restore(
    start: checkpoint.Loaded | None,
    stages: Mapping[int, PipelineStage],
    update: Update,
    here: ParallelRanks,
) -> None:
    """Copy the values of `start`, if there is one, into stages and optimizer."""
    if start is None:
        return
    for tensors in (start.tensors, start.optimizer):
        take_parts(tensors, stages, here)
    for stage in stages.values():
        fill(stage.named_parameters(), start)
        fill_buffers(stage.named_buffers(), start)
    update.restore(start.state, start.optimizer)


@torch.no_grad()
def fill(named: Iterable[tuple[str, torch.Tensor]], loaded: checkpoint.Loaded) -> None:
    """Copy the checkpoint's values into the tensors. Raises `CheckpointError` if shapes differ."""
    for name, tensor in named:
        saved = loaded.tensors[name]
        if saved.shape != tensor.shape:
            raise CheckpointError(
                f"{name} is {list(saved.shape)} in the checkpoint and {list(tensor.shape)} here; "
                "check [model]"
            )
        tensor.copy_(saved)


def fill_buffers(named: Iterable[tuple[str, torch.Tensor]], loaded: checkpoint.Loaded) -> None:
    """As `fill`, but a buffer that the checkpoint lacks stays as its layer made it, and the log
    says so: the layer makes it later, or the checkpoint is older than the saving of buffers.
    """
    buffers = dict(named)
    absent = sorted(buffers.keys() - loaded.tensors.keys())
    if absent:
        LOG.warning(
            "the checkpoint holds no %s: they are as the layers make them", ", ".join(absent)
        )
    saved = ((name, buffer) for name, buffer in buffers.items() if name in loaded.tensors)
    fill(saved, loaded)
