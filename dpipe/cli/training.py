"""Commands that train: train, launch, serve."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import click

from dpipe.cli.options import (
    CONFIG,
    MACHINES,
    MAX_WAIT_S,
    OVERRIDE,
    PLAN,
    TRUST_CODE,
    NumberRange,
    resuming,
)
from dpipe.processes.environment import environment, process_info
from dpipe.processes.imports import imported_for_good


def _planned(
    config: str, overrides: tuple[str, ...], plan: str | None, flags: dict[str, Any]
) -> tuple[str, ...]:
    """`overrides` with what `--plan` decides."""
    if plan is None:
        return overrides
    from dpipe.planner.fits import planned

    return planned(config, overrides, plan, trust_code=flags["trust_code"])


@click.command()
@CONFIG
@OVERRIDE
@MACHINES
@click.option("--rank", type=click.IntRange(min=0), help="This process's rank.")
@click.option("--world-size", type=click.IntRange(min=1), help="Number of ranks in all.")
@click.option("--coordinator", metavar="HOST:PORT", help="Where rank 0 listens.")
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(min=0, min_open=True, max=MAX_WAIT_S),
    help="Seconds to wait for the other ranks; default: timeouts.join.",
)
@PLAN
@click.option("--name", help="With --plan: what it calls this machine; default: its host name.")
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    help="Processes beyond the ranks, which take the ranks of those that are lost.",
)
@TRUST_CODE
@resuming
def train(
    config: str,
    overrides: tuple[str, ...],
    machines: tuple[str, ...],
    plan: str | None,
    name: str | None,
    spares: int | None,
    **flags: Any,
) -> None:
    """Train one rank in this process.

    Without --rank, --world-size and --coordinator, the environment of torchrun or Slurm says which
    rank this is.

    \b
    Example, one process on each of two machines:
      dpipe train job.toml --rank 0 --world-size 2 --coordinator 10.0.0.1:7000
      dpipe train job.toml --rank 1 --world-size 2 --coordinator 10.0.0.1:7000
    \b
    The same under torchrun or Slurm:
      torchrun --nproc-per-node 4 -m dpipe train job.toml
      srun dpipe train job.toml
    \b
    A job of four ranks that goes on where one is killed:
      srun --ntasks 5 --no-kill dpipe train job.toml --spares 1
    """
    if spares is not None:
        _train_elastic(config, overrides + machines, spares, plan=plan, name=name, **flags)
        return
    with imported_for_good():
        from dpipe.run.api import train as train_here
        from dpipe.run.start import refuse_other_machine  # what `train_here` would import

    overrides = _planned(config, overrides + machines, plan, flags)
    if plan is not None:
        place = {key: flags[key] for key in ("rank", "world_size", "coordinator")}
        refuse_other_machine(plan, name=name, **place)
    elif name is not None:
        raise click.UsageError("--name goes with --plan.")
    folder = train_here(config, overrides=overrides, show=True, **flags)
    process = process_info(environment(), flags["rank"], flags["world_size"], flags["coordinator"])
    if process.rank == 0:
        # All other ranks are gone: nobody waits for it.
        from dpipe.watch.report import write_at_end

        write_at_end(folder, trust_code=flags["trust_code"])


def _train_elastic(
    config: str,
    overrides: tuple[str, ...],
    spares: int,
    *,
    rank: int | None,
    world_size: int | None,
    coordinator: str | None,
    trust_code: bool,
    **others: Any,
) -> None:
    from dpipe.report.display import lasting
    from dpipe.supervisor.given_processes import train_elastic

    if others.pop("plan") or others.pop("name"):
        raise click.UsageError("--plan places each rank on a machine, and --spares moves them")
    if others.pop("timeout_s") is not None:
        raise click.UsageError("--spares waits as long as timeouts.join says")
    _refuse_resuming(**others)
    folder = train_elastic(
        config,
        overrides,
        spares,
        rank=rank,
        world_size=world_size,
        coordinator=coordinator,
        trust_code=trust_code,
        say=partial(click.echo, file=lasting(sys.stderr)),
    )
    if folder is not None:
        from dpipe.watch.report import write_at_end

        write_at_end(folder, trust_code=trust_code)


def _refuse_resuming(*, resume: str | None, fallback: bool, change: tuple[str, ...]) -> None:
    if resume or fallback or change:
        raise click.UsageError(
            "--spares goes on by itself: start the same command again, without --resume"
        )


@click.command()
@CONFIG
@OVERRIDE
@MACHINES
@click.option(
    "-n",
    "num_ranks",
    type=click.IntRange(min=1),
    help="Number of ranks; default: what CONFIG says.",
)
@PLAN
@click.option(
    "--spares",
    type=click.IntRange(min=0),
    help="Processes beyond the ranks: a run that goes on where a rank is killed, and where the "
    "same command is started again.",
)
@TRUST_CODE
@resuming
def launch(
    config: str,
    overrides: tuple[str, ...],
    machines: tuple[str, ...],
    plan: str | None,
    spares: int | None,
    **flags: Any,
) -> None:
    """Train all ranks as processes of this machine.

    The first Ctrl-C writes a checkpoint and stops all of them; a second one kills them.

    \b
    Example:
      dpipe launch scripts/quickstart.toml -o train.steps=50
      dpipe launch job.toml --spares 1
    """
    with imported_for_good():
        from dpipe.report.display import lasting
        from dpipe.run.start import launch_ranks

    overrides = _planned(config, overrides + machines, plan, flags)
    # To standard error: standard output is rank 0's.
    say = partial(click.echo, file=lasting(sys.stderr))
    if spares is not None:
        _launch_elastic(config, overrides, spares, say, **flags)
        return
    sys.exit(launch_ranks(config, overrides, say=say, **flags))


def _launch_elastic(
    config: str,
    overrides: tuple[str, ...],
    spares: int,
    say: Callable[[str], None],
    *,
    num_ranks: int | None,
    trust_code: bool,
    **resuming: Any,
) -> None:
    from dpipe.supervisor.local_machines import launch_elastic

    _refuse_resuming(**resuming)
    if num_ranks is not None:
        raise click.UsageError("--spares takes as many ranks as CONFIG says: set pipeline.stages")
    from dpipe.watch.report import write_at_end

    folder = launch_elastic(config, overrides, spares, trust_code=trust_code, say=say)
    if folder is not None:
        write_at_end(folder, trust_code=trust_code)


@click.command()
@CONFIG
@OVERRIDE
@click.option(
    "--bind", metavar="HOST:PORT", help="Where to listen; default: data_parallel.address."
)
@click.option(
    "--run",
    metavar="HOST:PORT",
    help="Coordinator of an elastic run that goes on with this server, wherever it was before.",
)
@click.option(
    "--instead-of",
    metavar="HOST:PORT",
    help="With --run: the server in whose place this one is, where the run has several.",
)
def serve(
    config: str,
    overrides: tuple[str, ...],
    bind: str | None,
    run: str | None,
    instead_of: str | None,
) -> None:
    """Run a parameter server as a process of its own, until all workers have left it.

    Each step is on its disk before workers hear of it: a server that is killed and started again
    continues where it was. An elastic run goes on with one on another machine, too, from the copies
    that its machines keep.

    \b
    Example, for the runs whose data_parallel.address is 10.0.0.9:7100:
      dpipe serve job.toml --bind 0.0.0.0:7100
      dpipe serve job.toml --bind 0.0.0.0:7100 --run 10.0.0.1:7000    # on any machine
    """
    if instead_of is not None and run is None:
        raise click.UsageError("--instead-of goes with --run")
    with imported_for_good():
        from dpipe.report.display import lasting
        from dpipe.serve.standalone import serve_parameters

    say = partial(click.echo, file=lasting(sys.stdout))
    serve_parameters(config, overrides, bind, say, run=run, instead_of=instead_of)
