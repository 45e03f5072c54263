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
from dpipe.config.wires import wire_of
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
from dpipe.plan.costs import (
    LayerCosts,
    in_slices,
    on_ranks,
    replay_cost,
    stage_cost,
    transformer_costs,
)
from dpipe.plan.deltas import check_deltas
from dpipe.plan.on_machines import Placement, costs_on, layers_on, placement_of, slowest
from dpipe.plan.partition import Cut, split, split_by_stage
from dpipe.plan.tensor_parallel import at_boundaries, check_vocabulary
from dpipe.schedule.check import check
from dpipe.schedule.exchange import exchange, silent
from dpipe.schedule.generate import AUTO, evaluation, generate, leanest
from dpipe.schedule.lower import lower
from dpipe.schedule.schedule import Schedule
from dpipe.schedule.segments import segments_of
from dpipe.schedule.size import num_messages
from dpipe.schedule.text import from_csv
from dpipe.search.auto import first_fit, search
from dpipe.search.inner_steps import fewest_inner_steps
from dpipe.search.slices import search_slices
from dpipe.search.wire_choice import choose_formats
from dpipe.timeline.cost import Cost
from dpipe.timeline.exchanges import Part, Replicas
from dpipe.timeline.simulate import simulate
from dpipe.timeline.span import Timeline
from dpipe.wire.format import HopFormats, wire_bytes

# Finer parts make an exchange faster by less than one of them, and its simulation slower.
_MOST_PARTS = 32
_MOST_MESSAGES = 1 << 19
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Forecast:
    """What a run will do, before it starts."""

    split: Cut
    schedule: Schedule  # of a training step, lowered and checked
    eval_schedule: Schedule  # forward only
    cost: Cost  # by stage and hop
    network: Network  # that the prediction assumes
    timeline: Timeline  # a steady step; replicas exchange something in it, if they ever do
    replicas: Replicas | None  # how they exchange at such a step; None without replicas
    agreeing_share: float  # of the steps that are such steps
    inner_steps: int  # of "local-sgd", between two averages of a fragment
    step_us: float  # the step time, a mean over all steps
    formats: HopFormats  # between stages
    costs: tuple[Cost, ...] = ()  # by replica, where machines differ, or cuts
    splits: tuple[Cut, ...] = ()  # by replica, where they are cut differently
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
        if pipeline.sequence_slices > 1:
            del limits["stages_per_rank"]  # one: the configuration allows no other
            number = pipeline.sequence_slices
            return search_slices(pipeline.stages, microbatches, number, cost, network, **limits)
        return search(pipeline.stages, microbatches, cost, network, **limits)
    return generate(
        pipeline.schedule,
        pipeline.stages,
        microbatches,
        stages_per_rank=pipeline.stages_per_rank,
        in_flight=pipeline.in_flight,
        memory_limit=pipeline.memory_limit,
        num_slices=pipeline.sequence_slices,
    )


def _stated_order(config: Config) -> Schedule:
    """Raises `ConfigError` for one of another number of stages or micro-batches."""
    pipeline = config.pipeline
    slices = pipeline.sequence_slices
    order = from_csv("\n".join(pipeline.programs), f"{AUTO}: as planned", slices)
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
    if config.pipeline.sequence_slices > 1:
        return leanest_of_auto(config)
    limits = _auto_limits(config)
    return first_fit(config.pipeline.stages, config.train.num_microbatches, **limits)


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
    hosts = hosts or _crowded(placement)
    shaped = config.transport.shape if network is None else None
    network = network or configured_network(config, config.network_profile)
    _check_sizes(config, network)
    formats = config.pipeline.wire_formats or _auto_formats(config, layers, network, hosts)
    cut, cost, costs, stages = _cut(config, formats, layers, network, placement)
    replicas, cost = _exchanging(config, cost, layers)
    ballots = ballots_over(config, network, shaped)
    order = choose(config, cost, network, replicas, stages, ballots)
    schedule = _lowered(order, cost, replicas)
    memory = _checked_memory(config, schedule, stages, searched=choose is not without_search)
    a_step = partial(simulate, schedule, cost, network, hosts, ballots=ballots, costs=costs)
    steady = _steady(config, a_step, replicas)
    return Forecast(
        split=cut,
        schedule=schedule,
        eval_schedule=evaluation_schedule(schedule),
        cost=cost,
        network=network,
        replicas=replicas,
        **steady,
        memory=memory,
        formats=formats,
        costs=costs,
        splits=config.pipeline.splits,
    )


