"""What a run will take, before it starts: layers are cut into stages, a schedule is chosen, and its step simulated.

The same function feeds `dpipe simulate` and the run itself, so that the two cannot differ. No torch for the built-in
models: their arithmetic is counted by formula, and turned into time by the assumed `predict.gflops`.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from dpipe.config import Config, load
from dpipe.errors import ConfigError
from dpipe.schedule.check import check
from dpipe.schedule.generate import forward_only, generate
from dpipe.schedule.lower import lower
from dpipe.schedule.plan import Schedule
from dpipe.stage.flops import attention_core_flops, gpt_layer_flops
from dpipe.stage.partition import split
from dpipe.timeline.search import first_fit, search
from dpipe.timeline.simulate import Cost, simulate
from dpipe.timeline.span import Timeline
from dpipe.timeline.summary import summarise
from dpipe.topology import Network, load_network
from dpipe.wire.format import wire_bytes


@dataclass(frozen=True)
class LayerCosts:
    """By layer, for one micro-batch: seconds forward and backward, and bytes on the wire each way behind it.

    `core_s` are the seconds of forward that are its attention cores'; not given, it has none.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    tied_bytes: int = 0
    core_s: tuple[float, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """The cut, the checked and lowered schedule, and when it would happen."""

    split: tuple[int, ...]
    schedule: Schedule
    eval_schedule: Schedule
    cost: Cost
    network: Network
    timeline: Timeline


Choice = Callable[[Config, Cost, Network], Schedule]  # of the compute-only schedule


def choose_schedule(config: Config, cost: Cost, network: Network) -> Schedule:
    pipeline, microbatches = config.pipeline, config.train.num_microbatches
    if pipeline.schedule == "auto":
        return search(pipeline.stages, microbatches, cost, network, **_auto_limits(config))
    return generate(
        pipeline.schedule,
        pipeline.stages,
        microbatches,
        stages_per_rank=pipeline.stages_per_rank,
        in_flight=pipeline.in_flight,
        memory_limit=pipeline.memory_limit,
    )


def without_search(config: Config, cost: Cost, network: Network) -> Schedule:
    """As `choose_schedule`, but for "auto", which takes seconds: its first candidate. It places the stages alike."""
    if config.pipeline.schedule == "auto":
        return first_fit(config.pipeline.stages, config.train.num_microbatches, **_auto_limits(config))
    return choose_schedule(config, cost, network)


def _auto_limits(config: Config) -> dict[str, Any]:
    return {"memory_limit": config.pipeline.memory_limit, "stages_per_rank": config.pipeline.stages_per_rank}


def forecast(
    config: Config, layers: LayerCosts | None = None, network: Network | None = None, choose: Choice = choose_schedule
) -> Forecast:
    """Cut, schedule, check and simulate. `layers` is needed for a user's own model alone.

    Raises `ConfigError` for sizes that do not fit, `ScheduleError` for a plan that cannot run, `ProfileError` for a
    network that lacks a link between two ranks.
    """
    network = network or assumed_network(config.network_profile, config.transport.connections)
    pipeline, microbatches = config.pipeline, config.train.num_microbatches
    network.check(config.world_size)
    if config.model.layers == "replay":
        cut, cost = (1,) * pipeline.stages, replay_cost(config)
    else:
        layers = layers or gpt_costs(config)
        cut = choose_split(config, layers)
        cost = stage_cost(layers, cut, recompute=pipeline.recompute)
    schedule = lower(choose(config, cost, network), tied=cost.tied_bytes > 0, reduce=config.data_parallel.replicas > 1)
    check(schedule)
    evaluation = lower(forward_only(pipeline.stages, microbatches, pipeline.stages_per_rank), step=False)
    check(evaluation)
    return Forecast(cut, schedule, evaluation, cost, network, simulate(schedule, cost, network))


def assumed_network(profile: str | None, connections: int | Literal["auto"]) -> Network:
    """What a prediction assumes: the profile, or loopback without one, over a run's TCP connections a link."""
    network = load_network(profile) if profile else Network()
    return network.over_enough() if connections == "auto" else network.over(connections)


def choose_split(config: Config, layers: LayerCosts) -> tuple[int, ...]:
    given, num_layers = config.pipeline.split, len(layers.forward_s)
    if isinstance(given, str):
        return split([f + b for f, b in zip(layers.forward_s, layers.backward_s, strict=True)], config.pipeline.stages)
    if sum(given) != num_layers:
        raise ConfigError(
            f"pipeline.split {list(given)} places {sum(given)} layers, but the model has {num_layers}"
            + (" (an embedding, model.num_layers blocks and a head)" if config.model.layers == "gpt" else "")
        )
    return given


def gpt_costs(config: Config) -> LayerCosts:
    """Backward is twice forward: one product for the input gradient, one for the weight's (Kaplan et al. 2020)."""
    model, tokens = config.model, config.microbatch_size * config.model.context
    vocab = model.vocab_size or vocabulary(config.data.tokenizer)
    flops = gpt_layer_flops(
        batch_size=config.microbatch_size,
        context=model.context,
        width=model.width,
        num_layers=model.num_layers,
        vocab_size=vocab,
    )
    forward_s = tuple(f / (config.predict.gflops * 1e9) for f in flops)
    message = wire_bytes(config.pipeline.wire, tokens * model.width, 4 if config.train.parameters == "fp32" else 2)
    every = (message,) * len(flops)
    tied = vocab * model.width * 4 if model.tie_embeddings else 0
    core = attention_core_flops(batch_size=config.microbatch_size, context=model.context, width=model.width)
    core_s = (0.0, *(core / (config.predict.gflops * 1e9) for _ in range(model.num_layers)), 0.0)
    return LayerCosts(forward_s, tuple(2 * s for s in forward_s), every, every, tied, core_s)


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary; raises `ConfigError` where the file cannot be read."""
    if tokenizer == "bytes":
        return 256
    from tokenizers import Tokenizer

    try:
        return int(Tokenizer.from_file(tokenizer).get_vocab_size())
    except Exception as error:  # the library raises bare Exception
        raise ConfigError(f"data.tokenizer {tokenizer} cannot be read: {error}") from None


def stage_cost(layers: LayerCosts, cut: tuple[int, ...], *, recompute: str) -> Cost:
    """Add up the layers of each stage; recomputation runs forward, or the attention cores, once more in backward."""
    starts = [sum(cut[:stage]) for stage in range(len(cut))]
    ranges = [range(start, start + size) for start, size in zip(starts, cut, strict=True)]
    forward = [sum(layers.forward_s[i] for i in r) * 1e6 for r in ranges]
    backward = [sum(layers.backward_s[i] for i in r) * 1e6 for r in ranges]
    repeated = {"none": (), "selective": layers.core_s, "full": layers.forward_s}[recompute]
    again = [sum(repeated[r.start : r.stop]) * 1e6 for r in ranges]
    return Cost(
        forward_us=tuple(forward),
        backward_us=tuple(b + a for b, a in zip(backward, again, strict=True)),
        input_us=tuple(b / 2 + a for b, a in zip(backward, again, strict=True)),
        weight_us=tuple(b / 2 for b in backward),
        activation_bytes=tuple(layers.activation_bytes[r[-1]] for r in ranges[:-1]),
        gradient_bytes=tuple(layers.gradient_bytes[r[-1]] for r in ranges[:-1]),
        tied_bytes=layers.tied_bytes,
    )


def replay_cost(config: Config) -> Cost:
    replay, stages = config.replay, config.pipeline.stages
    forward, backward = (per_stage(value, stages) for value in (replay.forward_ms, replay.backward_ms))
    message = wire_bytes(config.pipeline.wire, replay.message_bytes // 4)
    return Cost(
        forward_us=tuple(f * 1e3 for f in forward),
        backward_us=tuple(b * 1e3 for b in backward),
        input_us=tuple(b * 1e3 * replay.input_share for b in backward),
        weight_us=tuple(b * 1e3 * (1 - replay.input_share) for b in backward),
        activation_bytes=(message,) * (stages - 1),
    )


def per_stage(value: float | list[float], stages: int) -> list[float]:
    """One number for all stages, or a list with one for each."""
    values = value if isinstance(value, list) else [value] * stages
    if len(values) != stages:
        raise ConfigError(f"replay lists {len(values)} stage times, but pipeline.stages is {stages}")
    return values


def forecast_text(path: str, overrides: tuple[str, ...], network: str | None, as_json: bool) -> str:
    """What `dpipe simulate` prints."""
    config = load(path, overrides)
    known = assumed_network(network, config.transport.connections) if network else None
    if config.model.layers in ("gpt", "replay"):
        found = forecast(config, None, known)
    else:
        from dpipe.engine.blueprint import draft  # a user's own layers are counted by torch

        found = draft(config, network=known).forecast
    row = as_row(found)
    return json.dumps(row, indent=2) if as_json else as_text(row, config)


def as_row(found: Forecast) -> dict[str, Any]:
    summary = summarise(found.timeline, found.schedule).as_dict()
    return {
        "network": found.network.name,
        "schedule": found.schedule.name,
        "layers_per_stage": list(found.split),
        "step_s": summary.pop("step_us") / 1e6,
        **summary,
    }


def as_text(row: dict[str, Any], config: Config) -> str:
    assumed = f", assuming {config.predict.gflops:g} GFLOP/s a rank" if config.model.layers != "replay" else ""
    links = "  ".join(f"{link} {n / 1e6:.2f} MB" for link, n in sorted(row["link_bytes"].items()))
    return "\n".join(
        (
            f"network         {row['network']}",
            f"schedule        {row['schedule']}, layers a stage {row['layers_per_stage']}",
            f"step            {row['step_s']:.4f} s{assumed}",
            f"bubble          {row['mean_bubble']:.1%}  (by rank {' '.join(f'{b:.0%}' for b in row['bubble'])})",
            f"overlap         {row['mean_overlap']:.1%} of sending happens while computing",
            f"peak in flight  {' '.join(map(str, row['peak_in_flight']))} micro-batches, by rank",
            f"a step sends    {links or 'nothing'}",
        )
    )
