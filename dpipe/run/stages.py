"""The stages of one rank: made as the run plan cuts the model, and sharded over their
tensor-parallel group.
"""

from collections.abc import Callable, Mapping

from torch import nn

from dpipe.plan.costs import per_stage
from dpipe.plan.run_plan import RunPlan
from dpipe.ranks import ParallelRanks
from dpipe.stage.base import PipelineStage
from dpipe.stage.model import LayeredModel, materialise
from dpipe.stage.replay import ReplayStage
from dpipe.stage.stage import Stage, Timed
from dpipe.stage.tensor_group import TensorGroup
from dpipe.stage.tensor_parallel import Split

# By end of the model, 0 for the first layer and -1 for the last: name and parameter.
TiedWeights = Mapping[int, tuple[str, nn.Parameter]]


def make_stage(
    run_plan: RunPlan,
    index: int,
    *,
    replica: int,
    group: TensorGroup | None,
    exchange: Callable[[], None],
    timed: Timed,
) -> PipelineStage:
    """Stage `index` of the run plan. `exchange` is what a replayed stage calls in place of the
    collectives of a `group`.
    """

    if run_plan.model is None:
        return _replay_stage(run_plan, index, exchange)
    return _model_stage(run_plan, run_plan.model, index, replica, group, timed)


def _replay_stage(run_plan: RunPlan, index: int, exchange: Callable[[], None]) -> ReplayStage:
    config = run_plan.config
    replay = config.replay
    num_stages = config.pipeline.stages
    return ReplayStage(
        index,
        num_microbatches=config.train.num_microbatches,
        num_slices=config.pipeline.sequence_slices,
        forward_s=per_stage(replay.forward_ms, num_stages)[index] / 1e3,
        backward_s=per_stage(replay.backward_ms, num_stages)[index] / 1e3,
        input_share=replay.input_share,
        message_bytes=replay.message_bytes,
        parameter_bytes=per_stage(replay.parameter_bytes, num_stages)[index],
        first=index == 0,
        last=run_plan.forecast.schedule.is_last(index),
        exchange=exchange,
        num_exchanges=replay.exchanges,
    )


def _model_stage(
    run_plan: RunPlan,
    model: LayeredModel,
    index: int,
    replica: int,
    group: TensorGroup | None,
    timed: Timed,
) -> Stage:
    config = run_plan.config
    schedule = run_plan.forecast.schedule
    microbatches = config.train.num_microbatches
    layers = {
        layer: materialise(model, layer, config.train.seed, config.node.device)
        for layer in run_plan.layers_of(index, replica)
    }
    return Stage(
        index,
        layers,
        num_microbatches=microbatches,
        num_slices=config.pipeline.sequence_slices,
        loss=model.loss_on(group) if schedule.is_last(index) else None,
        recompute=config.pipeline.recompute,
        precision=config.train.precision,
        parameters=config.train.parameters,
        compiled=config.train.compile,
        seed=config.train.seed,
        first_microbatch=replica * microbatches,  # draws as one process does for the whole batch
        splits_backward=schedule.splits,
        split=None if group is None else Split(group, layers),
        frozen=model.frozen,
        accuracy=model.accuracy if group is None else None,
        timed=timed,
        device=config.node.device,
    )


def tied_weights(run_plan: RunPlan, stages: Mapping[int, PipelineStage]) -> TiedWeights:
    """The ends of the tied weight that are on this rank."""
    if run_plan.model is None or run_plan.model.tied is None:
        return {}
    first, last = run_plan.model.tied
    names = {0: f"layers.0.{first}", -1: f"layers.{len(run_plan.model.layers) - 1}.{last}"}
    own: dict[str, nn.Parameter] = {}
    for stage in stages.values():
        own.update(stage.named_parameters())
    return {end: (name, own[name]) for end, name in names.items() if name in own}


def counted_elsewhere(
    stages: Mapping[int, PipelineStage], tied: TiedWeights, here: ParallelRanks
) -> set[str]:
    """The parameters that a norm over all ranks must leave out on this one.

    They are the last layer's copy of a tied weight, and what every rank of a tensor-parallel group
    has whole, which the group's first counts.
    """
    names = {tied[-1][0]} if -1 in tied else set()
    if here.tp_rank == 0:
        return names
    for stage in stages.values():
        if stage.split is not None:
            shards = stage.split.shards
            names |= {name for name, _ in stage.named_parameters() if name not in shards}
    return names
