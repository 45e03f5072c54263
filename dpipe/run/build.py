"""The composition root: a configuration and a process's rank become a rank that trains.

run_rank   draft the run plan -> join -> open links -> assemble -> train -> trace and summary
assemble   stages, data parallelism, update and executor, put together as a trainer's `Job`
"""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from dpipe.config.load import Config
from dpipe.config.wires import AUTO_WIRE, wire_of
from dpipe.coordinator.base import Coordination
from dpipe.coordinator.shared import DECISION
from dpipe.data.feed import Feed, feed_of
from dpipe.data.stream import SampleStream
from dpipe.dataparallel.base import DataParallel
from dpipe.engine.executor import Executor, Parts
from dpipe.engine.hop_codecs import HopCodecs, SampleCaches
from dpipe.engine.recorder import Recorder
from dpipe.engine.rehearsal import rehearse
from dpipe.engine.replay_ring import Ring, ring_peers
from dpipe.engine.trainer import Job, Trainer
from dpipe.engine.update import Update
from dpipe.engine.versions import in_versions
from dpipe.errors import RunAborted, TransferError
from dpipe.plan.forecast import without_search
from dpipe.plan.machine import refuse_more_than_machine
from dpipe.plan.recurring import RecurringFeed
from dpipe.plan.run_plan import RunPlan, draft, local_device, measure_layers
from dpipe.probe import launcher_costs
from dpipe.processes.environment import ProcessInfo, environment, load_kernels_at_start
from dpipe.processes.signals import stop_on_signals
from dpipe.ranks import ParallelRanks
from dpipe.report.display import Display, lasting
from dpipe.report.metrics import Metrics
from dpipe.report.prometheus import PrometheusPort
from dpipe.report.rows import OnRow, Row
from dpipe.report.tracking import Tracking
from dpipe.run.agreement import attended, data_parallel
from dpipe.run.join import joined, listening_on, security_of
from dpipe.run.parameter_servers import ServedEpoch, Servers, parameter_servers
from dpipe.run.results import Outcome, shared_cores, show_result, utilisation
from dpipe.run.resume import agreed_start, find_start, restore, stages_at
from dpipe.run.stages import TiedWeights, counted_elsewhere, make_stage, tied_weights
from dpipe.run.tensor_groups import as_executed, tensor_group
from dpipe.schedule.generate import AUTO
from dpipe.schedule.links import neighbours
from dpipe.schedule.segments import segments_of
from dpipe.schedule.text import from_csv, to_csv
from dpipe.stage.base import PipelineStage
from dpipe.stage.tensor_group import TensorGroup
from dpipe.store.identity import RunIdentity, agreed_identity, claimed
from dpipe.store.run_folder import (
    chosen_before,
    logging_to,
    opened,
    refuse_folder,
    save_configuration,
    with_chosen,
)
from dpipe.streams import Streams, streams_of
from dpipe.trackers.kinds import refuse_missing
from dpipe.transport.base import Transport
from dpipe.transport.kinds import TRANSPORTS
from dpipe.wire.format import HopFormats

LOG = logging.getLogger("dpipe")


def run_rank(
    config: Config,
    process: ProcessInfo,
    *,
    resume: bool = False,
    fallback: bool = False,
    join_s: float | None = None,
    console: Console | None = None,
    on_row: OnRow | None = None,
) -> None:
    """Train one rank. Nothing is written, and nobody is talked to, before the configuration, its
    files and its model have been checked.

    On rank 0 `on_row` gets each row of metrics, after it was written.
    """
    console = console or Console(file=lasting(sys.stdout))
    run_plan = _check(config, process, resume)
    config = run_plan.config
    rank = process.rank
    # Before anybody is met: a damaged checkpoint ends this rank alone, with exit code 2.
    start = find_start(config, run_plan, rank, fallback=fallback) if resume else None
    streams = streams_of(config.node.device)
    joining = joined(config, process, peers_of(run_plan, rank), join_s, streams)
    with _in_folder(config, resume, rank, joining) as (folder, coordinator, transport):
        run_plan = adopt_plan_of_rank_0(run_plan, coordinator)
        config = with_chosen(config, run_plan.config)
        if resume:
            start = agreed_start(config, run_plan, start, coordinator, fallback)
        first_step = 0 if start is None else start.step
        with ExitStack() as stack:
            resources = resources_of(run_plan, process, coordinator, transport, streams, stack)
            job = assemble(run_plan, resources, stack)
            restore(start, job.stages, job.update, job.here)
            start = None  # as large as the model and its moments
            job = _with_metrics(job, config, folder, first_step, console, on_row, stack)
            outcome = _train(job, resources, config, first_step)
        if not rank:
            show_result(run_plan, outcome, folder, console)


