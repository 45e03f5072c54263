"""Going on from a checkpoint: which one every rank has whole, and putting it in place."""

from collections.abc import Mapping

from dpipe.config.load import Config
from dpipe.coordinator.base import Coordination
from dpipe.engine.update import Update
from dpipe.errors import CheckpointError
from dpipe.plan.run_plan import RunPlan
from dpipe.ranks import ParallelRanks
from dpipe.run.generate import fill, fill_buffers
from dpipe.schedule.schedule import Schedule
from dpipe.stage.replay import ReplayStage
from dpipe.stage.stage import Stage
from dpipe.store import checkpoint
from dpipe.store.run_folder import checkpoint_url
from dpipe.store.tensor_shards import take_parts


def stages_at(schedule: Schedule, place: int) -> list[int]:
    return [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == place]


def find_start(
    config: Config,
    run_plan: RunPlan,
    rank: int,
    *,
    step: int | None = None,
    fallback: bool = False,
) -> checkpoint.Loaded:
    """What `rank` needs of the newest checkpoint. Raises `CheckpointError` naming a file that is
    damaged.
    """
    own = stages_at(run_plan.forecast.schedule, config.ranks_of(rank).pp_rank)
    layers = {layer for stage in own for layer in run_plan.layers_of(stage)}
    url = checkpoint_url(config)
    return checkpoint.load(url, lambda name: int(name.split(".")[1]) in layers, step, fallback)


def agreed_start(
    config: Config,
    run_plan: RunPlan,
    found: checkpoint.Loaded | None,
    coordinator: Coordination,
    fallback: bool,
) -> checkpoint.Loaded:
    """The newest checkpoint that every rank has whole: ranks that found different ones meet at the
    oldest.

    Also where a measured split gives this rank other layers than it has looked for.
    """
    assert found is not None
    steps = coordinator.share("checkpoint found", found.step, config.timeouts.transfer)
    if len(set(steps)) > 1 and not fallback:
        raise CheckpointError(
            f"the ranks' newest checkpoints are of different steps, by rank {steps}; collect the "
            "files in one place, "
            f"or --fallback to step {min(steps)}"
        )
    if found.step == min(steps) and config.pipeline.split != "measured":
        return found
    return find_start(config, run_plan, coordinator.rank, step=min(steps))


def restore(
    start: checkpoint.Loaded | None,
    stages: Mapping[int, Stage | ReplayStage],
    update: Update,
    here: ParallelRanks,
) -> None:
    """Put what was loaded, if anything was, in place."""
    if start is None:
        return
    for tensors in (start.tensors, start.optimizer):
        take_parts(tensors, stages, here)
    for stage in stages.values():
        fill(stage.named_parameters(), start)
        fill_buffers(stage.named_buffers(), start)
    update.restore(start.state, start.optimizer)
