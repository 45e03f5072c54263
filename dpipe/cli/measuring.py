"""Commands that measure: bench."""

import click

from dpipe.cli.options import JSON, show

BENCHMARKS = ("engine", "transport", "all-reduce", "pipelining", "mfu")


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
    \b
    Example:
      dpipe bench engine
    """
    from dpipe.bench.bench import bench_text

    addresses = tuple(hosts.split(",")) if hosts else ()
    show(bench_text(name, as_json, addresses, rank, quick=quick))
