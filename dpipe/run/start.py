"""What `dpipe launch` and `dpipe train` do with a configuration: check it, then start the ranks.

launch_ranks           check everything, then one process a rank on this machine
train_rank             which rank this process is, then train it
refuse_other_machine   of a rank that a plan has elsewhere
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from rich.console import Console

from dpipe.config.load import Config, in_folder, load
from dpipe.errors import ConfigError, InputError
from dpipe.measure.this_machine import name_of_this_machine
from dpipe.plan.forecast import without_search
from dpipe.plan.machine import refuse_more_than_machine
from dpipe.plan.run_plan import RunPlan, draft
from dpipe.planner.fits import refuse_other_seat
from dpipe.probe.launcher_costs import to_text
from dpipe.processes.cores import cores_in_turn
from dpipe.processes.environment import LAYER_COSTS, ProcessInfo, environment, process_info
from dpipe.processes.launch import launch
from dpipe.report.rows import OnRow, rows_to_launcher
from dpipe.run.build import run_rank
from dpipe.run.planning import plan_together
from dpipe.store.run_folder import absent, open_folder, refuse_changes, refuse_folder, take_back
from dpipe.trackers.kinds import refuse_missing


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
    change: Sequence[str] = (),
    trust_code: bool = False,
) -> int:
    """All ranks as processes of this machine; returns the exit code. Mistakes in the configuration
    are found before any process starts.

    `num_ranks` overrides pipeline.stages; `quiet` and `on_row` are `launch`'s.
    """
    if num_ranks is not None:
        checked = load(path, overrides, trust_code=trust_code)
        overrides = (*overrides, *_stages_of(checked, num_ranks))
    config = load(path, in_folder(overrides, resume), trust_code=trust_code)
    # Before the draft, which leaves a cache of the text that it reads.
    refuse_folder(config, resume is not None)
    refuse_missing(config.run.trackers)
    if resume is not None:
        refuse_changes(config, change)
    # For its errors, for the cache of the text that it leaves, and for the costs of the layers:
    # every rank drafts for itself, but counts no layer again.
    run_plan = draft(config, choose=without_search, predicts_memory=False)
    _refuse_start(run_plan, num_ranks, resume is not None)
    folder = Path(config.run.folder)
    new_folders = absent(folder)
    # Here, and again by rank 0: the logs of the ranks go into it before one of them runs.
    open_folder(config, resume is not None)
    argv = _train_command(path, overrides, resume, fallback, change, trust_code)
    exit_code = launch(
        lambda rank: argv,
        num_ranks or config.world_size,
        logs=folder / "logs",
        environ=_environment(run_plan),
        cores=_cores(config, num_ranks),
        on_line=say,
        quiet=quiet,
        on_row=on_row,
    )
    if exit_code == InputError.exit_code:
        take_back(folder, new_folders)
    return exit_code


def _stages_of(config: Config, num_ranks: int) -> Sequence[str]:
    """The override by which the job has `num_ranks`; none where a plan is to decide."""
    if config.pipeline.plan == "auto":
        return ()
    return (_stages_override(config, num_ranks),)


def _refuse_start(run_plan: RunPlan, num_ranks: int | None, resume: bool) -> None:
    config = run_plan.config
    if config.pipeline.plan != "auto":
        refuse_more_than_machine(run_plan, range(config.world_size))
        return
    # How the model will be cut nobody knows yet.
    if num_ranks is None:
        raise ConfigError(
            'pipeline.plan "auto" plans for the ranks that join: say how many to start (-n)'
        )
    _refuse_resuming(config, resume)


def _environment(run_plan: RunPlan) -> dict[str, str]:
    costs = to_text(run_plan.config.digest(), run_plan.probed)
    return {**environment(), LAYER_COSTS: costs}


def _cores(config: Config, num_ranks: int | None) -> list[list[int]]:
    # Replayed stages sleep, and leave the cores to others.
    on_cpu = torch.device(config.node.device).type == "cpu" and config.model.family.computes
    if not on_cpu:
        return []
    ranks = num_ranks or config.world_size
    return cores_in_turn(ranks, config.tensor_parallel.size, config.node.threads)


def _train_command(
    path: str,
    overrides: Sequence[str],
    resume: str | None,
    fallback: bool,
    change: Sequence[str],
    trust_code: bool,
) -> list[str]:
    """The same for all ranks: which one a process is, it reads in its environment."""
    argv = [sys.executable, "-m", "dpipe", "train", path]
    for override in overrides:
        argv += ["-o", override]
    if resume:
        argv += ["--resume", resume]
    for key in change:
        argv += ["--change", key]
    if fallback:
        argv += ["--fallback"]
    # Each rank asks for itself: what one is told by another proves nothing.
    if trust_code:
        argv += ["--trust-code"]
    return argv


def refuse_other_machine(
    plan: str, rank: int | None, world_size: int | None, coordinator: str | None, name: str | None
) -> None:
    """Raises `ConfigError` where the plan has this process's rank on another machine. `name` is
    what the plan calls this one; None: its host name.
    """
    process = process_info(environment(), rank, world_size, coordinator)
    refuse_other_seat(plan, process.rank, name or name_of_this_machine())


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
    change: Sequence[str] = (),
) -> None:
    """One rank, from configuration to summary. The arguments or else the environment say which.

    Raises `ConfigError` if another number of processes was started than the configuration needs.
    """
    process = process_info(environment(), rank, world_size, coordinator)
    if config.pipeline.plan == "auto":
        planned = _planned(config, process, resume, timeout, console)
        if planned is None:
            return
        config, process = planned
    if process.world_size != config.world_size:
        override = _stages_override(config, process.world_size)
        pipeline = config.pipeline
        raise ConfigError(
            f"{process.world_size} processes were started, but pipeline.stages {pipeline.stages}, "
            f"pipeline.stages_per_rank {pipeline.stages_per_rank}, tensor_parallel.size "
            f"{config.tensor_parallel.size} and data_parallel.replicas "
            f"{config.data_parallel.replicas} need {config.world_size}; start that many, or set "
            f"-o {override}"
        )
    if resume and process.rank == 0:
        refuse_changes(config, change)
    run_rank(
        config,
        process,
        resume=resume,
        fallback=fallback,
        join_s=timeout,
        console=console,
        on_row=on_row or rows_to_launcher(environment()),
    )


def _planned(
    config: Config, process: ProcessInfo, resume: bool, join_s: float | None, console: Console
) -> tuple[Config, ProcessInfo] | None:
    """As `plan_together` has it. Before minutes of measuring: what would be refused behind them."""
    _refuse_resuming(config, resume)

    def say(text: str) -> None:
        # A table keeps its lines, however narrow the log is.
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    if process.rank == 0:
        refuse_folder(config, resume=False)
    return plan_together(config, process, join_s, say)


def _refuse_resuming(config: Config, resume: bool) -> None:
    if resume:
        raise ConfigError(
            f'pipeline.plan "auto" plans a new run: resume {config.run.folder} with the plan that '
            f"it was given, --plan and --machines of {config.data.cache}"
        )


def _stages_override(config: Config, num_ranks: int) -> str:
    """The override that makes a run of `num_ranks`. Raises `ConfigError` if the replicas, or their
    tensor-parallel groups, do not divide them.
    """
    replicas = config.data_parallel.replicas
    size = config.tensor_parallel.size
    if num_ranks % (replicas * size) == 0:
        ranks = num_ranks // (replicas * size)
        return f"pipeline.stages={ranks * config.pipeline.stages_per_rank}"
    if size == 1:
        raise ConfigError(
            f"data_parallel.replicas {replicas} do not divide {num_ranks} processes: each replica "
            f"is a whole pipeline; start a multiple of {replicas}, or set another "
            "-o data_parallel.replicas"
        )
    raise ConfigError(
        f"data_parallel.replicas {replicas} of stages on tensor_parallel.size {size} ranks do not "
        f"divide {num_ranks} processes; start a multiple of {replicas * size}, or set another "
        "-o tensor_parallel.size"
    )
