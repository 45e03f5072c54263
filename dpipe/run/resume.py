"""Resuming from a checkpoint: which one every rank has whole, and copying its values in."""

from collections.abc import Mapping

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import CHECKPOINT_FOUND
from dpipe.engine.update import Update
from dpipe.errors import CheckpointError
from dpipe.plan.run_plan import RunPlan
from dpipe.ranks import ParallelRanks
from dpipe.schedule.schedule import Schedule
from dpipe.stage.base import PipelineStage
from dpipe.store import checkpoint
from dpipe.store.load import fill, fill_buffers
from dpipe.store.run_folder import checkpoint_url
from dpipe.store.tensor_shards import take_parts


def stages_at(schedule: Schedule, pp_rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == pp_rank]


def find_start(
    config: Config, run_plan: RunPlan, rank: int, *, step: int | None = None, fallback: bool = False
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
    timeout_s = config.timeouts.transfer
    steps = coordinator.share("checkpoint found", start.step, timeout_s, CHECKPOINT_FOUND)
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
