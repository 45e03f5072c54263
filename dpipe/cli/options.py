"""Arguments and options of several commands, and the printing of what a command is asked for."""

import math
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from dpipe.errors import RunError
from dpipe.toml import to_toml

F = TypeVar("F", bound=Callable[..., Any])

MAX_WAIT_S = 30 * 86_400  # as in [timeouts], whose file would load pydantic

CONFIG = click.argument("config", type=click.Path(dir_okay=False))
RUN = click.argument("run", type=click.Path(file_okay=False))
JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text.")
OVERRIDE = click.option(
    "-o",
    "--override",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override one key of the configuration, such as -o train.steps=100; may be repeated.",
)


def _as_override(
    _context: click.Context,
    _parameter: click.Parameter,
    path: str | None,
) -> tuple[str, ...]:
    # Quoted: a bare path such as 3.toml would be read as a value of another type.
    return () if path is None else (f"predict.machines={to_toml(path)}",)


MACHINES = click.option(
    "--machines",
    type=click.Path(dir_okay=False),
    callback=_as_override,
    help="A file of machines; default: predict.machines.",
)
TRUST_CODE = click.option(
    "--trust-code",
    is_flag=True,
    help="Let model.layers name code outside the working folder that no installed package declares "
    "for it.",
)


PLAN = click.option(
    "--plan",
    type=click.Path(dir_okay=False),
    help="What `dpipe plan` decided; refused where it does not fit CONFIG.",
)


def resuming(command: F) -> F:
    """The options of commands that can continue a run."""
    fallback = click.option(
        "--fallback",
        is_flag=True,
        help="With --resume: if the newest checkpoint is damaged, use the one before.",
    )
    change = click.option(
        "--change",
        multiple=True,
        metavar="KEY",
        help="With --resume: KEY, such as train.seed, may differ from the run's; may be repeated.",
    )
    resume = click.option(
        "--resume",
        metavar="RUN",
        help="Continue the run in this folder from its newest checkpoint.",
    )
    return resume(fallback(change(command)))  # click lists the outermost first


class NumberRange(click.FloatRange):
    """A float range that also rejects NaN, which passes every comparison."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number


def show(answer: object) -> None:
    """Print what a command is asked for. Raises `RunError` where it cannot be written."""
    try:
        click.echo(answer)
    except BrokenPipeError:
        raise  # the reader has seen enough; click ends the command
    except OSError as error:
        from dpipe.report.display import point_nowhere

        point_nowhere(sys.stdout)
        raise RunError(f"cannot write to standard output: {error}") from None
