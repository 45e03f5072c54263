"""Commands that use a trained model: generate, export, eval."""

from functools import partial
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
    from dpipe.export.run import export_folder

    step = export_folder(Path(run), Path(folder), **options)
    show(f"{folder}: the model before step {step}")


def _names(_context: click.Context, _parameter: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise click.BadParameter("give the name of a task, or several with commas")
    return names


@click.command("eval")
@RUN
@click.option(
    "--tasks",
    required=True,
    callback=_names,
    metavar="A,B,...",
    help="Names of lm_eval's tasks, groups or tags; * stands for any letters.",
)
@click.option(
    "--include-path",
    type=click.Path(file_okay=False),
    help="A folder with tasks of your own, as lm_eval has them: YAML files.",
)
@click.option("--limit", type=click.IntRange(min=1), help="So many examples of each task; no more.")
@click.option(
    "--num-fewshot",
    type=click.IntRange(min=0),
    help="Solved examples ahead of each question; default: as the task says.",
)
@click.option("--batch-size", type=click.IntRange(min=1), default=1, show_default=True)
@click.option(
    "--chat", "apply_chat_template", is_flag=True, help="Ask by the model's chat template."
)
@click.option(
    "--exported",
    type=click.Path(file_okay=False),
    help="A folder that `dpipe export` wrote, to take in place of exporting again.",
)
@click.option(
    "--published", is_flag=True, help="Also the model before its training, in a column beside it."
)
@BEST
def evaluate(
    run: str, *, best: bool, exported: str | None, published: bool, **harness: Any
) -> None:
    """Evaluate the newest checkpoint of a run of model.hf with lm-evaluation-harness.

    It needs the extra dpipe[eval]. All results go to a file in RUN/eval.

    \b
    Example:
      dpipe eval runs/finetune --tasks arc_easy,hellaswag --limit 200
      dpipe eval runs/finetune --tasks my_task --include-path tasks --chat --published
    """
    with imported_for_good():
        from dpipe.export.evaluation import Harness, evaluate_run

    table = evaluate_run(
        Path(run),
        Harness(**harness),
        best=best,
        exported=exported,
        published=published,
        say=partial(click.echo, err=True),
    )
    show(table)
