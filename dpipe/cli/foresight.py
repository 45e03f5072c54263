"""Commands that show a step: predicted, as a grid, as it was."""

from pathlib import Path

import click

from dpipe.cli.options import CONFIG, JSON, MACHINES, OVERRIDE, PLAN, RUN, TRUST_CODE, show
from dpipe.processes.imports import imported_for_good
from dpipe.schedule.generate import GENERATORS, who_take


@click.command()
@CONFIG
@OVERRIDE
@click.option(
    "--network",
    type=click.Path(dir_okay=False),
    help="A network profile, or a file of machines; default: predict.network.",
)
@PLAN
@MACHINES
@JSON
@TRUST_CODE
def simulate(
    config: str,
    overrides: tuple[str, ...],
    network: str | None,
    plan: str | None,
    machines: tuple[str, ...],
    as_json: bool,
    trust_code: bool,
) -> None:
    """Predict a step: seconds, bubble, micro-batches in flight, bytes a link. Needs no torch for
    built-in models.

    \b
    Example:
      dpipe simulate scripts/quickstart.toml -o pipeline.schedule=zero-bubble
    """
    overrides += machines
    if plan is not None:
        from dpipe.planner.fits import planned

        overrides = planned(config, overrides, plan, trust_code=trust_code)
    with imported_for_good():
        from dpipe.plan.text import forecast_text

    show(forecast_text(config, overrides, network, as_json, trust_code=trust_code))


@click.command()
@click.argument("name", type=click.Choice(tuple(GENERATORS)))
@click.option("--stages", type=click.IntRange(min=1), required=True, help="Stages in all.")
@click.option(
    "--micro-batches", type=click.IntRange(min=1), required=True, help="Micro-batches a step."
)
@click.option(
    "--stages-per-rank",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help=f"Stages on each rank; above 1 for {who_take('stages_per_rank')}.",
)
@click.option(
    "--in-flight",
    type=click.IntRange(min=1),
    help=f"Micro-batches in flight on the first rank, for {who_take('in_flight')}.",
)
@click.option(
    "--memory-limit",
    type=click.IntRange(min=1),
    help=f"Micro-batches that a rank may hold, for {who_take('memory_limit')}.",
)
@click.option(
    "--sequence-slices",
    "num_slices",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help=f"Slices of each sequence, for {who_take('num_slices')}; they are what is numbered.",
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

    generated = generate(name, stages, micro_batches, **options)  # type: ignore[arg-type]
    check(generated)
    show(to_csv(generated) if as_csv else draw(generated))


@click.command()
@RUN
def trace(run: str) -> None:
    """Write RUN/trace.json: the last steps of all ranks on one clock, beside the prediction.

    Open it in ui.perfetto.dev or chrome://tracing.

    \b
    Example:
      dpipe trace runs/quickstart
    """
    from dpipe.report.trace import write_chrome

    show(write_chrome(Path(run)))
