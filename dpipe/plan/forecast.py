"""What a run will take, before it starts: layers are cut into stages, a schedule is chosen, and its
step simulated.

The same function feeds `dpipe simulate` and the run itself, so that the two cannot differ. No torch
for the built-in models: their arithmetic is counted by formula, and turned into time by the assumed
`predict.gflops`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.network.link import Host, Network
from dpipe.plan.assumed_network import of_config
from dpipe.plan.costs import LayerCosts, on_ranks, replay_cost, stage_cost, transformer_costs
from dpipe.plan.memory.fit import (
    Stages,
    check_fits,
    most_held,
    refuse_memory_of_replay,
    stages_memory,
)
from dpipe.plan.partition import split
from dpipe.plan.tensor_parallel import at_boundaries, check_vocabulary
from dpipe.schedule.check import check
from dpipe.schedule.exchange import direct, exchange, silent
from dpipe.schedule.generate import AUTO, forward_only, generate, leanest
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.memory import RankMemory, peak_memory
from dpipe.timeline.search import first_fit, search
from dpipe.timeline.simulate import simulate
from dpipe.timeline.span import Timeline
from dpipe.wire.format import wire_bytes

_MOST_PARTS = (
    32  # finer parts make an exchange faster by less than one of them, and its simulation slower
)


@dataclass(frozen=True)
class Forecast:
    """The cut, the checked and lowered schedule, when it would happen, and what each rank then
    holds at most.

    `timeline` is a step at which `replicas` agree, if there are any, as they do at `agreeing_share`
    of the steps; `step_us` is the mean over all steps. Replay stages hold nothing that is worth a
    word: their `memory` is empty.
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


Choice = Callable[
    [Config, Cost, Network, Replicas | None, Stages], Schedule
]  # of the compute-only schedule


def choose_schedule(
    config: Config,
    cost: Cost,
    network: Network,
    replicas: Replicas | None = None,
    stages: Stages = (),
) -> Schedule:
    pipeline = config.pipeline
    microbatches = config.train.num_microbatches
    if pipeline.schedule == AUTO:
        limits = _auto_limits(config)
        if pipeline.memory_gb is not None:
            limits |= {
                "held_bytes": partial(most_held, stages=stages),
                "most_bytes": pipeline.memory_gb * 1e9,
            }
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
    config: Config,
    cost: Cost,
    network: Network,
    replicas: Replicas | None = None,
    stages: Stages = (),
) -> Schedule:
    """As `choose_schedule`, but for "auto", which takes seconds: its first candidate. It places the
    stages alike.
    """
    if config.pipeline.schedule == AUTO:
        return first_fit(
            config.pipeline.stages, config.train.num_microbatches, **_auto_limits(config)
        )
    return choose_schedule(config, cost, network, replicas, stages)


def _auto_limits(config: Config) -> dict[str, Any]:
    return {
        "memory_limit": config.pipeline.memory_limit,
        "stages_per_rank": config.pipeline.stages_per_rank,
    }


def forecast(
    config: Config,
    layers: LayerCosts | None = None,
    network: Network | None = None,
    choose: Choice = choose_schedule,
    hosts: Sequence[Host] = (),
) -> Forecast:
    """Cut, schedule, check and simulate. `layers` is needed for a user's own model alone; `hosts`
    as in `simulate`.

    Raises `ConfigError` for sizes that do not fit, `ScheduleError` for a plan that cannot run,
    `ProfileError` for a network that lacks a link between two ranks.
    """
    shaped = config.transport.shape if network is None else None
    network = network or of_config(config, config.network_profile)
    ballots = ballots_over(config, network, shaped)
    pipeline = config.pipeline
    microbatches = config.train.num_microbatches
    network.check(max([config.num_machines, *(server + 1 for server in server_ranks(config))]))
    check_vocabulary(config)
    stages: Stages
    if not config.model.family.computes:
        cut = (1,) * pipeline.stages
        cost = replay_cost(config, network)
        stages = ()
        refuse_memory_of_replay(config)
    else:
        layers = on_ranks(config, layers or transformer_costs(config))
        cut = choose_split(config, layers)
        cost = at_boundaries(config, stage_cost(layers, cut, recompute=pipeline.recompute))
        stages = stages_memory(
            config, layers.memory, cut, server_ranks(config), layers.output_bytes
        )
    agreeing = replicas_of(config, cost)
    cost = with_exchange(config, cost)
    order = choose(config, cost, network, agreeing, stages)
    schedule = lower(order, tied=cost.tied_bytes > 0, reduce=agreeing is not None)
    check(schedule)
    evaluation = lower(
        forward_only(pipeline.stages, microbatches, pipeline.stages_per_rank), step=False
    )
    check(evaluation)
    memory = peak_memory(schedule, stages) if stages else ()
    if stages and pipeline.memory_gb is not None:
        searching = choose is without_search and pipeline.schedule == AUTO
        check_fits(
            config,
            peak_memory(leanest_of_auto(config), stages) if searching else memory,
            held_by_transformer,
        )
    timeline = simulate(schedule, cost, network, hosts, agreeing, ballots)
    share = agreeing_share(config)
    step_us = timeline.duration_us
    if agreeing is not None and share < 1:
        silently = Replicas(silent(agreeing.count))
        apart = simulate(schedule, cost, network, hosts, silently, ballots)
        step_us = share * step_us + (1 - share) * apart.duration_us
    return Forecast(
        cut, schedule, evaluation, cost, network, timeline, agreeing, share, step_us, memory
    )


