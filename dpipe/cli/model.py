"""Commands that use a trained model: generate."""

from pathlib import Path
from typing import Any

import click

from dpipe.cli.options import RUN, TRUST_CODE, NumberRange, show


@click.command()
@RUN
@click.option("--prompt", required=True, help="The text to continue.")
@click.option(
    "--tokens", type=click.IntRange(min=1), default=200, show_default=True, help="Tokens to add."
)
@click.option(
    "--temperature",
    type=NumberRange(min=0),
    default=0.8,
    show_default=True,
    help="0 always takes the likeliest token.",
)
@click.option("--seed", type=int, default=0, show_default=True)
@click.option(
    "--fallback", is_flag=True, help="If the newest checkpoint is damaged, use the one before."
)
@TRUST_CODE
def generate(run: str, prompt: str, **options: Any) -> None:
    """Continue a text with the newest checkpoint of a run.

    \b
    Example:
      dpipe generate runs/quickstart --prompt "My fellow citizens, "
    """
    from dpipe.run.generate import generate_text

    show(generate_text(Path(run), prompt, **options))
