"""What the stages hold in a configured run, whether that fits, and what would. No torch."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice

from dpipe.config.load import Config
from dpipe.errors import ConfigError, ScheduleError
from dpipe.memory.exchange import exchange_bytes, has_moments
from dpipe.memory.layers import Stages
from dpipe.memory.walk import LayerMemory, RankMemory, StageMemory, peak_memory
from dpipe.optimizers.kinds import OPTIMIZERS
from dpipe.schedule.generate import ONE_F_ONE_B
from dpipe.schedule.schedule import Schedule

_SUGGESTIONS = 3  # of changes that would fit, the mildest


def in_run(config: Config, stages: Stages, servers: Sequence[int] = ()) -> Stages:
    """`stages` with this run's share of the optimizer, and with what replicas exchange.

    `servers` are as in `exchange_bytes`.
    """
    stages = _with_optimizer(config, stages)
    parameters = [sum(layer.parameter_bytes for layer in stage) for stage in stages]
    exchanges = exchange_bytes(config, parameters, servers)
    exchanging = []
    for (first, *others), size in zip(stages, exchanges, strict=True):
        # With the first layer, as a stage has no size of its own: it counts once either way.
        exchanging.append((replace(first, exchange_bytes=size), *others))
    return exchanging


def _with_optimizer(config: Config, stages: Stages) -> Stages:
    """`stages` with what a rank of this run keeps of its optimizer's state."""
    # Behind the last layer of all but the last stage there is only what it holds of its output.
    last_stage = len(stages) - 1
    last_layer = len(stages[-1]) - 1
    ends = {(0, 0), (last_stage, last_layer)}
    kept: list[StageMemory] = []
    for number, stage in enumerate(stages):
        layers = []
        for place, layer in enumerate(stage):
            is_end = (number, place) in ends
            layers.append(_of_optimizer(config, layer, is_end=is_end))
        kept.append(tuple(layers))
    return kept


def _of_optimizer(config: Config, layer: LayerMemory, *, is_end: bool) -> LayerMemory:
    """`layer`, which has what AdamW keeps, with what this run's optimizer does."""
    if not has_moments(config):
        return replace(layer, optimizer_bytes=0, update_bytes=0)
    kind = OPTIMIZERS[config.train.optimizer]
    adamw = OPTIMIZERS["adamw"]
    shards = config.data_parallel.active_kind.shards_optimizer
    sharing = config.data_parallel.replicas if shards else 1
    learning_bytes = round(layer.optimizer_bytes * 4 / adamw.state_bytes)
    return replace(
        layer,
        optimizer_bytes=kind.state_of(learning_bytes, is_end=is_end) // sharing,
        update_bytes=round(layer.update_bytes * kind.step_copies / adamw.step_copies),
    )


def held_by_rank(schedule: Schedule, stages: Stages) -> list[int]:
    """Bytes of each rank at its worst moment."""
    return [rank.total for rank in peak_memory(schedule, stages)]


def most_held(schedule: Schedule, stages: Stages) -> int:
    """Bytes of the rank that holds most."""
    return max(held_by_rank(schedule, stages))


def refuse_memory_of_replay(config: Config) -> None:
    """Raises `ConfigError` for a limit on replay stages, which hold no model."""
    if config.pipeline.memory_gb is not None:
        raise ConfigError(
            "pipeline.memory_gb limits what a model holds, and replay stages hold no model; leave "
            "it out"
        )


def check_fits(config: Config, memory: Sequence[RankMemory], held: Callable[[Config], int]) -> None:
    """Raises `ConfigError` if a rank is predicted to hold more than `pipeline.memory_gb`; it names
    changes that would fit.

    `held(config)` are the bytes of the fullest rank under another configuration of a transformer.
    """
    limit = config.pipeline.memory_gb
    if limit is None:
        return
    totals = [held.total for held in memory]
    rank = totals.index(max(totals))
    worst = memory[rank]
    if worst.total <= limit * 1e9:
        return
    fitting: list[str] = []
    if config.model.is_transformer:
        # Taken as they are found: each costs a plan of its own.
        fitting = [*islice(_fitting(config, held, limit * 1e9), _SUGGESTIONS)]
    advice = "more stages or a smaller model would help"
    if fitting:
        advice = f"these would fit: {'; '.join(fitting)}"
    listed = ", ".join(f"{kind} {size / 1e9:.3f}" for kind, size in asdict(worst).items())
    listed = listed.replace("working", "working memory")
    raise ConfigError(
        f"rank {rank} would hold {worst.total / 1e9:.3f} GB, but pipeline.memory_gb is {limit:g} "
        f"({listed}); {advice}"
    )


def _fitting(config: Config, held: Callable[[Config], int], most: float) -> Iterator[str]:
    """Single changes to the configuration under which it would fit, mildest first."""
    for key, value in _changes(config):
        try:
            after = held(config.with_(**{key: value}))
        except (ConfigError, ScheduleError):
            continue  # the change does not go with the rest of the configuration
        if after <= most:
            yield f"{key.replace('__', '.')} = {json.dumps(value)} ({after / 1e9:.3f} GB)"


def _changes(config: Config) -> Iterator[tuple[str, object]]:
    train = config.train
    pipeline = config.pipeline
    # What costs time before what costs machines.
    for recompute in ("selective", "full"):
        if recompute != pipeline.recompute:
            yield "pipeline__recompute", recompute
    yield "pipeline__schedule", ONE_F_ONE_B.name
    for factor in (2, 4, 8, 16):
        yield "train__num_microbatches", train.num_microbatches * factor
    for factor in (2, 4):
        yield "pipeline__stages", pipeline.stages * factor
    for factor in (2, 4):
        yield "tensor_parallel__size", config.tensor_parallel.size * factor
