"""The stages of one rank: made as the run_plan cuts the model, and split over the ranks that hold
them together.
"""

from collections.abc import Callable, Mapping

from torch import nn

from dpipe.plan.costs import per_stage
from dpipe.plan.run_plan import RunPlan
from dpipe.ranks import ParallelRanks
from dpipe.stage.model import materialise
from dpipe.stage.base import PipelineStage
from dpipe.stage.replay import ReplayStage
from dpipe.stage.stage import Stage, Timed
from dpipe.stage.tensor_group import TensorGroup
from dpipe.stage.tensor_parallel import Split


def make_stage(
    run_plan: RunPlan,
    index: int,
    *,
    replica: int,
    group: TensorGroup | None,
    exchange: Callable[[], None],
    timed: Timed,
) -> PipelineStage:
    """`exchange` is what the ranks of a replayed stage do in place of what those of a real one do
    in their `group`.
    """
    config = run_plan.config
    last = run_plan.forecast.schedule.is_last(index)
    microbatches = config.train.num_microbatches
    if run_plan.model is None:
        replay = config.replay
        stages = config.pipeline.stages
        return ReplayStage(
            index,
            num_microbatches=microbatches,
            forward_s=per_stage(replay.forward_ms, stages)[index] / 1e3,
            backward_s=per_stage(replay.backward_ms, stages)[index] / 1e3,
            input_share=replay.input_share,
            message_bytes=replay.message_bytes,
            parameter_bytes=per_stage(replay.parameter_bytes, stages)[index],
            first=index == 0,
            last=last,
            exchange=exchange,
            num_exchanges=replay.exchanges,
        )
    seed = config.train.seed
    device = config.node.device
    model = run_plan.model
    layers = {layer: materialise(model, layer, seed, device) for layer in run_plan.layers_of(index)}
    return Stage(
        index,
        layers,
        num_microbatches=microbatches,
        loss=model.loss_on(group) if last else None,
        recompute=config.pipeline.recompute,
        precision=config.train.precision,
        parameters=config.train.parameters,
        compiled=config.train.compile,
        seed=seed,
        first_microbatch=replica * microbatches,
        splits_backward=run_plan.forecast.schedule.splits,
        split=None if group is None else Split(group, layers),
        timed=timed,
        device=device,
    )


def tied_weights(
    run_plan: RunPlan, stages: Mapping[int, PipelineStage]
) -> dict[int, tuple[str, nn.Parameter]]:
    """The ends of the shared weight that live here: 0 for the first layer's, -1 for the last
    layer's.
    """
    if run_plan.model is None or run_plan.model.tied is None:
        return {}
    last = len(run_plan.model.layers) - 1
    names = {
        0: f"layers.0.{run_plan.model.tied[0]}",
        -1: f"layers.{last}.{run_plan.model.tied[1]}",
    }
    here = {name: weight for stage in stages.values() for name, weight in stage.named_parameters()}
    return {end: (name, here[name]) for end, name in names.items() if name in here}


def counted_elsewhere(
    stages: Mapping[int, PipelineStage],
    tied: Mapping[int, tuple[str, nn.Parameter]],
    here: ParallelRanks,
) -> set[str]:
    """The parameters that a norm counts on another rank: the copy of a shared weight, and what
    several ranks have.
    """
    whole = {
        name
        for stage in stages.values()
        if isinstance(stage, Stage) and stage.split is not None and here.tp_rank > 0
        for name, _ in stage.named_parameters()
        if name not in stage.split.shards
    }
    return whole | ({tied[-1][0]} if -1 in tied else set())
