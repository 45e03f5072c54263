"""Resuming from a checkpoint: which one every rank has whole, and copying its values in."""

import logging
import re
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
from dpipe.store.identity import agreed_identity, check_writer
from dpipe.store.load import check_moments, fill, fill_buffers
from dpipe.store.run_folder import checkpoint_url
from dpipe.store.tensor_shards import take_parts

LOG = logging.getLogger("dpipe")
_LAYER = re.compile(r"layers\.\d{1,9}\.", re.ASCII)


def stages_at(schedule: Schedule, pp_rank: int) -> list[int]:
    return [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == pp_rank]


def layers_at(run_plan: RunPlan, rank: int) -> list[int]:
    """Of its stages, in order."""
    here = run_plan.config.ranks_of(rank)
    layers: list[int] = []
    for stage in stages_at(run_plan.forecast.schedule, here.pp_rank):
        layers += run_plan.layers_of(stage, here.dp_rank)
    return layers


def find_start(
    config: Config, run_plan: RunPlan, rank: int, *, step: int | None = None, fallback: bool = False
) -> checkpoint.Loaded:
    """What `rank` needs of the newest checkpoint, or of that of `step`.

    Raises `CheckpointError` naming a file that is damaged; with `fallback` it takes the checkpoint
    before instead.
    """
    layers = set(layers_at(run_plan, rank))

    def is_wanted(name: str) -> bool:
        # Also what a rank keeps beside its parameters: `layers.3.qkv.weight.exp_avg`.
        return _LAYER.match(name) is not None and int(name.split(".")[1]) in layers

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
    layers. Raises `CheckpointError` if the ranks' differ, unless `fallback` allows it, and if this
    rank's is of another run than rank 0's folder.
    """
    assert start is not None
    if config.pipeline.may_remember and coordinator.rank == 0:
        LOG.warning(
            "pipeline.wire carries from step to step what no checkpoint has: the losses are not "
            "those of a run that was never stopped"
        )
    identity = agreed_identity("run to resume", config, coordinator)
    check_writer(checkpoint_url(config), start.run, identity)
    timeout_s = config.timeouts.transfer
    steps = coordinator.share("checkpoint found", start.step, timeout_s, CHECKPOINT_FOUND)
    if len(set(steps)) > 1 and not fallback:
        raise CheckpointError(
            f"the ranks' newest checkpoints are of different steps, by rank {steps}; collect the "
            f"files in one place, or --fallback to step {min(steps)}"
        )
    if start.step == min(steps) and config.pipeline.split != "measured":
        return start
    start = find_start(config, run_plan, coordinator.rank, step=min(steps))
    check_writer(checkpoint_url(config), start.run, identity)
    return start


def restore(
    start: checkpoint.Loaded | None,
    stages: Mapping[int, PipelineStage],
    update: Update,
    here: ParallelRanks,
) -> None:
    """Copy the values of `start`, if there is one, into stages and optimizer."""
    if start is None:
        return
    # First: what is compared and copied below are this rank's parts.
    for tensors in (start.tensors, start.optimizer):
        take_parts(tensors, stages, here)
    for stage in stages.values():
        fill(stage.named_parameters(), start)
        fill_buffers(stage.named_buffers(), start)
        check_moments(stage.named_parameters(), start)
    update.restore(start.state, start.optimizer)