def _crowded(placement: Placement | None) -> Sequence[Host]:
    return () if placement is None else placement.hosts


def _exchanging(
    config: Config, cost: Cost, layers: LayerCosts | None
) -> tuple[Replicas | None, Cost]:
    """How replicas exchange, and the cost with what they send."""
    replicas = replicas_of(config, cost)
    if replicas is not None and config.pipeline.splits:
        # What a stage has is no longer what its replicas have in common.
        parts = parts_of(config, layers or transformer_costs(config))
        replicas = replace(replicas, parts=parts)
    return replicas, with_exchange(config, cost)


def _auto_formats(
    config: Config, layers: LayerCosts | None, network: Network, hosts: Sequence[Host]
) -> HopFormats:
    """What wire "auto" takes, where the layers and links are these."""

    def step_us(formats: HopFormats) -> float:
        stated = config.with_(pipeline__wire=wire_of(formats))
        return forecast(stated, layers, network, without_search, hosts).step_us

    num_hops = config.pipeline.stages - 1
    return choose_formats(config.pipeline.wire_allowed, num_hops, step_us)


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


def _steady(
    config: Config, a_step: Callable[..., Timeline], replicas: Replicas | None
) -> dict[str, Any]:
    """What `Forecast` says of the steps of a run, which `a_step(replicas=...)` simulates."""
    timeline = a_step(replicas=replicas)
    settings = config.data_parallel
    if settings.averages_when_cheap:
        assert replicas is not None, "local-sgd has replicas"
        apart = a_step(replicas=Replicas(silent(replicas.count)))
        chosen = fewest_inner_steps(apart.step_us, timeline.step_us, settings.fragments)
        config = config.with_(data_parallel__inner_steps=chosen)
    return {
        "timeline": timeline,
        "agreeing_share": agreeing_share(config),
        "inner_steps": config.data_parallel.known_inner_steps,
        "step_us": mean_step_us(config, timeline, a_step, replicas),
    }


def _check_sizes(config: Config, network: Network) -> None:
    check_deltas(config)
    check_vocabulary(config)
    # A server of its own is behind all machines of the run.
    hosts_of_servers = [rank + 1 for rank in server_ranks(config)]
    network.check(max([config.num_machines, *hosts_of_servers]))


def _cut(
    config: Config,
    formats: HopFormats,
    layers: LayerCosts | None,
    network: Network,
    placement: Placement | None,
) -> tuple[Cut, Cost, tuple[Cost, ...], Stages]:
    """Layers a stage, what the stages cost, the same by replica where machines differ, and what
    they hold.
    """
    if not config.model.family.computes:
        cut, cost, stages = _cut_replay(config, formats, network)
        return cut, cost, (), stages
    whole = layers or transformer_costs(config)
    if config.pipeline.splits:
        return _cut_apart(config, formats, whole, placement)
    cut, cost, stages = _cut_model(config, formats, whole, placement)
    if placement is None:
        return cut, cost, (), stages
    cost_on = partial(_cost_on, config, formats, whole, cut)
    costs = costs_on(config, placement, cost_on)
    return cut, slowest(costs), costs, stages