@contextmanager
def _in_folder(
    config: Config,
    resume: bool,
    rank: int,
    joining: AbstractContextManager[tuple[Coordination, Transport]],
) -> Iterator[tuple[Path, Coordination, Transport]]:
    """In this order: what ranks say while they join is in the folder's log, and a folder that was
    made for ranks that could not join is taken back.
    """
    with (
        opened(config, resume, rank) as folder,
        logging_to(folder, rank, config.run),
        joining as (coordinator, transport),
    ):
        yield folder, coordinator, transport


def _check(config: Config, process: ProcessInfo, resume: bool) -> RunPlan:
    if process.rank == 0:
        refuse_folder(config, resume)
        refuse_missing(config.run.trackers)
    return checked_plan(config, process)


def checked_plan(config: Config, process: ProcessInfo) -> RunPlan:
    """The run plan, with this process's device. Raises for all that can be wrong with what the user
    gave, but for the run's folder.
    """
    torch.set_num_threads(config.node.threads)
    # Before CUDA is used at all: CUDA reads the setting when it is initialised.
    if TRANSPORTS[config.transport.kind].between_gpus:
        load_kernels_at_start()
    config = config.with_(node__device=local_device(config.node.device, process.local_rank))
    # Every rank drafts, and they are alike; only what takes long is left to rank 0.
    probed = launcher_costs.from_text(config.digest(), process.layer_costs)
    run_plan = draft(config, probed=probed, choose=without_search, predicts_memory=False)
    refuse_more_than_machine(run_plan, [process.rank])
    return run_plan


def peers_of(run_plan: RunPlan, rank: int) -> set[int]:
    """The ranks that this one has links to."""
    config = run_plan.config
    here = config.ranks_of(rank)
    # Enough for a schedule that rank 0 finds later: it places the stages alike or, as "zb-v" does,
    # so that each rank has fewer neighbours.
    stages = neighbours(run_plan.forecast.schedule, here.pp_rank)
    across_replicas = not config.data_parallel.active_kind.has_server
    cuts = config.pipeline.splits
    if not cuts:
        peers = here.peers(stages, across_replicas=across_replicas)
        return peers | ring_peers(config, here)
    # Not the ranks of the same stage: another replica may hold other layers there, and its links
    # may not lead to where nothing has to be exchanged.
    peers = here.peers(stages, across_replicas=False)
    for segment in segments_of(cuts):
        holders = here.holders(segment.stages)
        if rank in holders:
            peers |= {*holders} - {rank}
    return peers


