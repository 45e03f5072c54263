"""Going on from a checkpoint: which one every rank has whole, and putting it in place."""

from collections.abc import Mapping

from dpipe.config import Config
from dpipe.coordinator.base import Coordination
from dpipe.engine import checkpoint
from dpipe.engine.blueprint import Blueprint
from dpipe.engine.folder import checkpoint_url
from dpipe.engine.generate import fill, fill_buffers
from dpipe.engine.replicas import Seat, seat
from dpipe.engine.shards import take_parts
from dpipe.engine.update import Update
from dpipe.errors import CheckpointError
from dpipe.schedule.plan import Schedule
from dpipe.stage.replay import ReplayStage
from dpipe.stage.stage import Stage


def stages_at(schedule: Schedule, place: int) -> list[int]:
    return [stage for stage, owner in enumerate(schedule.rank_of_stage) if owner == place]


def find_start(
    config: Config, blueprint: Blueprint, rank: int, *, step: int | None = None, fallback: bool = False
) -> checkpoint.Loaded:
    """What `rank` needs of the newest checkpoint. Raises `CheckpointError` naming a file that is damaged."""
    own = stages_at(blueprint.forecast.schedule, seat(config, rank).place)
    layers = {layer for stage in own for layer in blueprint.layers_of(stage)}
    url = checkpoint_url(config)
    return checkpoint.load(url, lambda name: int(name.split(".")[1]) in layers, step, fallback)


def agreed_start(
    config: Config, blueprint: Blueprint, found: checkpoint.Loaded | None, meeting: Coordination, fallback: bool
) -> checkpoint.Loaded:
    """The newest checkpoint that every rank has whole: ranks that found different ones meet at the oldest.

    Also where a measured split gives this rank other layers than it has looked for.
    """
    assert found is not None
    told = meeting.gather("checkpoint found", str(found.step).encode()).wait(config.timeouts.transfer)
    steps = [int(text) for text in told]
    if len(set(steps)) > 1 and not fallback:
        raise CheckpointError(
            f"the ranks' newest checkpoints are of different steps, by rank {steps}; collect the files in one place, "
            f"or --fallback to step {min(steps)}"
        )
    if found.step == min(steps) and config.pipeline.split != "measured":
        return found
    return find_start(config, blueprint, meeting.rank, step=min(steps))


def restore(
    start: checkpoint.Loaded | None, stages: Mapping[int, Stage | ReplayStage], update: Update, here: Seat
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