def _cut_model(
    config: Config, formats: HopFormats, whole: LayerCosts, placement: Placement | None = None
) -> tuple[Cut, Cost, Stages]:
    """Layers a stage, and what the stages cost and hold; nobody may have asked what they hold."""
    layers = in_slices(config, on_ranks(config, whole))
    seconds_by_stage = None
    if placement is not None:
        seconds_by_stage = _seconds_by_stage(config, whole, placement)
    cut = choose_split(config, layers, seconds_by_stage)
    cost = stage_cost(layers, cut, formats, recompute=config.pipeline.recompute)
    stages: Stages = ()
    if layers.memory_of is not None:
        stages = in_run(config, layers.memory_of(cut), server_ranks(config))
    return cut, at_boundaries(config, cost), stages


def _cut_apart(
    config: Config, formats: HopFormats, whole: LayerCosts, placement: Placement | None
) -> tuple[Cut, Cost, tuple[Cost, ...], Stages]:
    """As `_cut`, with replicas that are cut differently: what stages hold is that of the replica
    that has most of the model there.
    """
    layers = in_slices(config, on_ranks(config, whole))
    cuts = config.pipeline.splits
    costs = []
    for replica, cut in enumerate(cuts):
        _refuse_other_number(config, "splits", cut, len(layers.forward_s))
        if placement is None:
            cost = stage_cost(layers, cut, formats, recompute=config.pipeline.recompute)
            costs.append(at_boundaries(config, cost))
        else:
            cost_on = partial(_cost_on, config, formats, whole, cut)
            every = costs_on(config, placement, cost_on)
            costs.append(every[replica])
    held: Stages = ()
    if layers.memory_of is not None:
        by_replica = [in_run(config, layers.memory_of(cut)) for cut in cuts]
        held = fullest(by_replica, [cost.reduce_bytes for cost in costs])
    return cuts[0], slowest(costs), tuple(costs), held


def fullest(by_replica: Sequence[Stages], parameter_bytes: Sequence[Sequence[int]]) -> Stages:
    """Each stage as in the replica that has most parameters there."""
    # A bound from above: no replica holds more on any rank, and a rank's limit is one for all.
    # By parameters, because what a layer keeps of a micro-batch grows with them.
    stages = []
    for stage, sizes in enumerate(zip(*parameter_bytes, strict=True)):
        most = sizes.index(max(sizes))
        stages.append(by_replica[most][stage])
    return tuple(stages)


def _cost_on(
    config: Config,
    formats: HopFormats,
    whole: LayerCosts,
    cut: Cut,
    machine: Machine,
) -> Cost:
    """What all stages would take on `machine`."""
    on_machine = layers_on(config, whole, machine)
    layers = in_slices(config, on_ranks(config, on_machine))
    cost = stage_cost(layers, cut, formats, recompute=config.pipeline.recompute)
    return at_boundaries(config, cost)


def _cut_replay(config: Config, formats: HopFormats, network: Network) -> tuple[Cut, Cost, Stages]:
    """One layer a stage; none holds anything. Raises `ConfigError` for a limit of memory."""
    refuse_memory_of_replay(config)
    cut = (1,) * config.pipeline.stages
    cost = replay_cost(config, formats, network)
    return cut, cost, ()


def _lowered(order: Schedule, cost: Cost, replicas: Replicas | None) -> Schedule:
    """With what is sent and exchanged, and checked."""
    schedule = lower(
        order,
        tied=cost.tied_bytes > 0,
        reduce=replicas is not None,
        frozen=cost.frozen,
    )
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
    formats = HopFormats.alike("none", config.pipeline.stages - 1)  # no format holds memory
    _, cost, stages = _cut_model(config, formats, transformer_costs(config))
    if config.pipeline.schedule == AUTO:
        return most_held(leanest_of_auto(config), stages)
    return most_held(choose_schedule(config, cost, Network()), stages)


def leanest_of_auto(config: Config) -> Schedule:
    """Of the schedules that "auto" chooses from, one that holds least."""
    pipeline = config.pipeline
    microbatches = config.train.num_microbatches
    of_slices = pipeline.sequence_slices
    return leanest(pipeline.stages, microbatches, pipeline.stages_per_rank, of_slices)