def adopt_plan_of_rank_0(run_plan: RunPlan, coordinator: Coordination) -> RunPlan:
    """With a measured split, or "auto" for schedule, wire or inner steps: the model cut by the
    times that rank 0 measures for each layer, and what rank 0 finds best. With predict.machines the
    cut of rank 0, whose file may not be another's. All ranks call it.

    Only rank 0 searches: ranks that share a machine's cores would take many times as long.
    """
    config = run_plan.config
    searches = config.pipeline.schedule == AUTO and not config.pipeline.programs
    picks_formats = config.pipeline.wire == AUTO_WIRE
    estimates = config.pipeline.split == "estimated" and not config.pipeline.splits
    cuts_by_machines = estimates and config.predict.machines is not None
    measures = config.pipeline.split == "measured"
    averages_when_cheap = config.data_parallel.averages_when_cheap
    if not any((measures, searches, picks_formats, cuts_by_machines, averages_when_cheap)):
        return run_plan
    decision = None  # the others' part: they draft again from what rank 0 decides
    if coordinator.rank == 0:
        decision = _decided(run_plan, measures)
    decided = coordinator.share("plan", decision, config.timeouts.transfer, DECISION)[0]
    if decided is None:
        raise TransferError("rank 0 sent no plan, though the configuration leaves it to rank 0")
    decided_s, programs, name, wires, cut, inner_steps = decided
    if cuts_by_machines:
        config = config.with_(pipeline__split=tuple(cut))
    if picks_formats:
        forward, backward = wires
        formats = HopFormats(tuple(forward), tuple(backward))
        config = config.with_(pipeline__wire=wire_of(formats))
    if averages_when_cheap:
        config = config.with_(data_parallel__inner_steps=inner_steps)
    return draft(
        config,
        layer_s=None if decided_s is None else tuple(decided_s),
        probed=run_plan.probed,
        # `draft` checks it as it checks its own
        choose=lambda *_: from_csv(programs, name, config.pipeline.sequence_slices),
        predicts_memory=False,
    )


def _decided(run_plan: RunPlan, measures: bool) -> list[object]:
    """What rank 0 tells the others."""
    config = chosen_before(run_plan.config)
    layer_s = measure_layers(run_plan) if measures else None
    found = draft(config, layer_s=layer_s, probed=run_plan.probed, predicts_memory=False)
    schedule = found.forecast.schedule
    formats = found.forecast.formats
    return [
        layer_s,
        to_csv(schedule),
        schedule.name,
        [formats.forward, formats.backward],
        found.forecast.split,
        found.forecast.inner_steps,
    ]


@dataclass(frozen=True)
class RankResources:
    """What a rank has when it has joined, before it makes its stages."""

    here: ParallelRanks
    coordinator: Coordination
    transport: Transport
    streams: Streams
    recorder: Recorder
    servers: Servers | None  # None without parameter servers
    group: TensorGroup | None  # None on one rank a stage, and for a replay
    wants_stop: Callable[[], bool]
    identity: RunIdentity


def resources_of(
    run_plan: RunPlan,
    process: ProcessInfo,
    coordinator: Coordination,
    transport: Transport,
    streams: Streams,
    stack: ExitStack,
    *,
    stopping: AbstractContextManager[Callable[[], bool]] | None = None,
    identity: RunIdentity | None = None,
    epoch: ServedEpoch | None = None,
) -> RankResources:
    """`stack` closes what is opened here. `stopping` gives what says whether this rank wishes to
    stop, by default a signal; the `identity` of the run is by default that of rank 0's folder.
    `epoch`: where it is one of several of a run.
    """
    config = run_plan.config
    here = config.ranks_of(process.rank)
    servers = stack.enter_context(
        parameter_servers(
            config,
            run_plan.forecast.schedule,
            coordinator,
            listening_on(config, process),
            security_of(config, process),
            epoch,
        )
    )
    # From here on a signal waits for the end of a step; before, there is nothing to save.
    wants_stop = stack.enter_context(stopping or stop_on_signals())
    group = tensor_group(config, here, coordinator)
    recorder = Recorder(process.rank, streams)
    if group is not None:
        group.watch = recorder.exchanging
        stack.callback(group.close)
    return RankResources(
        here=here,
        coordinator=coordinator,
        transport=transport,
        streams=streams,
        recorder=recorder,
        servers=servers,
        group=group,
        wants_stop=wants_stop,
        identity=identity or agreed_identity("run", config, coordinator),
    )