def held_by_transformer(config: Config) -> int:
    """Bytes of the fullest rank, by formula; of "auto" those of the schedule that holds least."""
    check_vocabulary(config)
    layers = on_ranks(config, transformer_costs(config))
    cut = choose_split(config, layers)
    cost = stage_cost(layers, cut, recompute=config.pipeline.recompute)
    schedule = (
        leanest_of_auto(config)
        if config.pipeline.schedule == AUTO
        else choose_schedule(config, cost, Network())
    )
    return most_held(schedule, stages_memory(config, layers.memory, cut, server_ranks(config)))


def leanest_of_auto(config: Config) -> Schedule:
    """Of those that "auto" chooses from, one that holds as little as can be."""
    pipeline = config.pipeline
    return leanest(pipeline.stages, config.train.num_microbatches, pipeline.stages_per_rank)


def with_exchange(config: Config, cost: Cost) -> Cost:
    """`cost` with what replicas exchange of each stage in place of its plain fp32 parameters:
    rounded as configured, and where fragments take turns, as much as one of them. What a sharded
    optimizer or a stale server gives back is not rounded.
    """
    chosen = config.data_parallel
    plain = tuple(size // chosen.fragments for size in cost.reduce_bytes)
    rounded = tuple(wire_bytes(chosen.wire, size // 4) for size in plain)
    whole = chosen.kind == "sharded" or chosen.staleness > 0
    return replace(cost, reduce_bytes=rounded, gather_bytes=plain if whole else rounded)


def replicas_of(config: Config, cost: Cost) -> Replicas | None:
    """How replicas agree at a step at which they do, given the plain fp32 parameters; None where
    there is one.
    """
    chosen = config.data_parallel
    if chosen.replicas == 1:
        return None
    most = max(cost.reduce_bytes) // chosen.fragments
    num_parts = max(1, min(_MOST_PARTS, -(-most // chosen.chunk_bytes)))
    if chosen.kind == "local-sgd" and chosen.overlap:
        return Replicas(direct(chosen.replicas, num_parts), delayed=True)
    barrier = config.train.waits_for_verdict  # for the norm, before anything goes back
    found = exchange(
        chosen.kind, chosen.replicas, num_parts, barrier=barrier, stale=chosen.staleness > 0
    )
    return Replicas(found, server_ranks(config), delayed=chosen.delay)


def ballots_over(config: Config, network: Network, shaped: str | None = None) -> Network | None:
    """The network that a step's vote crosses; None where no step waits for it.

    `shaped` is a profile that the transport imitates: it slows what ranks send each other, but not
    what they say to the coordinator.
    """
    if not config.train.waits_for_verdict:
        return None
    return network if shaped is None or config.predict.network is not None else Network()


def server_ranks(config: Config) -> tuple[int, ...]:
    """The rank of each stage's parameter server: of replica 0 where they are embedded, else behind
    all others.
    """
    chosen = config.data_parallel
    stages = range(config.pipeline.stages)
    if chosen.kind != "parameter-server" or chosen.replicas == 1:
        return ()
    if chosen.address:
        return tuple(
            config.num_machines + (0 if chosen.servers == "one" else stage) for stage in stages
        )
    return tuple(
        0 if chosen.servers == "one" else stage % config.pipeline.ranks for stage in stages
    )


def agreeing_share(config: Config) -> float:
    """At which share of the steps something is exchanged."""
    chosen = config.data_parallel
    return chosen.fragments / chosen.inner_steps if chosen.kind == "local-sgd" else 1.0


def choose_split(config: Config, layers: LayerCosts) -> tuple[int, ...]:
    given = config.pipeline.split
    num_layers = len(layers.forward_s)
    if isinstance(given, str):
        return split(
            [f + b for f, b in zip(layers.forward_s, layers.backward_s, strict=True)],
            config.pipeline.stages,
        )
    if sum(given) != num_layers:
        raise ConfigError(
            f"pipeline.split {list(given)} places {sum(given)} layers, but the model has "
            f"{num_layers}"
            + (
                " (an embedding, model.num_layers blocks and a head)"
                if config.model.is_transformer
                else ""
            )
        )
    return given
