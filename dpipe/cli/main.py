"""The front door: each command parses, then calls one function. Torch is imported by the commands
that need it.
"""

import io
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import click

from dpipe import __version__
from dpipe.errors import DpipeError, RunError

F = TypeVar("F", bound=Callable[..., Any])

GENERATORS = ("gpipe", "1f1b", "interleaved", "zero-bubble")
MAX_WAIT_S = 30 * 86_400  # as of what [timeouts] gives; pydantic, which knows it, loads slowly
BENCHMARKS = ("engine", "transport", "all-reduce", "pipelining", "mfu")


class _Commands(click.Group):
    """Turns dpipe's errors into a message and an exit code: 2 for what the user can mend, 1 for a
    run that failed.
    """

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except DpipeError as error:
            click.echo(f"dpipe: {error}", err=True)
            for note in getattr(error, "__notes__", ()):
                click.echo(note, err=True)
            sys.exit(error.exit_code)


class _Range(click.FloatRange):
    """A range of numbers, and nan is none: it would pass every comparison that refuses."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


@click.group(cls=_Commands)
@click.version_option(__version__)
def main() -> None:
    """Train large models as pipelines over slow, uneven networks."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="replace"
        )  # a terminal that has not all characters shows the others


def _print(text: object) -> None:
    """What a command is asked for; raises `RunError` where it cannot be written."""
    try:
        click.echo(text)
    except BrokenPipeError:
        raise  # click ends the command: who reads has seen enough
    except OSError as error:
        from dpipe.report.display import point_nowhere

        point_nowhere(sys.stdout)
        raise RunError(f"cannot write to standard output: {error}") from None


def _override(command: F) -> F:
    text = "Override one key of the configuration, such as -o train.steps=100; may be repeated."
    return click.option(
        "-o", "--override", "overrides", multiple=True, metavar="KEY=VALUE", help=text
    )(command)


_CONFIG = click.argument("config", type=click.Path(dir_okay=False))
_RUN = click.argument("run", type=click.Path(file_okay=False))
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")


@main.command()
@_CONFIG
@_override
@click.option("--rank", type=click.IntRange(min=0), help="This process's rank.")
@click.option("--world-size", type=click.IntRange(min=1), help="The number of ranks.")
@click.option("--coordinator", metavar="HOST:PORT", help="Where rank 0 listens.")
@click.option(
    "--timeout",
    type=_Range(min=0, min_open=True, max=MAX_WAIT_S),
    help="Seconds to wait for the other ranks; default timeouts.join.",
)
@click.option(
    "--resume", metavar="RUN", help="Continue the run in this folder from its newest checkpoint."
)
@click.option(
    "--fallback",
    is_flag=True,
    help="With --resume: if the newest checkpoint is damaged, use the one before.",
)
def train(config: str, overrides: tuple[str, ...], **flags: Any) -> None:
    """Run one process, one rank, of a training.

    Without --rank, --world-size and --coordinator they come from the environment of torchrun or
    Slurm.

    \b
    Example, one process on each of two machines:
      dpipe train job.toml --rank 0 --world-size 2 --coordinator 10.0.0.1:7000
      dpipe train job.toml --rank 1 --world-size 2 --coordinator 10.0.0.1:7000
    \b
    The same under torchrun or Slurm:
      torchrun --nproc-per-node 4 -m dpipe train job.toml
      srun dpipe train job.toml
    """
    from dpipe.run.build import train_rank

    train_rank(config, overrides, **flags)


@main.command()
@_CONFIG
@_override
@click.option(
    "-n",
    "num_ranks",
    type=click.IntRange(min=1),
    help="The number of ranks; default what CONFIG says.",
)
@click.option(
    "--resume", metavar="RUN", help="Continue the run in this folder from its newest checkpoint."
)
@click.option(
    "--fallback",
    is_flag=True,
    help="With --resume: if the newest checkpoint is damaged, use the one before.",
)
def launch(config: str, overrides: tuple[str, ...], **flags: Any) -> None:
    """Run all ranks of a training as processes of this machine.

    The first Ctrl-C writes a checkpoint and stops all of them; a second one stops them at once.

    \b
    Example:
      dpipe launch scripts/quickstart.toml -o train.steps=50
    """
    from dpipe.report.display import lasting
    from dpipe.run.build import launch_ranks

    sys.exit(
        launch_ranks(config, overrides, say=partial(click.echo, file=lasting(sys.stderr)), **flags)
    )