def _with_metrics(
    job: Job,
    config: Config,
    folder: Path,
    first_step: int,
    console: Console,
    on_row: OnRow | None,
    stack: ExitStack,
) -> Job:
    """On rank 0: `job` with metrics that are written, displayed and given to `on_row`.

    All ranks call it when they have been assembled: none has refused then, and only now the folder
    changes. Each marks the place of its checkpoints as this run's.
    """
    job.coordinator.barrier("assembled", job.timeout_s)
    if job.checkpoint_url is not None:
        stack.enter_context(
            claimed(job.checkpoint_url, job.identity, takes_unmarked=first_step > 0)
        )
    if job.here.rank > 0:
        return job
    save_configuration(folder, config)
    display = stack.enter_context(Display(console, first_step, job.train.steps))

    prometheus = None
    if config.node.metrics_port is not None:
        host = config.node.bind or "127.0.0.1"
        prometheus = PrometheusPort(host, config.node.metrics_port)
        stack.callback(prometheus.close)
        LOG.info("metrics for Prometheus at http://%s:%d/metrics", host, prometheus.port)

    tracking = stack.enter_context(_tracking(job, config, folder, first_step))

    def show(row: Row) -> None:
        display.show(row)
        tracking.take(row)
        if prometheus is not None:
            prometheus.take(row)
        if on_row is not None:
            on_row(row)

    tensorboard = job.run.tensorboard
    metrics = Metrics(folder, first_step=first_step, tensorboard=tensorboard, show=show)
    stack.callback(metrics.close)
    return replace(job, on_row=metrics.write)


@contextmanager
def _tracking(job: Job, config: Config, folder: Path, first_step: int) -> Iterator[Tracking]:
    with Tracking(config, folder, environment()) as tracking:
        yield tracking
        # Not of a run that has failed: some ranks have uploaded no trace.
        since_1970_ns = time.time_ns() - time.perf_counter_ns()
        clock_us = (since_1970_ns - job.coordinator.clock_offset_ns) / 1e3
        tracking.trace(folder, config.world_size, first_step=first_step, clock_us=clock_us)


def _train(job: Job, resources: RankResources, config: Config, first_step: int) -> Outcome:
    resources.transport.rehearse(partial(rehearse, job, first_step))
    trainer = Trainer(job, first_step)
    stopped = trainer.run()
    hosts = shared_cores(config, job.coordinator)
    return Outcome(stopped, trainer.next_step - first_step, hosts)


def _replicas(
    run_plan: RunPlan,
    resources: RankResources,
    stages: Mapping[int, PipelineStage],
    tied: TiedWeights,
) -> DataParallel:
    return data_parallel(
        run_plan.config,
        resources.here,
        stages,
        resources.transport,
        resources.coordinator,
        counted_elsewhere(stages, tied, resources.here),
        resources.servers,
        [name for name, _ in tied.values()],
        last_layer=run_plan.last_layer,
    )


def assemble(run_plan: RunPlan, resources: RankResources, stack: ExitStack) -> Job:
    """A rank's stages, what runs them, and what trains them.

    `stack` closes what is opened here; if it unwinds with an error, links and group fail first, so
    that no peer waits for this rank.
    """
    config = run_plan.config
    here = resources.here
    stages = _make_stages(run_plan, resources)
    tied = tied_weights(run_plan, stages)
    replicas = _replicas(run_plan, resources, stages, tied)
    # An exit stack runs the last first.
    stack.callback(replicas.close)
    # Unwound before `close`, where a thread may wait for a peer until its deadline.
    stack.push(partial(_fail_with, resources.group))
    stack.push(partial(_fail_with, resources.transport))
    stack.enter_context(attended(replicas, resources.coordinator))
    return Job(
        here=here,
        train=config.train,
        run=config.run,
        context=config.model.context,
        configuration=config.shared(),
        schedule=run_plan.forecast.schedule,
        eval_schedule=run_plan.forecast.eval_schedule,
        stages=stages,
        executor=_make_executor(run_plan, resources, stages, replicas, tied),
        recorder=resources.recorder,
        data_parallel=replicas,
        update=_make_update(config, resources, stages, replicas),
        feed=_make_feed(run_plan, here, stages, stack),
        coordinator=resources.coordinator,
        timeout_s=config.timeouts.transfer,
        checkpoint_url=run_plan.checkpoint_url,
        wants_stop=resources.wants_stop,
        identity=resources.identity,
        streams=resources.streams,
        utilisation=partial(utilisation, config, resources.streams.device),
    )


