"""What a run will take, before it starts: layers are cut into stages, a schedule is chosen, and a
step is simulated. No torch.

`dpipe simulate` and the run itself call the same function, so the two cannot differ. The operations
of a GPT or a BERT are counted by formula, and turned into time by the assumed `predict.gflops`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dpipe.config.load import Config
from dpipe.dataparallel.kinds import KINDS
from dpipe.errors import ConfigError
from dpipe.machines.machine import Machine
from dpipe.memory.fit import (
    check_fits,
    held_by_rank,
    in_run,
    most_held,
    refuse_memory_of_replay,
)
from dpipe.memory.layers import Stages
from dpipe.memory.walk import RankMemory, peak_memory
from dpipe.network.link import Host, Network
from dpipe.plan.assumed_network import configured_network
from dpipe.plan.costs import LayerCosts, on_ranks, replay_cost, stage_cost, transformer_costs
from dpipe.plan.on_machines import Placement, costs_on, layers_on, placement_of, slowest
from dpipe.plan.partition import split
from dpipe.plan.tensor_parallel import at_boundaries, check_vocabulary
from dpipe.schedule.check import check
from dpipe.schedule.exchange import exchange, silent
from dpipe.schedule.generate import AUTO, evaluation, generate, leanest
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.size import num_messages
from dpipe.schedule.text import from_csv
from dpipe.search.auto import first_fit, search
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Replicas
from dpipe.timeline.simulate import simulate
from dpipe.timeline.span import Timeline
from dpipe.wire.format import wire_bytes

# Finer parts make an exchange faster by less than one of them, and its simulation slower.
_MOST_PARTS = 32
_MOST_MESSAGES = 1 << 19
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Forecast:
    """What a run will do, before it starts."""

    split: tuple[int, ...]  # layers a stage
    schedule: Schedule  # of a training step, lowered and checked
    eval_schedule: Schedule  # forward only
    cost: Cost  # by stage and hop
    network: Network  # that the prediction assumes
    timeline: Timeline  # a steady step; replicas exchange something in it, if they ever do
    replicas: Replicas | None  # how they exchange at such a step; None without replicas
    agreeing_share: float  # of the steps that are such steps
    step_us: float  # the step time, a mean over all steps
    costs: tuple[Cost, ...] = ()  # by replica, where machines differ
    memory: tuple[RankMemory, ...] = ()  # by rank; empty for replay stages, and where not asked for

    @property
    def usual_replicas(self) -> Replicas | None:
        """What replicas do at most steps."""
        if self.replicas is None or self.agreeing_share > 0.5:
            return self.replicas
        return Replicas(silent(self.replicas.count))


# Returns a schedule of computations alone.
ScheduleChoice = Callable[
    [Config, Cost, Network, Replicas | None, Stages, Network | None], Schedule
]


def choose_schedule(
    config: Config,
    cost: Cost,
    network: Network,
    replicas: Replicas | None = None,
    stages: Stages = (),
    ballots: Network | None = None,
) -> Schedule:
    """The configured schedule; "auto" searches for the fastest."""
    pipeline = config.pipeline
    microbatches = config.train.num_microbatches
    if pipeline.programs:
        return _stated_order(config)
    if pipeline.schedule == AUTO:
        limits = _auto_limits(config)
        if pipeline.memory_gb is not None:
            limits["held_bytes"] = partial(held_by_rank, stages=stages)
            limits["most_bytes"] = pipeline.memory_gb * 1e9
        limits |= {"replicas": replicas, "ballots": ballots}
        return search(pipeline.stages, microbatches, cost, network, **limits)
    return generate(
        pipeline.schedule,
        pipeline.stages,
        microbatches,
        stages_per_rank=pipeline.stages_per_rank,
        in_flight=pipeline.in_flight,
        memory_limit=pipeline.memory_limit,
    )


def _stated_order(config: Config) -> Schedule:
    """Raises `ConfigError` for one of another number of stages or micro-batches."""
    pipeline = config.pipeline
    order = from_csv("\n".join(pipeline.programs), f"{AUTO}: as planned")
    sizes = order.num_stages, order.num_microbatches
    if sizes != (pipeline.stages, config.train.num_microbatches):
        raise ConfigError(
            f"pipeline.programs are of {order.num_stages} stages and {order.num_microbatches} "
            f"micro-batches, but pipeline.stages is {pipeline.stages} and train.num_microbatches "
            f"{config.train.num_microbatches}; leave them out, or plan again"
        )
    return order


def without_search(
    config: Config,
    cost: Cost,
    network: Network,
    replicas: Replicas | None = None,
    stages: Stages = (),
    ballots: Network | None = None,
) -> Schedule:
    """As `choose_schedule`, but "auto" gives its first candidate: a search takes seconds. In it a
    rank has a link to every rank that it has one to in what a search finds.
    """
    if config.pipeline.schedule != AUTO or config.pipeline.programs:
        return choose_schedule(config, cost, network, replicas, stages, ballots)
    return first_fit(config.pipeline.stages, config.train.num_microbatches, **_auto_limits(config))


def _auto_limits(config: Config) -> dict[str, Any]:
    return {
        "memory_limit": config.pipeline.memory_limit,
        "stages_per_rank": config.pipeline.stages_per_rank,
    }


def forecast(
    config: Config,
    layers: LayerCosts | None = None,
    network: Network | None = None,
    choose: ScheduleChoice = choose_schedule,
    hosts: Sequence[Host] = (),
) -> Forecast:
    """Cut, schedule, check and simulate. Only a user's own model needs `layers`; `hosts` are as in
    `simulate`.

    Raises `ConfigError` for sizes that do not fit, `ScheduleError` for a schedule that cannot run,
    `ProfileError` for a network that lacks a link between two ranks.
    """
    placement = placement_of(config)  # first: it names machines where links are missing
    if placement is not None:
        hosts = hosts or placement.hosts
    shaped = config.transport.shape if network is None else None
    network = network or configured_network(config, config.network_profile)
    _check_links(config, network)
    check_vocabulary(config)
    cut, cost, costs, stages = _cut(config, layers, network, placement)
    replicas = replicas_of(config, cost)
    cost = with_exchange(config, cost)
    ballots = ballots_over(config, network, shaped)
    order = choose(config, cost, network, replicas, stages, ballots)
    schedule = _lowered(order, cost, replicas)
    memory = _checked_memory(config, schedule, stages, searched=choose is not without_search)
    a_step = partial(simulate, schedule, cost, network, hosts, ballots=ballots, costs=costs)
    timeline = a_step(replicas=replicas)
    return Forecast(
        split=cut,
        schedule=schedule,
        eval_schedule=evaluation_schedule(schedule),
        cost=cost,
        network=network,
        timeline=timeline,
        replicas=replicas,
        agreeing_share=agreeing_share(config),
        step_us=mean_step_us(config, timeline, a_step, replicas),
        memory=memory,
        costs=costs,
    )


def _checked_memory(
    config: Config, schedule: Schedule, stages: Stages, *, searched: bool
) -> tuple[RankMemory, ...]:
    """What each rank holds; raises `ConfigError` if that is more than `pipeline.memory_gb`.

    If "auto" has not been searched yet, it is refused only if none of its schedules would fit.
    """
    if not stages:
        return ()
    memory = peak_memory(schedule, stages)
    least = memory
    # The search itself keeps to the limit; what stands in for it here may be over it.
    if config.pipeline.schedule == AUTO and not searched:
        least = peak_memory(leanest_of_auto(config), stages)
    check_fits(config, least, held_by_transformer)
    return memory


def mean_step_us(
    config: Config, timeline: Timeline, a_step: Callable[..., Timeline], replicas: Replicas | None
) -> float:
    """`timeline` is a step at which `replicas` exchange something; `a_step(replicas=...)` simulates
    another.
    """
    share = agreeing_share(config)
    if replicas is None or share == 1:
        return timeline.step_us
    apart = a_step(replicas=Replicas(silent(replicas.count)))
    return share * timeline.step_us + (1 - share) * apart.step_us


def _check_links(config: Config, network: Network) -> None:
    # A server of its own is behind all machines of the run.
    hosts_of_servers = [rank + 1 for rank in server_ranks(config)]
    network.check(max([config.num_machines, *hosts_of_servers]))


def _cut(
    config: Config,
    layers: LayerCosts | None,
    network: Network,
    placement: Placement | None,
) -> tuple[tuple[int, ...], Cost, tuple[Cost, ...], Stages]:
    """Layers a stage, what the stages cost, the same by replica where machines differ, and what
    they hold.
    """
    if not config.model.family.computes:
        cut, cost, stages = _cut_replay(config, network)
        return cut, cost, (), stages
    whole = layers or transformer_costs(config)
    cut, cost, stages = _cut_model(config, whole)
    if placement is None:
        return cut, cost, (), stages
    costs = costs_on(config, placement, partial(_cost_on, config, whole, cut))
    return cut, slowest(costs), costs, stages


def _cut_model(config: Config, whole: LayerCosts) -> tuple[tuple[int, ...], Cost, Stages]:
    """Layers a stage, and what the stages cost and hold; nobody may have asked what they hold."""
    layers = on_ranks(config, whole)
    cut = choose_split(config, layers)
    cost = stage_cost(layers, cut, recompute=config.pipeline.recompute)
    stages: Stages = ()
    if layers.memory_of is not None:
        stages = in_run(config, layers.memory_of(cut), server_ranks(config))
    return cut, at_boundaries(config, cost), stages


def _cost_on(config: Config, whole: LayerCosts, cut: tuple[int, ...], machine: Machine) -> Cost:
    """What all stages would take on `machine`."""
    layers = on_ranks(config, layers_on(config, whole, machine))
    return at_boundaries(config, stage_cost(layers, cut, recompute=config.pipeline.recompute))


def _cut_replay(config: Config, network: Network) -> tuple[tuple[int, ...], Cost, Stages]:
    """One layer a stage; none holds anything. Raises `ConfigError` for a limit of memory."""
    refuse_memory_of_replay(config)
    return (1,) * config.pipeline.stages, replay_cost(config, network), ()


def _lowered(order: Schedule, cost: Cost, replicas: Replicas | None) -> Schedule:
    """With what is sent and exchanged, and checked."""
    schedule = lower(order, tied=cost.tied_bytes > 0, reduce=replicas is not None)
    check(schedule)
    return schedule


def evaluation_schedule(training: Schedule) -> Schedule:
    """For stages that live where they train."""
    forward = evaluation(training.rank_of_stage, training.num_microbatches)
    schedule = lower(forward, step=False)
    check(schedule)
    return schedule


def held_by_transformer(config: Config) -> int:
    """Bytes of the fullest rank, by formula; with "auto" those of the schedule that holds least."""
    check_vocabulary(config)
    _, cost, stages = _cut_model(config, transformer_costs(config))
    if config.pipeline.schedule == AUTO:
        return most_held(leanest_of_auto(config), stages)
    return most_held(choose_schedule(config, cost, Network()), stages)


def leanest_of_auto(config: Config) -> Schedule:
    """Of the schedules that "auto" chooses from, one that holds least."""
    pipeline = config.pipeline
    return leanest(pipeline.stages, config.train.num_microbatches, pipeline.stages_per_rank)


def with_exchange(config: Config, cost: Cost) -> Cost:
    """`cost` with what replicas send each other of a stage, in place of its parameters in fp32:
    rounded as configured, and of one fragment if fragments take turns.

    What comes back is not rounded if it is parameters: from a sharded optimizer or a stale server.
    """
    settings = config.data_parallel
    plain = tuple(size // settings.fragments for size in cost.reduce_bytes)
    rounded = tuple(wire_bytes(settings.wire, size // _FLOAT_BYTES) for size in plain)
    rounds_answer = KINDS[settings.kind].rounds_answer and settings.staleness == 0
    return replace(cost, reduce_bytes=rounded, gather_bytes=rounded if rounds_answer else plain)


def replicas_of(config: Config, cost: Cost) -> Replicas | None:
    """How replicas exchange `cost.reduce_bytes`, still in fp32, at a step at which they do; None
    for one replica.
    """
    settings = config.data_parallel
    kind = settings.active_kind
    if kind.pattern is None:
        return None
    delayed = settings.delay or settings.overlap
    pattern = kind.pattern
    if delayed and kind.late_pattern is not None:
        pattern = kind.late_pattern
    most_bytes = max(cost.reduce_bytes) // settings.fragments
    num_chunks = -(-most_bytes // settings.chunk_bytes)
    num_parts = max(1, min(_MOST_PARTS, num_chunks, _affordable_parts(config)))
    rounds = exchange(
        pattern,
        settings.replicas,
        num_parts,
        barrier=config.train.waits_for_verdict,  # on the norm, before anything is sent back
        stale=settings.staleness > 0,
    )
    return Replicas(rounds, server_ranks(config), delayed=delayed)


def _affordable_parts(config: Config) -> int:
    """Parts of which a simulation still takes seconds: 32 for 4 stages of 32 replicas."""
    replicas = config.data_parallel.replicas
    has_server = config.data_parallel.active_kind.has_server
    of_a_part = num_messages(replicas, 1, has_server=has_server)
    return _MOST_MESSAGES // (of_a_part * config.pipeline.stages)


def ballots_over(
    config: Config,
    network: Network,
    shaped: str | None = None,
) -> Network | None:
    """The network that a step's vote crosses; None if no step waits for it.

    `shaped` is a profile that the transport imitates: it slows what ranks send each other, but not
    what they send to the coordinator.
    """
    if not config.train.waits_for_verdict:
        return None
    assumed = config.predict.network or config.predict.machines
    if shaped is not None and assumed is None:
        return Network()
    return network


def server_ranks(config: Config) -> tuple[int, ...]:
    """The rank of each stage's parameter server: a rank of replica 0 if it is embedded, otherwise
    one after all ranks of the run. Empty without servers.
    """
    settings = config.data_parallel
    if not settings.active_kind.has_server:
        return ()
    stages = range(config.pipeline.stages)
    servers = [0 if settings.servers == "one" else stage for stage in stages]
    if settings.address:
        return tuple(config.num_machines + server for server in servers)
    return tuple(server % config.pipeline.ranks for server in servers)


def agreeing_share(config: Config) -> float:
    """The share of the steps at which replicas exchange something."""
    settings = config.data_parallel
    if not settings.active_kind.has_inner_steps:
        return 1.0
    return settings.fragments / settings.inner_steps


def choose_split(config: Config, layers: LayerCosts) -> tuple[int, ...]:
    """Layers a stage: as configured, or "auto" balanced by cost. Raises `ConfigError` if they are
    not as many as the model's.
    """
    configured = config.pipeline.split
    num_layers = len(layers.forward_s)
    if isinstance(configured, str):
        pairs = zip(layers.forward_s, layers.backward_s, strict=True)
        costs = [forward_s + backward_s for forward_s, backward_s in pairs]
        return split(costs, config.pipeline.stages)
    if sum(configured) != num_layers:
        parts = ""
        if config.model.is_transformer:
            parts = " (an embedding, model.num_layers blocks and a head)"
        raise ConfigError(
            f"pipeline.split {list(configured)} places {sum(configured)} layers, but the model has "
            f"{num_layers}{parts}"
        )
    return configured
