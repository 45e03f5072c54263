"""Commands that decide: plan."""

import click

from dpipe.cli.options import CONFIG, JSON, OVERRIDE, TRUST_CODE, NumberRange, show
from dpipe.processes.imports import imported_for_good


@click.command()
@CONFIG
@OVERRIDE
@click.option(
    "--machines",
    type=click.Path(dir_okay=False),
    required=True,
    help="The machines and their links, as `dpipe measure` writes them.",
)
@click.option("--write", type=click.Path(dir_okay=False), help="Keep the plan in this file.")
@click.option("--png", type=click.Path(dir_okay=False), help="Draw the plan into this file.")
@click.option(
    "--max-price",
    type=NumberRange(min=0),
    help="The most that all machines of the plan may cost an hour.",
)
@click.option(
    "--objective",
    type=click.Choice(["time", "price"]),
    default="time",
    show_default=True,
    help="What is to be least: seconds a step, or the price of a million tokens.",
)
@click.option(
    "--formats",
    default="none",
    show_default=True,
    metavar="A,B,...",
    help="Wire formats that may be chosen where CONFIG states none, such as none,bf16,int8.",
)
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the search."
)
@JSON
@TRUST_CODE
def plan(config: str, overrides: tuple[str, ...], formats: str, **options: object) -> None:
    """Decide which machine holds which layers, and how the step goes.

    What CONFIG or -o states is fixed; all else is chosen.

    \b
    Example:
      dpipe plan job.toml --machines machines.toml --write plan.toml
      dpipe launch job.toml --plan plan.toml
    """
    with imported_for_good():
        from dpipe.planner.command import plan_text

    names = tuple(name.strip() for name in formats.split(","))
    show(plan_text(config, overrides, formats=names, **options))  # type: ignore[arg-type]
