"""Whether a run fits into the memory of its ranks, and what would: asked before anything starts."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate

from dpipe.config.load import Config
from dpipe.errors import ConfigError, ScheduleError
from dpipe.plan.memory.exchange import exchange_bytes, has_moments
from dpipe.plan.memory.formulas import stage_memory
from dpipe.schedule.generate import ONE_F_ONE_B
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.memory import LayerMemory, RankMemory, StageMemory, peak_memory

Stages = Sequence[StageMemory]  # what the layers of each stage hold; none for replay

_HALF = 2
_FLOAT = 4
_SUGGESTIONS = 3


def stages_memory(
    config: Config,
    layers: Sequence[LayerMemory],
    cut: Sequence[int],
    servers: Sequence[int] = (),
    output_bytes: Sequence[int] = (),
) -> Stages:
    """The memory of each stage's layers in this run; `cut` are layers a stage, `servers` as in
    `exchange_bytes`.

    `output_bytes` are what each layer gives on; by default what one of a transformer does.
    """
    value_bytes = _FLOAT if config.train.parameters == "fp32" else _HALF
    output = config.microbatch_size * config.model.context * config.model.width * value_bytes
    if config.tensor_parallel.sequence_parallel:
        output //= config.tensor_parallel.size
    ends = [end - 1 for end in accumulate(cut)][:-1]
    outputs = [output_bytes[end] for end in ends] if output_bytes else [output] * len(ends)
    stages = stage_memory(layers, cut, outputs, config.pipeline.recompute)
    stages = tuple(tuple(_with_optimizer(config, layer) for layer in stage) for stage in stages)
    held = exchange_bytes(
        config, [sum(layer.parameter_bytes for layer in stage) for stage in stages], servers
    )
    return [
        (replace(stage[0], exchange_bytes=size), *stage[1:])
        for stage, size in zip(stages, held, strict=True)
    ]


def _with_optimizer(config: Config, layer: LayerMemory) -> LayerMemory:
    """What a rank of this run keeps of the optimizer for it."""
    if not has_moments(config):
        return replace(layer, optimizer_bytes=0, update_bytes=0)
    sharing = config.data_parallel.replicas if config.data_parallel.kind == "sharded" else 1
    return replace(layer, optimizer_bytes=layer.optimizer_bytes // sharing)


def most_held(schedule: Schedule, stages: Stages) -> int:
    """Bytes of the rank that holds most."""
    return max(rank.total for rank in peak_memory(schedule, stages))


def refuse_memory_of_replay(config: Config) -> None:
    if config.pipeline.memory_gb is not None:
        raise ConfigError(
            "pipeline.memory_gb limits what a model holds, and replay stages hold no model; leave "
            "it out"
        )


def check_fits(config: Config, memory: Sequence[RankMemory], held: Callable[[Config], int]) -> None:
    """Raises `ConfigError` where a rank is predicted to hold more than `pipeline.memory_gb`, with
    what would fit.

    `held(config)` are the bytes that the fullest rank of another configuration of a transformer
    would hold.
    """
    limit = config.pipeline.memory_gb
    if limit is None:
        return
    rank, worst = max(enumerate(memory), key=lambda pair: pair[1].total)
    if worst.total <= limit * 1e9:
        return
    fitting = (
        list(_fitting(config, held, limit * 1e9))[:_SUGGESTIONS]
        if config.model.is_transformer
        else []
    )
    advice = (
        f"these would fit: {'; '.join(fitting)}"
        if fitting
        else "more stages or a smaller model would help"
    )
    kinds = {
        kind.replace("working", "working memory"): size for kind, size in asdict(worst).items()
    }
    listed = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in kinds.items())
    raise ConfigError(
        f"rank {rank} would hold {worst.total / 1e9:.3f} GB, but pipeline.memory_gb is {limit:g} "
        f"({listed}); {advice}"
    )


def _fitting(config: Config, held: Callable[[Config], int], most: float) -> Iterator[str]:
    """Single changes to the configuration, mildest first, under which it would fit."""
    for key, value in _changes(config):
        try:
            after = held(config.with_(**{key: value}))
        except (ConfigError, ScheduleError):
            continue  # a change that does not go with the rest of the configuration
        if after <= most:
            yield f"{key.replace('__', '.')} = {json.dumps(value)} ({after / 1e9:.3f} GB)"


def _changes(config: Config) -> Iterator[tuple[str, object]]:
    train = config.train
    pipeline = config.pipeline
    yield from (
        ("pipeline__recompute", kind)
        for kind in ("selective", "full")
        if kind != pipeline.recompute
    )
    yield "pipeline__schedule", ONE_F_ONE_B.name
    yield from (
        ("train__num_microbatches", train.num_microbatches * factor) for factor in (2, 4, 8, 16)
    )
    yield from (("pipeline__stages", pipeline.stages * factor) for factor in (2, 4))
    yield from (
        ("tensor_parallel__size", config.tensor_parallel.size * factor) for factor in (2, 4)
    )
