"""Resuming from a checkpoint: which one every rank has whole, and copying its values in."""

from collections.abc import Mapping
from pathlib import Path

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.engine.update import Update
from dpipe.errors import CheckpointError
from dpipe.plan.run_plan import RunPlan
from dpipe.ranks import ParallelRanks
from dpipe.schedule.schedule import Schedule
from dpipe.stage.base import PipelineStage
from dpipe.store import checkpoint
from dpipe.store.identity import RunIdentity, from_table, identity_of, of_another
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
    identity: RunIdentity,
) -> checkpoint.Loaded:
    """The newest checkpoint that every rank has whole: the oldest of those that the ranks have
    loaded as their `start`. All ranks call it.

    It is loaded again if it is another, and if a measured split may have given this rank other
    layers. Raises `CheckpointError` if the ranks' differ, unless `fallback` allows it, and if this
    rank's is not of the run `identity`.
    """
    assert start is not None
    _check_writer(config, start, identity)
    steps = coordinator.share("checkpoint found", start.step, config.timeouts.transfer)
    if len(set(steps)) > 1 and not fallback:
        raise CheckpointError(
            f"the ranks' newest checkpoints are of different steps, by rank {steps}; collect the "
            f"files in one place, or --fallback to step {min(steps)}"
        )
    if start.step == min(steps) and config.pipeline.split != "measured":
        return start
    start = find_start(config, run_plan, coordinator.rank, step=min(steps))
    _check_writer(config, start, identity)
    return start


def _check_writer(config: Config, start: checkpoint.Loaded, identity: RunIdentity) -> None:
    """Rank 0 has decided before it joined whether checkpoints without an id are this run's."""
    if start.run is not None and start.run.id != identity.id:
        raise of_another(checkpoint_url(config), start.run, identity)


def agreed_identity(config: Config, coordinator: Coordination) -> RunIdentity:
    """The run, as the folder of rank 0 says. All ranks call it."""
    identity = None
    if coordinator.rank == 0:
        identity = identity_of(Path(config.run.folder))
        assert identity is not None, "rank 0 has opened the folder"
    table = None if identity is None else identity.as_table()
    tables = coordinator.share("run", table, config.timeouts.transfer)
    return from_table(tables[0], "what rank 0 sent")


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
