"""What a run will take, before it starts: layers are cut into stages, a schedule is chosen, and its step simulated.

The same function feeds `dpipe simulate` and the run itself, so that the two cannot differ. No torch for the built-in
models: their arithmetic is counted by formula, and turned into time by the assumed `predict.gflops`.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

from dpipe.config import Config, load
from dpipe.engine.arithmetic import layer_flops, layer_parameter_bytes, vocabulary_of
from dpipe.engine.fit import Stages, check_fits, most_held, refuse_memory_of_replay, stages_memory
from dpipe.engine.memory import layers_memory
from dpipe.engine.tensor_cost import at_boundaries, check_vocabulary, exchange_s, only_link, ring_us
from dpipe.errors import ConfigError
from dpipe.schedule.check import check
from dpipe.schedule.exchange import direct, exchange, silent
from dpipe.schedule.generate import forward_only, generate, least_in_flight
from dpipe.schedule.lower import lower
from dpipe.schedule.plan import Schedule
from dpipe.stage.flops import attention_core_flops
from dpipe.stage.partition import split
from dpipe.timeline.memory import LayerMemory, RankMemory, peak_memory
from dpipe.timeline.replicas import Replicas
from dpipe.timeline.search import first_fit, search
from dpipe.timeline.simulate import Cost, simulate
from dpipe.timeline.span import Timeline
from dpipe.timeline.summary import summarise
from dpipe.topology import Host, Network, load_network
from dpipe.wire.format import wire_bytes

Number = TypeVar("Number", int, float)

_LENGTH_BYTES = 4  # of a sequence's length, which BERT's blocks pass on
_MOST_PARTS = 32  # finer parts make an exchange faster by less than one of them, and its simulation slower


@dataclass(frozen=True)
class LayerCosts:
    """By layer, for one micro-batch: seconds forward and backward, and bytes on the wire each way behind it.

    `parameter_bytes` are in fp32, `core_s` the seconds of forward that are its attention cores', `memory` is what each
    layer holds, `exchange_.._s` what the ranks that share a layer wait for each other (defaults: none). `output_bytes`
    are what each gives on within a rank (default: as a transformer's).
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    activation_bytes: tuple[int, ...]
    gradient_bytes: tuple[int, ...]
    tied_bytes: int = 0
    parameter_bytes: tuple[int, ...] = ()
    core_s: tuple[float, ...] = ()
    memory: tuple[LayerMemory, ...] = ()
    exchange_forward_s: tuple[float, ...] = ()
    exchange_backward_s: tuple[float, ...] = ()
    output_bytes: tuple[int, ...] = ()


@dataclass(frozen=True)
class Forecast:
    """The cut, the checked and lowered schedule, when it would happen, and what each rank then holds at most.

    `timeline` is a step at which `replicas` agree, if there are any, as they do at `agreeing_share` of the steps;
    `step_us` is the mean over all steps. Replay stages hold nothing that is worth a word: their `memory` is empty.
    """

    split: tuple[int, ...]
    schedule: Schedule
    eval_schedule: Schedule
    cost: Cost
    network: Network
    timeline: Timeline
    replicas: Replicas | None
    agreeing_share: float
    step_us: float
    memory: tuple[RankMemory, ...] = ()

    @property
    def usual_replicas(self) -> Replicas | None:
        """What replicas do at most steps."""
        if self.replicas is None or self.agreeing_share > 0.5:
            return self.replicas
        return Replicas(silent(self.replicas.count))


Choice = Callable[[Config, Cost, Network, Replicas | None, Stages], Schedule]  # of the compute-only schedule


def choose_schedule(
    config: Config, cost: Cost, network: Network, replicas: Replicas | None = None, stages: Stages = ()
) -> Schedule:
    pipeline, microbatches = config.pipeline, config.train.num_microbatches
    if pipeline.schedule == "auto":
        limits = _auto_limits(config)
        if pipeline.memory_gb is not None:
            limits |= {"held_bytes": partial(most_held, stages=stages), "most_bytes": pipeline.memory_gb * 1e9}
        return search(pipeline.stages, microbatches, cost, network, replicas=replicas, **limits)
    return generate(
        pipeline.schedule,
        pipeline.stages,
        microbatches,
        stages_per_rank=pipeline.stages_per_rank,
        in_flight=pipeline.in_flight,
        memory_limit=pipeline.memory_limit,
    )


def without_search(
    config: Config, cost: Cost, network: Network, replicas: Replicas | None = None, stages: Stages = ()
) -> Schedule:
    """As `choose_schedule`, but for "auto", which takes seconds: its first candidate. It places the stages alike."""
    if config.pipeline.schedule == "auto":
        return first_fit(config.pipeline.stages, config.train.num_microbatches, **_auto_limits(config))
    return choose_schedule(config, cost, network, replicas, stages)


def _auto_limits(config: Config) -> dict[str, Any]:
    return {"memory_limit": config.pipeline.memory_limit, "stages_per_rank": config.pipeline.stages_per_rank}


def forecast(
    config: Config,
    layers: LayerCosts | None = None,
    network: Network | None = None,
    choose: Choice = choose_schedule,
    hosts: Sequence[Host] = (),
) -> Forecast:
    """Cut, schedule, check and simulate. `layers` is needed for a user's own model alone; `hosts` as in `simulate`.

    Raises `ConfigError` for sizes that do not fit, `ScheduleError` for a plan that cannot run, `ProfileError` for a
    network that lacks a link between two ranks.
    """
    network = network or _network(config, config.network_profile)
    pipeline, microbatches = config.pipeline, config.train.num_microbatches
    network.check(max([config.num_machines, *(server + 1 for server in server_ranks(config))]))
    check_vocabulary(config)
    stages: Stages
    if config.model.layers == "replay":
        cut, cost, stages = (1,) * pipeline.stages, replay_cost(config, network), ()
        refuse_memory_of_replay(config)
    else:
        layers = on_ranks(config, layers or transformer_costs(config))
        cut = choose_split(config, layers)
        cost = at_boundaries(config, stage_cost(layers, cut, recompute=pipeline.recompute))
        stages = stages_memory(config, layers.memory, cut, server_ranks(config), layers.output_bytes)
    agreeing, cost = replicas_of(config, cost), with_exchange(config, cost)
    order = choose(config, cost, network, agreeing, stages)
    schedule = lower(order, tied=cost.tied_bytes > 0, reduce=agreeing is not None)
    check(schedule)
    evaluation = lower(forward_only(pipeline.stages, microbatches, pipeline.stages_per_rank), step=False)
    check(evaluation)
    memory = peak_memory(schedule, stages) if stages else ()
    if stages and pipeline.memory_gb is not None:
        searching = choose is without_search and pipeline.schedule == "auto"
        check_fits(config, peak_memory(leanest(config), stages) if searching else memory, held_by_transformer)
    timeline, share = simulate(schedule, cost, network, hosts, agreeing), agreeing_share(config)
    step_us = timeline.duration_us
    if agreeing is not None and share < 1:
        apart = simulate(schedule, cost, network, hosts, Replicas(silent(agreeing.count)))
        step_us = share * step_us + (1 - share) * apart.duration_us
    return Forecast(cut, schedule, evaluation, cost, network, timeline, agreeing, share, step_us, memory)


def held_by_transformer(config: Config) -> int:
    """Bytes of the fullest rank, by formula; of "auto" those of the schedule that holds least."""
    check_vocabulary(config)
    layers = on_ranks(config, transformer_costs(config))
    cut = choose_split(config, layers)
    cost = stage_cost(layers, cut, recompute=config.pipeline.recompute)
    schedule = leanest(config) if config.pipeline.schedule == "auto" else choose_schedule(config, cost, Network())
    return most_held(schedule, stages_memory(config, layers.memory, cut, server_ranks(config)))


def leanest(config: Config) -> Schedule:
    """Of those that "auto" chooses from, one that holds as little as can be."""
    pipeline, microbatches = config.pipeline, config.train.num_microbatches
    if pipeline.stages_per_rank == 1:
        return generate("1f1b", pipeline.stages, microbatches, in_flight=1)
    least = least_in_flight(pipeline.ranks, pipeline.stages_per_rank, microbatches)
    per_rank = pipeline.stages_per_rank
    return generate("interleaved", pipeline.stages, microbatches, stages_per_rank=per_rank, in_flight=least)


def with_exchange(config: Config, cost: Cost) -> Cost:
    """`cost` with what replicas exchange of each stage in place of its plain fp32 parameters: rounded as configured,
    and where fragments take turns, as much as one of them. What a sharded optimizer or a stale server gives back
    is not rounded."""
    chosen = config.data_parallel
    plain = tuple(size // chosen.fragments for size in cost.reduce_bytes)
    rounded = tuple(wire_bytes(chosen.wire, size // 4) for size in plain)
    whole = chosen.kind == "sharded" or chosen.staleness > 0
    return replace(cost, reduce_bytes=rounded, gather_bytes=plain if whole else rounded)


def replicas_of(config: Config, cost: Cost) -> Replicas | None:
    """How replicas agree at a step at which they do, given the plain fp32 parameters; None where there is one."""
    chosen = config.data_parallel
    if chosen.replicas == 1:
        return None
    most = max(cost.reduce_bytes) // chosen.fragments
    num_parts = max(1, min(_MOST_PARTS, -(-most // chosen.chunk_bytes)))
    if chosen.kind == "local-sgd" and chosen.overlap:
        return Replicas(direct(chosen.replicas, num_parts), delayed=True)
    waits = config.train.clip_norm > 0 or config.train.precision == "fp16"  # for the norm, before anything goes back
    found = exchange(chosen.kind, chosen.replicas, num_parts, barrier=waits, stale=chosen.staleness > 0)
    return Replicas(found, server_ranks(config), delayed=chosen.delay)


def server_ranks(config: Config) -> tuple[int, ...]:
    """The rank of each stage's parameter server: of replica 0 where they are embedded, else behind all others."""
    chosen, stages = config.data_parallel, range(config.pipeline.stages)
    if chosen.kind != "parameter-server" or chosen.replicas == 1:
        return ()
    if chosen.address:
        return tuple(config.num_machines + (0 if chosen.servers == "one" else stage) for stage in stages)
    return tuple(0 if chosen.servers == "one" else stage % config.pipeline.ranks for stage in stages)


def agreeing_share(config: Config) -> float:
    """At which share of the steps something is exchanged."""
    chosen = config.data_parallel
    return chosen.fragments / chosen.inner_steps if chosen.kind == "local-sgd" else 1.0


def assumed_network(profile: str | None, connections: int | Literal["auto"], *, headers: bool = False) -> Network:
    """What a prediction assumes: the profile, or loopback without one, over a run's TCP connections a link.

    With `headers` the profile's rates count those of packets, which messages then do not get.
    """
    network = load_network(profile) if profile else Network()
    if profile and headers:
        network = network.for_payload()
    return network.over_enough() if connections == "auto" else network.over(connections)


def connections_of(config: Config) -> int:
    """How many TCP connections a link of the run has."""
    return assumed_network(config.network_profile, config.transport.connections).connections


def _network(config: Config, profile: str | None) -> Network:
    return assumed_network(profile, config.transport.connections, headers=config.counts_headers)


def choose_split(config: Config, layers: LayerCosts) -> tuple[int, ...]:
    given, num_layers = config.pipeline.split, len(layers.forward_s)
    if isinstance(given, str):
        return split([f + b for f, b in zip(layers.forward_s, layers.backward_s, strict=True)], config.pipeline.stages)
    if sum(given) != num_layers:
        raise ConfigError(
            f"pipeline.split {list(given)} places {sum(given)} layers, but the model has {num_layers}"
            + (" (an embedding, model.num_layers blocks and a head)" if config.model.is_transformer else "")
        )
    return given


def transformer_costs(config: Config) -> LayerCosts:
    """Of a GPT or a BERT, whose blocks are the same and whose hops carry a sequence's length besides.

    Backward is twice forward: one product for the input gradient, one for the weight's (Kaplan et al. 2020).
    """
    model, tokens = config.model, config.microbatch_size * config.model.context
    flops = layer_flops(config, config.microbatch_size)
    forward_s = tuple(f / (config.predict.gflops * 1e9) for f in flops)
    message = wire_bytes(config.pipeline.wire, tokens * model.width, 4 if config.train.parameters == "fp32" else 2)
    lengths = config.microbatch_size * _LENGTH_BYTES if model.layers == "bert" else 0
    activation, gradient = ((size,) * len(flops) for size in (message + lengths, message))
    tied = vocabulary_of(config) * model.width * 4 if model.tie_embeddings else 0
    parameters = layer_parameter_bytes(config)
    core = attention_core_flops(batch_size=config.microbatch_size, context=model.context, width=model.width)
    core_s = (0.0, *(core / (config.predict.gflops * 1e9) for _ in range(model.num_layers)), 0.0)
    memory = layers_memory(config)
    backward_s = tuple(2 * s for s in forward_s)
    return LayerCosts(forward_s, backward_s, activation, gradient, tied, parameters, core_s, memory)


def on_ranks(config: Config, layers: LayerCosts) -> LayerCosts:
    """The costs of whole layers as those of layers on T ranks."""
    size = config.tensor_parallel.size
    if size == 1:
        return layers
    forward_s, backward_s, core_s = (
        tuple(seconds / size for seconds in each) for each in (layers.forward_s, layers.backward_s, layers.core_s)
    )
    there, back = exchange_s(config, len(forward_s))
    return replace(
        layers,
        forward_s=forward_s,
        backward_s=backward_s,
        core_s=core_s,
        exchange_forward_s=there,
        exchange_backward_s=back,
    )


def stage_cost(layers: LayerCosts, cut: tuple[int, ...], *, recompute: str) -> Cost:
    """Add up the layers of each stage; recomputation runs forward, or the attention cores, once more in backward."""
    starts = [sum(cut[:stage]) for stage in range(len(cut))]
    ranges = [range(start, start + size) for start, size in zip(starts, cut, strict=True)]
    forward = [sum(layers.forward_s[i] for i in r) * 1e6 for r in ranges]
    backward = [sum(layers.backward_s[i] for i in r) * 1e6 for r in ranges]
    exchanges_s = (layers.exchange_forward_s, layers.exchange_backward_s)
    there, back = ([sum(each[r.start : r.stop]) * 1e6 for r in ranges] for each in exchanges_s)
    repeated = {"none": (), "selective": layers.core_s, "full": layers.forward_s}[recompute]
    again = [sum(repeated[r.start : r.stop]) * 1e6 + e for r, e in zip(ranges, back, strict=True)]
    if recompute == "full":
        again = [a + e for a, e in zip(again, there, strict=True)]
    return Cost(
        forward_us=tuple(f + e for f, e in zip(forward, there, strict=True)),
        backward_us=tuple(b + a for b, a in zip(backward, again, strict=True)),
        input_us=tuple(b / 2 + a for b, a in zip(backward, again, strict=True)),
        weight_us=tuple(b / 2 for b in backward),
        activation_bytes=tuple(layers.activation_bytes[r[-1]] for r in ranges[:-1]),
        gradient_bytes=tuple(layers.gradient_bytes[r[-1]] for r in ranges[:-1]),
        reduce_bytes=tuple(sum(layers.parameter_bytes[r.start : r.stop]) for r in ranges),
        tied_bytes=layers.tied_bytes,
    )


def replay_cost(config: Config, network: Network) -> Cost:
    """Exchanges are waited for where they stand, as if nothing else left the ranks of a stage meanwhile."""
    replay, stages = config.replay, config.pipeline.stages
    if config.tensor_parallel.size > 1:
        only_link(network)
    exchanges_us = replay.exchanges and replay.exchanges * ring_us(config, network)
    forward, backward = (per_stage(value, stages) for value in (replay.forward_ms, replay.backward_ms))
    message = wire_bytes(config.pipeline.wire, replay.message_bytes // 4)
    return Cost(
        forward_us=tuple(f * 1e3 + exchanges_us for f in forward),
        backward_us=tuple(b * 1e3 + exchanges_us for b in backward),
        input_us=tuple(b * 1e3 * replay.input_share + exchanges_us for b in backward),
        weight_us=tuple(b * 1e3 * (1 - replay.input_share) for b in backward),
        activation_bytes=(message,) * (stages - 1),
        reduce_bytes=tuple(per_stage(replay.parameter_bytes, stages)),
    )


def per_stage(value: Number | list[Number], stages: int) -> list[Number]:
    """One number for all stages, or a list with one for each."""
    values = value if isinstance(value, list) else [value] * stages
    if len(values) != stages:
        raise ConfigError(f"replay lists {len(values)} values, but pipeline.stages is {stages}")
    return values


def forecast_text(path: str, overrides: tuple[str, ...], network: str | None, as_json: bool) -> str:
    """What `dpipe simulate` prints."""
    config = load(path, overrides)
    known = _network(config, network) if network else None
    if config.model.is_transformer or config.model.layers == "replay":
        found = forecast(config, None, known)
    else:
        from dpipe.engine.blueprint import draft  # a user's own layers are counted by torch

        found = draft(config, network=known).forecast
    row = as_row(found)
    return json.dumps(row, indent=2) if as_json else as_text(row, config)


def as_row(found: Forecast) -> dict[str, Any]:
    if found.timeline.duration_us <= 0:
        raise ConfigError("no time passes in such a step: set replay.forward_ms, or a predict.gflops that there is")
    summary = summarise(found.timeline, found.schedule).as_dict()
    return {
        "network": found.network.name,
        "schedule": found.schedule.name,
        "layers_per_stage": list(found.split),
        "step_s": found.step_us / 1e6,
        "agreeing_step_s": summary.pop("step_us") / 1e6,
        **summary,
        "memory": [asdict(rank) | {"total": rank.total} for rank in found.memory],
    }


def as_text(row: dict[str, Any], config: Config) -> str:
    assumed = f", assuming {config.predict.gflops:g} GFLOP/s a rank" if config.model.layers != "replay" else ""
    agrees = ""
    if row["agreeing_step_s"] != row["step_s"]:
        agrees = f" on average, {row['agreeing_step_s']:.4f} s where replicas agree"
    links = "  ".join(f"{link} {n / 1e6:.2f} MB" for link, n in sorted(row["link_bytes"].items()))
    return "\n".join(
        (
            f"network         {row['network']}",
            f"schedule        {row['schedule']}, layers a stage {row['layers_per_stage']}",
            f"step            {row['step_s']:.4f} s{agrees}{assumed}",
            f"bubble          {row['mean_bubble']:.1%}  (by rank {' '.join(f'{b:.0%}' for b in row['bubble'])})",
            f"overlap         {row['mean_overlap']:.1%} of sending happens while computing",
            f"peak in flight  {' '.join(map(str, row['peak_in_flight']))} micro-batches, by rank",
            f"a step sends    {links or 'nothing'}",
            *_tensor_lines(config),
            *(_memory_line(number * config.tensor_parallel.size, rank) for number, rank in enumerate(row["memory"])),
        )
    )


def _tensor_lines(config: Config) -> Iterator[str]:
    """Where several ranks hold a stage together: what is said of a machine, and what of each of its ranks."""
    size, predict = config.tensor_parallel.size, config.predict
    if size > 1 and config.model.layers == "replay":
        yield f"tensor parallel {size} ranks a stage, each on a host of its own; above, the first of them"
    elif size > 1:
        link = f"{predict.machine_gbps:g} Gbit/s and {predict.machine_delay_ms:g} ms"
        yield f"tensor parallel {size} ranks a stage on one machine, assuming {link} between them;"
        yield f"{'':<15} above, a rank is such a machine; below, the first of its ranks"


def _memory_line(rank: int, memory: dict[str, int]) -> str:
    kinds = ", ".join(f"{kind} {memory[kind] / 1e9:.3f}" for kind in memory if kind != "total")
    return f"{'memory' if rank == 0 else '':<15} rank {rank} at most {memory['total'] / 1e9:.3f} GB: {kinds}"
