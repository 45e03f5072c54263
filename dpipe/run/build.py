"""The only composition root: a configuration and a place in the run become a rank that trains.

launch_ranks   check everything, then one process a rank on this machine
train_rank     run_plan -> join -> open links -> stages, executor, update, trainer -> summary
"""

import json
import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dpipe.config.load import Config, load
from dpipe.coordinator.base import Coordination
from dpipe.data.corpus import Corpus
from dpipe.data.feed import feed_of
from dpipe.dataparallel.base import DataParallel
from dpipe.engine.executor import Executor, Parts
from dpipe.engine.recorder import Recorder
from dpipe.engine.rehearsal import rehearse
from dpipe.engine.trainer import Job, Trainer
from dpipe.engine.update import Update
from dpipe.errors import ConfigError, InputError, RunAborted
from dpipe.network.link import Host
from dpipe.plan.costs import layer_flops
from dpipe.plan.forecast import without_search
from dpipe.plan.run_plan import RunPlan, draft, local_device, measure_layers
from dpipe.ranks import ParallelRanks
from dpipe.report.display import Display, lasting
from dpipe.report.metrics import Metrics
from dpipe.report.summary import TextScale, show_summary
from dpipe.report.trace import TraceInputs, save_inputs
from dpipe.run.agreement import attended, data_parallel
from dpipe.run.environment import ProcessInfo, environment, load_kernels_at_start, process_info
from dpipe.run.generate import sample
from dpipe.run.join import joined, listening_on, security_of
from dpipe.run.launch import launch
from dpipe.run.parameter_servers import Servers, parameter_servers
from dpipe.run.replay_ring import Ring, ring_peers
from dpipe.run.resume import agreed_start, find_start, restore, stages_at
from dpipe.run.rows import OnRow, rows_to_launcher
from dpipe.run.signals import stop_on_signals
from dpipe.run.stages import counted_elsewhere, make_stage, tied_weights
from dpipe.run.tensor_groups import as_executed, tensor_group
from dpipe.schedule.generate import AUTO
from dpipe.schedule.links import neighbours
from dpipe.schedule.text import from_csv, to_csv
from dpipe.stage.base import PipelineStage
from dpipe.stage.efficiency import mfu, peak_of, train_flops
from dpipe.stage.tensor_group import TensorGroup
from dpipe.store import checkpoint
from dpipe.store.run_folder import (
    absent,
    checkpoint_url,
    logging_to,
    open_folder,
    opened,
    refuse_folder,
    save_configuration,
    take_back,
)
from dpipe.streams import Streams, streams_of
from dpipe.transport.base import Transport
from dpipe.transport.kinds import TRANSPORTS
from dpipe.wire.codec import codec

LOG = logging.getLogger("dpipe")
_SAMPLE_TOKENS = 300


def launch_ranks(
    path: str,
    overrides: tuple[str, ...],
    *,
    num_ranks: int | None,
    resume: str | None,
    fallback: bool,
    say: Callable[[str], None],
    quiet: bool = False,
    on_row: OnRow | None = None,
) -> int:
    """All ranks as processes of this machine; returns the exit code. What can be wrong is found
    before any starts.

    `quiet` and `on_row` are `launch`'s.
    """
    if num_ranks is not None:
        overrides = (*overrides, *_cut_for(load(path, overrides), num_ranks))
    config = configuration(path, overrides, resume)
    refuse_folder(
        config, resume is not None
    )  # before a draft, which leaves the text that it has read in a cache
    draft(config, choose=without_search, predicts_memory=False)
    folder = Path(config.run.folder)
    made = absent(folder)
    open_folder(config, resume is not None)
    given = [item for text in overrides for item in ("-o", text)]
    given += ["--resume", resume] if resume else []
    given += ["--fallback"] if fallback else []
    argv = [sys.executable, "-m", "dpipe", "train", path, *given]
    exit_code = launch(
        lambda rank: argv,
        config.world_size,
        logs=folder / "logs",
        on_line=say,
        quiet=quiet,
        on_row=on_row,
    )
    if exit_code == InputError.exit_code:
        take_back(folder, made)
    return exit_code


