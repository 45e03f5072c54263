"""What `dpipe launch` and `dpipe train` do with a configuration: check it, then start the ranks.

launch_ranks   check everything, then one process a rank on this machine
train_rank     which rank this process is, then train it
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from dpipe.config.load import Config, in_folder, load
from dpipe.errors import ConfigError, InputError
from dpipe.plan.forecast import without_search
from dpipe.plan.machine import refuse_more_than_machine
from dpipe.plan.run_plan import draft
from dpipe.processes.environment import environment, process_info
from dpipe.processes.launch import launch
from dpipe.report.rows import OnRow, rows_to_launcher
from dpipe.run.build import run_rank
from dpipe.store.run_folder import absent, open_folder, refuse_changes, refuse_folder, take_back


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
        overrides = (*overrides, _stages_override(checked, num_ranks))
    config = load(path, in_folder(overrides, resume), trust_code=trust_code)
    # Before the draft, which leaves a cache of the text that it reads.
    refuse_folder(config, resume is not None)
    if resume is not None:
        refuse_changes(config, change)
    # For its errors, and for the cache of the text that it leaves: every rank drafts for itself.
    run_plan = draft(config, choose=without_search, predicts_memory=False)
    refuse_more_than_machine(run_plan, range(config.world_size))
    folder = Path(config.run.folder)
    new_folders = absent(folder)
    # Here, and again by rank 0: the logs of the ranks go into it before one of them runs.
    open_folder(config, resume is not None)
    # The same for all ranks: which one a process is, it reads in its environment.
    argv = [sys.executable, "-m", "dpipe", "train", path]
    argv += _options(overrides, resume, change)
    if fallback:
        argv += ["--fallback"]
    # Each rank asks for itself: what one is told by another proves nothing.
    if trust_code:
        argv += ["--trust-code"]
    exit_code = launch(
        lambda rank: argv,
        config.world_size,
        logs=folder / "logs",
        on_line=say,
        quiet=quiet,
        on_row=on_row,
    )
    if exit_code == InputError.exit_code:
        take_back(folder, new_folders)
    return exit_code


def _options(overrides: Sequence[str], resume: str | None, change: Sequence[str]) -> Sequence[str]:
    """Of a rank's command line."""
    options: list[str] = []
    for override in overrides:
        options += ["-o", override]
    if resume:
        options += ["--resume", resume]
    for key in change:
        options += ["--change", key]
    return options


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