def _make_stages(run_plan: RunPlan, resources: RankResources) -> dict[int, PipelineStage]:
    here = resources.here
    recorder = resources.recorder
    num_bytes = run_plan.config.replay.exchange_bytes
    # For any rank, because it opens nothing: only a replayed stage calls it.
    ring = Ring(resources.transport, here, num_bytes, recorder.exchanging)
    make = partial(
        make_stage,
        run_plan,
        replica=here.dp_rank,
        group=resources.group,
        exchange=ring,
        timed=recorder.part,
    )
    schedule = run_plan.forecast.schedule
    stages = stages_at(schedule, here.pp_rank)
    return {index: in_versions(partial(make, index), schedule) for index in stages}


def _make_update(
    config: Config,
    resources: RankResources,
    stages: Mapping[int, PipelineStage],
    replicas: DataParallel,
) -> Update:
    return Update(
        stages,
        config.train,
        replicas,
        gather=resources.coordinator.gather,
        timeout_s=config.timeouts.transfer,
        here=resources.here,
        # A rank that is so many steps behind has not voted yet, and is not to be waited for.
        lag=max(1, config.data_parallel.staleness),
        rejects=config.data_parallel.reject is not None,
        timed=resources.recorder.part,
    )


def _codecs(run_plan: RunPlan, caches: SampleCaches) -> HopCodecs:
    config = run_plan.config
    evaluated = None
    if config.train.eval_wire is not None:
        num_hops = run_plan.forecast.schedule.num_stages - 1
        evaluated = HopFormats.alike(config.train.eval_wire, num_hops)
    return HopCodecs(run_plan.forecast.formats, caches, in_evaluation=evaluated)


def _make_executor(
    run_plan: RunPlan,
    resources: RankResources,
    stages: Mapping[int, PipelineStage],
    replicas: DataParallel,
    tied: TiedWeights,
) -> Executor:
    config = run_plan.config
    here = resources.here
    links = run_plan.delta_links(here.dp_rank)
    folder = Path(config.run.folder)
    num_stages = run_plan.forecast.schedule.num_stages
    # Then there is nobody to exchange with: the executor adds the two up.
    both_ends = (tied[0][1], tied[-1][1]) if len(tied) == 2 else None
    return Executor(
        Parts(
            here.pp_rank,
            as_executed(config, stages, resources.group, num_stages),
            resources.transport,
            _codecs(run_plan, links.caches(here.pp_rank, folder)),
            run_plan.boundaries_of(here.dp_rank),
            replicas,
            resources.recorder,
            tied={end % num_stages: weight for end, (_, weight) in tied.items()},
            tied_here=both_ends,
            pp_group=here.pp_group,
            streams=resources.streams,
            check=_raising_once_over(resources.coordinator),
        )
    )


def _raising_once_over(coordinator: Coordination) -> Callable[[], None]:
    """A rank that computes for long between two messages must not go on for nobody."""
    over: list[RunAborted] = []
    coordinator.on_abort(over.append)

    def check() -> None:
        if over:
            raise over[0]

    return check


def _make_feed(
    run_plan: RunPlan,
    here: ParallelRanks,
    stages: Mapping[int, PipelineStage],
    stack: ExitStack,
) -> Feed:
    """Only the ranks of the first stage, which reads inputs, and the last, which reads targets,
    need data.
    """
    last = run_plan.forecast.schedule.num_stages - 1
    corpus = run_plan.corpus if 0 in stages or last in stages else None
    if isinstance(corpus, SampleStream):
        stack.callback(corpus.close)
    feed = feed_of(run_plan.config, corpus, here.dp_rank, here.dp_size)
    sequences = run_plan.sequences
    if sequences is None:
        return feed
    train = run_plan.config.train
    cut = here.dp_rank, here.dp_size
    return RecurringFeed(feed, sequences, train.batch_size, train.num_microbatches, *cut)


def _fail_with(
    links: Transport | TensorGroup | None,
    kind: type[BaseException] | None,
    error: BaseException | None,
    _: object,
) -> None:
    """An exit callback: on an error, nobody shall wait for this rank."""
    if error is None or links is None:
        return
    # Links raise what they are given, in whichever thread waits: a KeyboardInterrupt is not theirs.
    if not isinstance(error, Exception):
        error = RunAborted(f"{type(error).__name__}: {error}")
    links.fail(error)