def train_rank(
    config: Config,
    *,
    rank: int | None,
    world_size: int | None,
    coordinator: str | None,
    timeout: float | None,
    resume: bool,
    fallback: bool,
    console: Console,
    on_row: OnRow | None,
) -> None:
    """One rank, from configuration to summary. Which one, the arguments or the environment say."""
    process = process_info(environment(), rank, world_size, coordinator)
    if process.world_size != config.world_size:
        (fitting,) = _cut_for(config, process.world_size)
        raise ConfigError(
            f"{process.world_size} processes were started, but pipeline.stages "
            f"{config.pipeline.stages}, "
            f"pipeline.stages_per_rank {config.pipeline.stages_per_rank}, tensor_parallel.size "
            f"{config.tensor_parallel.size} and data_parallel.replicas "
            f"{config.data_parallel.replicas} need "
            f"{config.world_size}; start that many, or set -o {fitting}"
        )
    run_rank(
        config,
        process,
        resume=resume,
        fallback=fallback,
        join_s=timeout,
        console=console,
        on_row=on_row or rows_to_launcher(environment()),
    )


def configuration(path: str, overrides: tuple[str, ...], resume: str | None) -> Config:
    return load(
        path, (*overrides, f"run.folder={json.dumps(resume)}") if resume is not None else overrides
    )


def _cut_for(config: Config, num_ranks: int) -> tuple[str, ...]:
    """The override that makes a run of `num_ranks`; raises `ConfigError` where the replicas do not
    divide them.
    """
    replicas = config.data_parallel.replicas
    size = config.tensor_parallel.size
    if num_ranks % (replicas * size):
        raise ConfigError(
            f"data_parallel.replicas {replicas} do not divide {num_ranks} processes: each replica "
            "is a whole pipeline; "
            f"start a multiple of {replicas}, or set another -o data_parallel.replicas"
            if size == 1
            else f"data_parallel.replicas {replicas} of stages on tensor_parallel.size {size} ranks do not divide "
            f"{num_ranks} processes; start a multiple of {replicas * size}, or set another -o "
            "tensor_parallel.size"
        )
    return (f"pipeline.stages={num_ranks // replicas // size * config.pipeline.stages_per_rank}",)


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
    """Train one rank. Nothing is written, and nobody is talked to, before everything given has been
    checked.

    On rank 0 `on_row` gets each row of metrics, after it was written.
    """
    console = console or Console(file=lasting(sys.stdout))
    torch.set_num_threads(config.node.threads)
    if TRANSPORTS[config.transport.kind].between_gpus:
        load_kernels_at_start()
    config = config.with_(node__device=local_device(config.node.device, process.local_rank))
    if process.rank == 0:
        refuse_folder(config, resume)
    run_plan = draft(config, choose=without_search, predicts_memory=False)
    start = find_start(config, run_plan, process.rank, fallback=fallback) if resume else None
    streams = streams_of(config.node.device)
    direct = not config.data_parallel.active_kind.has_server
    here = config.ranks_of(process.rank)
    peers = here.peers(
        neighbours(run_plan.forecast.schedule, here.pp_rank), across_replicas=direct
    ) | ring_peers(config, here)
    with (
        opened(config, resume, process.rank) as folder,
        logging_to(folder, process.rank),
        joined(config, process, peers, join_s, streams) as (coordinator, transport),
    ):
        if config.pipeline.split == "measured" or config.pipeline.schedule == AUTO:
            run_plan = adopt_plan_of_rank_0(run_plan, coordinator)
        if resume:
            start = agreed_start(config, run_plan, start, coordinator, fallback)
        first_step = 0 if start is None else start.step
        with ExitStack() as stack:
            listening = listening_on(config, process), security_of(config, process)
            servers = stack.enter_context(
                parameter_servers(config, run_plan.forecast.schedule, coordinator, *listening)
            )
            wants_stop = stack.enter_context(stop_on_signals())
            around = RankResources(
                coordinator,
                transport,
                streams,
                servers,
                tensor_group(config, here, coordinator),
                wants_stop,
            )
            job = assemble(run_plan, process.rank, around, start, stack)
            start = None  # as large as the model and its moments
            # No rank has refused: now the folder changes.
            coordinator.barrier("assembled", config.timeouts.transfer)
            if process.rank == 0:
                save_configuration(folder, config)
                display = stack.enter_context(Display(console, first_step, config.train.steps))
                metrics = Metrics(
                    folder,
                    first_step=first_step,
                    tensorboard=config.run.tensorboard,
                    show=_each(display.show, on_row),
                )
                stack.callback(metrics.close)
                job = replace(job, metrics=metrics)
            transport.rehearse(partial(rehearse, job, first_step))
            trainer = Trainer(job, first_step)
            stopped = trainer.run()
            hosts = oversubscribed_hosts(config, coordinator)
        if process.rank == 0:
            if config.run.trace_steps and trainer.next_step > first_step:
                save_trace_inputs(run_plan, hosts, folder)
            show_result(run_plan, folder, console, stopped)