def with_exchange(config: Config, cost: Cost) -> Cost:
    """`cost` with what replicas send each other of a stage, in place of its parameters in fp32:
    rounded as configured, and of one fragment if fragments take turns.

    What comes back is not rounded if it is parameters: from a sharded optimizer or a stale server.
    """
    exchanged = [_exchanged(config, size) for size in cost.reduce_bytes]
    reduce_bytes, gather_bytes = zip(*exchanged, strict=True)
    return replace(cost, reduce_bytes=reduce_bytes, gather_bytes=gather_bytes)


def parts_of(config: Config, layers: LayerCosts) -> tuple[Part, ...]:
    """What replicas that are cut differently exchange: each segment of the layers."""
    parameter_bytes = on_ranks(config, layers).parameter_bytes
    parts = []
    for segment in segments_of(config.pipeline.splits):
        size = sum(parameter_bytes[layer] for layer in segment.layers)
        parts.append(Part(segment.stages, *_exchanged(config, size)))
    return tuple(parts)


def _exchanged(config: Config, size: int) -> tuple[int, int]:
    """Of so many bytes of parameters: sent to who averages them, and back."""
    settings = config.data_parallel
    plain = size // settings.fragments
    rounded = wire_bytes(settings.wire, plain // _FLOAT_BYTES)
    rounds_answer = KINDS[settings.kind].rounds_answer and settings.staleness == 0
    return rounded, rounded if rounds_answer else plain


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
    most_bytes = max(cost.reduce_bytes) // settings.fragments  # of a part no more than of a stage
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
    return settings.fragments / settings.known_inner_steps


def _seconds_by_stage(config: Config, whole: LayerCosts, placement: Placement) -> list[list[float]]:
    """By stage, what each layer takes on the machine of that stage; with replicas, which are cut
    alike, on the slowest of its machines.
    """
    num_ranks = config.pipeline.ranks
    seconds: dict[str, list[float]] = {}
    for name in placement.seats:
        if name not in seconds:
            machine = placement.cluster.machine(name)
            on_machine = layers_on(config, whole, machine)
            seconds[name] = _seconds_of(on_ranks(config, on_machine))
    by_stage = []
    for stage in range(config.pipeline.stages):
        # As `costs_on` has it: stages are dealt out to ranks in turn.
        names = placement.seats[stage % num_ranks :: num_ranks]
        of_layers = zip(*[seconds[name] for name in names], strict=True)
        by_stage.append(list(map(max, of_layers)))
    return by_stage


def _seconds_of(layers: LayerCosts) -> list[float]:
    pairs = zip(layers.forward_s, layers.backward_s, strict=True)
    return [forward_s + backward_s for forward_s, backward_s in pairs]


def choose_split(
    config: Config, layers: LayerCosts, by_stage: Sequence[Sequence[float]] | None = None
) -> Cut:
    """Layers a stage: as configured, or "auto" balanced by cost; `by_stage` are the seconds that
    each layer takes on the machine of each stage, where these differ. Raises `ConfigError` if they
    are not as many as the model's.
    """
    configured = config.pipeline.split
    num_layers = len(layers.forward_s)
    if isinstance(configured, str):
        if by_stage is None:
            return split(_seconds_of(layers), config.pipeline.stages)
        return split_by_stage(by_stage)
    _refuse_other_number(config, "split", configured, num_layers)
    return configured


def _refuse_other_number(config: Config, key: str, cut: Sequence[int], num_layers: int) -> None:
    if sum(cut) == num_layers:
        return
    parts = ""
    if config.model.is_transformer:
        parts = " (an embedding, model.num_layers blocks and a head)"
    raise ConfigError(
        f"pipeline.{key} {list(cut)} places {sum(cut)} layers, but the model has {num_layers}"
        f"{parts}"
    )
