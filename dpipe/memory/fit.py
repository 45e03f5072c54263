"""What the stages hold in a configured run, whether that fits, and what would. No torch."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import islice

from dpipe.config.load import Config
from dpipe.errors import ConfigError, ScheduleError
from dpipe.memory.exchange import exchange_bytes, has_moments
from dpipe.memory.layers import Stages
from dpipe.memory.walk import LayerMemory, RankMemory, peak_memory
from dpipe.schedule.generate import ONE_F_ONE_B
from dpipe.schedule.schedule import Schedule

_SUGGESTIONS = 3  # of changes that would fit, the mildest


def in_run(config: Config, stages: Stages, servers: Sequence[int] = ()) -> Stages:
    """`stages` with this run's share of the optimizer, and with what replicas exchange.

    `servers` are as in `exchange_bytes`.
    """
    stages = [tuple(_with_optimizer(config, layer) for layer in stage) for stage in stages]
    parameters = [sum(layer.parameter_bytes for layer in stage) for stage in stages]
    exchanges = exchange_bytes(config, parameters, servers)
    exchanging = []
    for (first, *others), size in zip(stages, exchanges, strict=True):
        # With the first layer, as a stage has no size of its own: it counts once either way.
        exchanging.append((replace(first, exchange_bytes=size), *others))
    return exchanging


def _with_optimizer(config: Config, layer: LayerMemory) -> LayerMemory:
    """`layer` with what a rank of this run keeps of its optimizer state."""
    if not has_moments(config):
        return replace(layer, optimizer_bytes=0, update_bytes=0)
    shards = config.data_parallel.active_kind.shards_optimizer
    sharing = config.data_parallel.replicas if shards else 1
    return replace(layer, optimizer_bytes=layer.optimizer_bytes // sharing)


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