def _each(*listeners: OnRow | None) -> OnRow:
    """Calls every listener there is with a row."""

    def tell(row: Mapping[str, Any]) -> None:
        for listener in listeners:
            if listener is not None:
                listener(row)

    return tell


def adopt_plan_of_rank_0(run_plan: RunPlan, coordinator: Coordination) -> RunPlan:
    """Cut by what rank 0 measures each layer to take, scheduled as it finds best; the others take
    its word.

    Ranks that share a machine's cores would search many times as long.
    """
    config = run_plan.config
    decision = None
    if coordinator.rank == 0:
        layer_s = measure_layers(run_plan) if config.pipeline.split == "measured" else None
        planned = draft(config, layer_s=layer_s, predicts_memory=False)
        schedule = planned.forecast.schedule
        decision = [layer_s, to_csv(schedule), schedule.name]
    layer_s, programs, name = coordinator.share("plan", decision, config.timeouts.transfer)[0]
    return draft(
        config,
        layer_s=layer_s and tuple(layer_s),
        choose=lambda *_: from_csv(programs, name),
        predicts_memory=False,
    )


@dataclass(frozen=True)
class RankResources:
    """What a rank finds when it has joined."""

    coordinator: Coordination
    transport: Transport
    streams: Streams
    servers: Servers | None
    group: TensorGroup | None  # the ranks that hold a stage together, where there are several
    wants_stop: Callable[[], bool]


def assemble(
    run_plan: RunPlan,
    rank: int,
    around: RankResources,
    start: checkpoint.Loaded | None,
    stack: ExitStack,
) -> Job:
    """The stages of `rank`, what runs them, and what trains them, restored from `start` if there is
    one.
    """
    coordinator = around.coordinator
    transport = around.transport
    streams = around.streams
    config = run_plan.config
    schedule = run_plan.forecast.schedule
    here = run_plan.config.ranks_of(rank)
    recorder = recorder_of(rank, around)
    exchange = Ring(transport, here, config.replay.exchange_bytes, recorder.exchanging)
    made = partial(
        make_stage, run_plan, replica=here.dp_rank, group=around.group, timed=recorder.part
    )
    stages = {s: made(s, exchange=exchange) for s in stages_at(schedule, here.pp_rank)}
    tied = tied_weights(run_plan, stages)
    elsewhere = counted_elsewhere(stages, tied, here)
    copies = [name for name, _ in tied.values()]
    agreement = data_parallel(
        config, here, stages, transport, coordinator, elsewhere, around.servers, copies
    )
    stack.callback(agreement.close)
    stack.push(partial(fail_links, around.group))
    stack.push(
        partial(fail_links, transport)
    )  # before that, or a thread may wait for a peer until its deadline
    stack.enter_context(attended(agreement, coordinator))
    update = make_update(config, here, stages, agreement, coordinator, recorder)
    parts = Parts(
        here.pp_rank,
        as_executed(config, stages, around.group, schedule.num_stages),
        transport,
        codec(config.pipeline.wire),
        run_plan.boundaries,
        agreement,
        recorder,
        tied={end % schedule.num_stages: weight for end, (_, weight) in tied.items()},
        tied_here=(tied[0][1], tied[-1][1]) if len(tied) == 2 else None,
        pp_group=here.pp_group,
        streams=streams,
    )
    restore(start, stages, update, here)
    corpus = run_plan.corpus if {0, schedule.num_stages - 1} & set(stages) else None
    return Job(
        here=here,
        train=config.train,
        run=config.run,
        context=config.model.context,
        configuration=config.shared(),
        schedule=schedule,
        eval_schedule=run_plan.forecast.eval_schedule,
        stages=stages,
        executor=Executor(parts),
        recorder=recorder,
        data_parallel=agreement,
        update=update,
        feed=feed_of(config, corpus, here.dp_rank, here.dp_size),
        coordinator=coordinator,
        timeout_s=config.timeouts.transfer,
        checkpoint_url=None if run_plan.model is None else checkpoint_url(config),
        wants_stop=around.wants_stop,
        streams=streams,
        utilisation=partial(utilisation, config, streams.device),
    )


