"""Commands that measure: bench, measure, doctor."""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from dpipe.cli.options import CONFIG, JSON, MAX_WAIT_S, OVERRIDE, TRUST_CODE, NumberRange, show
from dpipe.processes.imports import imported_for_good

BENCHMARKS = ("engine", "transport", "all-reduce", "pipelining", "mfu", "formats")


@click.command()
@click.argument("name", type=click.Choice(BENCHMARKS))
@click.option(
    "--hosts",
    default="",
    metavar="A,B,...",
    help="all-reduce: one process on each of these, not all here.",
)
@click.option(
    "--rank", type=click.IntRange(min=0), default=0, help="With --hosts: which of them this is."
)
@click.option("--quick", is_flag=True, help="About a minute: fewer rounds, and perhaps rows.")
@JSON
def bench(name: str, hosts: str, rank: int, quick: bool, as_json: bool) -> None:
    """Measure a ratio, both sides in one run. Progress goes to stderr.

    \b
      engine      each schedule on replay stages in four processes: measured over simulated step
      all-reduce  64 MB averaged over four processes: dpipe against gloo
      transport   16 MB tensors between two processes: gRPC against gloo's send and recv
      pipelining  one GPT in two processes: dpipe against torch.distributed.pipelining
      mfu         one GPT (1.3B on a GPU) in one stage: model FLOPs utilisation, dpipe against
                  a plain training loop
      formats     wire formats: bits a value, error, and GB/s of one core
    \b
    Example:
      dpipe bench engine
    """
    with imported_for_good():
        from dpipe.bench.bench import bench_text

    addresses = tuple(hosts.split(",")) if hosts else ()
    show(bench_text(name, as_json, addresses, rank, quick=quick))


@click.command()
@CONFIG
@OVERRIDE
@click.option("--rank", type=click.IntRange(min=0), help="This process's rank.")
@click.option("--world-size", type=click.IntRange(min=1), help="Number of machines.")
@click.option("--coordinator", metavar="HOST:PORT", help="Where rank 0 listens.")
@click.option("--alone", is_flag=True, help="This machine only, without links.")
@click.option(
    "--timeout",
    "timeout_s",
    type=NumberRange(min=0, min_open=True, max=MAX_WAIT_S),
    help="Seconds to wait for the other ranks; default: timeouts.join.",
)
@click.option("--name", help="This machine's name in the file; default: its host name.")
@click.option(
    "--price",
    "price_per_hour",
    type=NumberRange(min=0, max=1e9),
    help="What this machine costs an hour, in any currency.",
)
@click.option(
    "--micro-batch-size",
    "micro_batch_sizes",
    type=click.IntRange(min=1),
    multiple=True,
    help="Sequences in a micro-batch that layers are measured with; may be repeated. Default: "
    "CONFIG's.",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("machines.toml"),
    show_default=True,
    help="What rank 0 writes.",
)
@TRUST_CODE
def measure(config: str, overrides: tuple[str, ...], alone: bool, **options: Any) -> None:
    """Measure the machines and the links between them, for `dpipe plan`.

    One process a machine. Measured are what this model's layers take, the free memory, each link's
    delay, jitter, loss and rate, and what each machine sends and receives when all do.

    \b
    Example, on each of two machines:
      dpipe measure job.toml --rank 0 --world-size 2 --coordinator 10.0.0.1:7000
      dpipe measure job.toml --rank 1 --world-size 2 --coordinator 10.0.0.1:7000
    """
    with imported_for_good():
        from dpipe.report.display import lasting
        from dpipe.run.measuring import measure_to_file

    placed = [options[key] is not None for key in ("rank", "world_size", "coordinator")]
    if alone and any(placed):
        raise click.UsageError(
            "--alone cannot be combined with --rank, --world-size or --coordinator."
        )
    say = partial(click.echo, file=lasting(sys.stderr))
    measure_to_file(config, overrides, alone=alone, say=say, **options)


@click.command()
@click.argument("config", type=click.Path(dir_okay=False), required=False)
@OVERRIDE
@TRUST_CODE
def doctor(config: str | None, overrides: tuple[str, ...], trust_code: bool) -> None:
    """Look for what would hurt a run on this machine, and say how to mend it.

    Looks at versions, device, ports, TCP, clock, open files and disk, as CONFIG needs them; changes
    nothing. Exits with 1 where something is bad.

    \b
    Example:
      dpipe doctor job.toml -o node.device=cuda
    """
    with imported_for_good():
        from dpipe.config.load import build, load
        from dpipe.measure.doctor import State, examine

    checked = load(config or build({}), overrides, trust_code=trust_code)
    states = set()
    for finding in examine(checked):
        states.add(finding.state)
        click.echo(f"{finding.state.value:<5}{finding.what}")
        if finding.mend:
            click.echo(f"     -> {finding.mend}")
    sys.exit(1 if State.HURTS in states else 0)
