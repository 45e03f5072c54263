"""The command line, assembled."""

import io
import sys
from typing import Any

import click

from dpipe import __version__
from dpipe.cli.configuration import config, convert
from dpipe.cli.elastic import coordinate, join, leave, status
from dpipe.cli.foresight import schedule, simulate, trace
from dpipe.cli.measuring import bench, doctor, measure
from dpipe.cli.model import evaluate, export, generate
from dpipe.cli.planning import plan
from dpipe.cli.training import launch, serve, train
from dpipe.cli.watching import report, watch
from dpipe.errors import DpipeError
from dpipe.processes.environment import set_up_grpc


class _Commands(click.Group):
    """Turns dpipe's errors into a message and an exit code: 2 for what the user can fix, 1 for a
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


@click.group(cls=_Commands)
@click.version_option(__version__)
def main() -> None:
    """Train large models as pipelines over slow, uneven networks."""
    # Here, ahead of every command: grpc reads its settings when it is first imported.
    set_up_grpc()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # a terminal without some character shows "?" in its place
        sys.stdout.reconfigure(errors="replace")


for command in (
    bench,
    config,
    convert,
    coordinate,
    doctor,
    evaluate,
    export,
    generate,
    join,
    launch,
    leave,
    measure,
    plan,
    report,
    schedule,
    serve,
    simulate,
    status,
    trace,
    train,
    watch,
):
    main.add_command(command)