def recorder_of(rank: int, around: RankResources) -> Recorder:
    recorder = Recorder(rank, around.streams)
    if around.group is not None:
        around.group.watch = recorder.exchanging
    return recorder


def fail_links(
    links: Transport | TensorGroup | None,
    kind: type[BaseException] | None,
    error: BaseException | None,
    _: object,
) -> None:
    """As an exit callback: nobody waits for a rank that leaves with an error."""
    if error is not None and links is not None:
        links.fail(
            error
            if isinstance(error, Exception)
            else RunAborted(f"{type(error).__name__}: {error}")
        )


def utilisation(config: Config, device: torch.device, seconds: float) -> float | None:
    """MFU of a step; None for a model of the user's own, and on a device whose peak is not
    known.
    """
    peak = peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    if peak is None or not config.model.is_transformer:
        return None
    flops = train_flops(layer_flops(config, config.train.batch_size))
    return mfu(flops, seconds, peak, config.train.precision, config.world_size)


def make_update(
    config: Config,
    here: ParallelRanks,
    stages: Mapping[int, PipelineStage],
    agreement: DataParallel,
    coordinator: Coordination,
    recorder: Recorder,
) -> Update:
    return Update(
        stages,
        config.train,
        agreement,
        gather=coordinator.gather,
        timeout_s=config.timeouts.transfer,
        here=here,
        lag=max(1, config.data_parallel.staleness),
        timed=recorder.part,
    )


def oversubscribed_hosts(config: Config, coordinator: Coordination) -> tuple[Host, ...]:
    """The machines whose ranks want more cores than they have. All ranks meet here at the end of a
    run.

    None where ranks hold a stage together: they wait for each other inside their compute, which is
    no processor's time, so that their spans are taken to be as long as they were, cores shared and
    all.
    """
    here = [socket.gethostname(), len(os.sched_getaffinity(0))]
    machines = [
        tuple(machine) for machine in coordinator.share("trained", here, config.timeouts.transfer)
    ]
    ranks = {
        machine: tuple(r for r, other in enumerate(machines) if other == machine)
        for machine in machines
    }
    computes = config.model.family.computes and torch.device(config.node.device).type == "cpu"
    computes = computes and config.tensor_parallel.size == 1
    crowded = {m: r for m, r in ranks.items() if computes and len(r) * config.node.threads > m[1]}
    return tuple(Host(r, cores // config.node.threads or 1) for (_, cores), r in crowded.items())


def save_trace_inputs(run_plan: RunPlan, hosts: tuple[Host, ...], folder: Path) -> None:
    """What `dpipe trace` needs of the run besides the spans."""
    found = run_plan.forecast
    config = run_plan.config
    inputs = TraceInputs(
        found.schedule,
        found.cost,
        config.network_profile,
        found.network.connections,
        hosts,
        found.usual_replicas,
        config.counts_headers,
        config.tensor_parallel.size,
        config.train.waits_for_verdict,
    )
    save_inputs(folder / "trace", inputs)


def show_result(run_plan: RunPlan, folder: Path, console: Console, stopped: bool) -> None:
    """Rank 0's last word: how to go on, or the summary."""
    config = run_plan.config
    corpus = run_plan.corpus
    if stopped:
        told = f"stopped before the end; go on with --resume {folder}"
        console.print(told, highlight=False, markup=False, soft_wrap=True)
        return
    scale = url = text = None
    if corpus is not None:
        url = checkpoint_url(config)
        if config.model.family.continues_text:
            entropy = corpus.bigram_entropy()
            scale = TextScale(
                corpus.bytes_per_token("train"), corpus.bytes_per_token("held_out"), entropy
            )
        if config.run.sample:
            text = sample_text(config, corpus, url, config.run.sample)
    sharded = config.data_parallel.active_kind.shards_optimizer
    shards = config.data_parallel.replicas if sharded else 1
    show_summary(console, folder, scale=scale, checkpoint_url=url, sample=text, shards=shards)


def sample_text(config: Config, corpus: Corpus, url: str, prompt: str) -> str | None:
    """What the finished model makes of `prompt`; None, and a warning, where this machine has not
    all of the model.

    Each machine's part of a checkpoint may be in a folder of its own, and a user's own model need
    not continue texts: the run itself has then gone well.
    """
    try:
        return sample(config, corpus.tokenizer, url, prompt, _SAMPLE_TOKENS)
    except InputError as error:
        LOG.warning("run.sample is left out: %s", error)
        return None
