"""Commands that use a trained model: generate, export."""

from pathlib import Path
from typing import Any

import click

from dpipe.cli.options import RUN, TRUST_CODE, NumberRange, show
from dpipe.processes.imports import imported_for_good

BEST = click.option(
    "--best",
    is_flag=True,
    help="Of the checkpoint with the lowest held-out loss, in place of the newest.",
)


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
@click.option(
    "--chat",
    is_flag=True,
    help="Take the prompt as a user's turn and print the answer, by model.hf's chat template.",
)
@BEST
@TRUST_CODE
def generate(run: str, prompt: str, **options: Any) -> None:
    """Continue a text with the newest checkpoint of a run.

    \b
    Example:
      dpipe generate runs/quickstart --prompt "My fellow citizens, "
    """
    with imported_for_good():
        from dpipe.run.generate import generate_text

    show(generate_text(Path(run), prompt, **options))


@click.command()
@RUN
@click.option(
    "--to",
    "folder",
    required=True,
    type=click.Path(file_okay=False),
    help="A new folder, which transformers opens with from_pretrained.",
)
@click.option(
    "--adapter",
    "only_adapter",
    is_flag=True,
    help="Write the adapter alone, as peft has it, instead of the model with it merged.",
)
@BEST
def export(run: str, folder: str, **options: Any) -> None:
    """Write the newest checkpoint of a run of model.hf as Hugging Face's libraries read it.

    \b
    Example:
      dpipe export runs/finetune --to my-model
    """
    from dpipe.run.export import export_folder

    step = export_folder(Path(run), Path(folder), **options)
    show(f"{folder}: the model before step {step}")