@main.command()
@_CONFIG
@_override
@click.option(
    "--bind", metavar="HOST:PORT", help="Where to listen; default: data_parallel.address."
)
def serve(config: str, overrides: tuple[str, ...], bind: str | None) -> None:
    """Run a parameter server as a process of its own, until all workers have left it.

    Each step is on its disk before workers hear of it: killed and started again, it goes on where
    it was.

    \b
    Example, for the runs whose data_parallel.address is 10.0.0.9:7100:
      dpipe serve job.toml --bind 0.0.0.0:7100
    """
    from dpipe.report.display import lasting
    from dpipe.run.parameter_servers import serve_parameters

    serve_parameters(config, overrides, bind, partial(click.echo, file=lasting(sys.stdout)))


@main.command()
@_CONFIG
@_override
@click.option(
    "--network", type=click.Path(dir_okay=False), help="A network profile; default predict.network."
)
@_JSON
def simulate(config: str, overrides: tuple[str, ...], network: str | None, as_json: bool) -> None:
    """Predict a step: seconds, bubble, micro-batches in flight, bytes a link. Needs no torch for
    built-in models.

    \b
    Example:
      dpipe simulate scripts/quickstart.toml -o pipeline.schedule=zero-bubble
    """
    from dpipe.plan.text import forecast_text

    _print(forecast_text(config, overrides, network, as_json))


@main.command()
@click.argument("name", type=click.Choice(GENERATORS))
@click.option("--stages", type=click.IntRange(min=1), required=True, help="Stages in all.")
@click.option(
    "--micro-batches", type=click.IntRange(min=1), required=True, help="Micro-batches a step."
)
@click.option(
    "--stages-per-rank",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Above 1: interleaved.",
)
@click.option(
    "--in-flight", type=click.IntRange(min=1), help="Micro-batches in flight on the first rank."
)
@click.option(
    "--memory-limit",
    type=click.IntRange(min=1),
    help="Micro-batches that a rank may hold (zero-bubble).",
)
@click.option(
    "--csv", "as_csv", is_flag=True, help="Print the CSV that torch.distributed.pipelining loads."
)
def schedule(
    name: str, stages: int, micro_batches: int, as_csv: bool, **options: int | None
) -> None:
    """Draw the grid of a schedule.

    \b
    Example:
      dpipe schedule 1f1b --stages 4 --micro-batches 8
    """
    from dpipe.schedule.check import check
    from dpipe.schedule.generate import generate
    from dpipe.schedule.text import draw, to_csv

    plan = generate(name, stages, micro_batches, **options)  # type: ignore[arg-type]
    check(plan)
    _print(to_csv(plan) if as_csv else draw(plan))


@main.command()
@_RUN
def trace(run: str) -> None:
    """Write RUN/trace.json: the last steps of all ranks on one clock, the prediction beside them.

    Open it in ui.perfetto.dev or chrome://tracing.

    \b
    Example:
      dpipe trace runs/quickstart
    """
    from dpipe.report.trace import write_chrome

    _print(write_chrome(Path(run)))


@main.command()
@_RUN
@click.option("--prompt", required=True, help="The text to continue.")
@click.option(
    "--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Tokens to add."
)
@click.option(
    "--temperature",
    type=_Range(min=0),
    default=0.8,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--fallback", is_flag=True, help="If the newest checkpoint is damaged, use the one before."
)
def generate(run: str, prompt: str, **options: Any) -> None:
    """Continue a text with the newest checkpoint of a run.

    \b
    Example:
      dpipe generate runs/quickstart --prompt "My fellow citizens, "
    """
    from dpipe.run.generate import generate_text

    _print(generate_text(Path(run), prompt, **options))


@main.command()
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
@click.option("--quick", is_flag=True, help="At most a minute: fewer rounds, and perhaps rows.")
@_JSON
def bench(name: str, hosts: str, rank: int, quick: bool, as_json: bool) -> None:
    """Measure a ratio, both sides in one run. Progress goes to stderr.

    \b
      engine      each schedule on replay stages in four processes: measured step over simulated step
      all-reduce  64 MB averaged over four processes: dpipe against gloo
      transport   16 MB tensors between two processes: gRPC against gloo's send and recv
      pipelining  one GPT in two processes: dpipe against torch.distributed.pipelining
      mfu         one GPT (1.3B on a GPU) in one stage: model FLOPs utilisation, against a plain training loop
    \b
    Example:
      dpipe bench engine
    """
    from dpipe.baselines.bench import bench_text

    _print(bench_text(name, as_json, tuple(hosts.split(",")) if hosts else (), rank, quick=quick))
