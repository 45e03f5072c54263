"""A run's model at the tasks of lm-evaluation-harness (EleutherAI), which opens what we export.

checkpoint ──export──> a folder ──lm_eval──> RUN/eval/step-40-20261125-101500.json, and a table

A task is a name of the harness, whose data come from the hub, or a YAML file in a folder of one's
own. The harness runs in this process, on a GPU if torch sees one.
"""

import difflib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dpipe.errors import ConfigError, RunError
from dpipe.export.run import export_folder
from dpipe.hub.extra import hub_function
from dpipe.store.run_folder import load_configuration, needing_room

_PUBLISHED = "published"
_WIDTH = 100


@dataclass(frozen=True)
class Harness:
    """What lm_eval is told besides the model, by its own names."""

    tasks: tuple[str, ...]  # names, groups, tags; "*" stands for any letters
    include_path: str | None = None  # a folder of tasks
    limit: int | None = None  # examples of each task; None: all
    num_fewshot: int | None = None  # None: as the task says
    batch_size: int = 1  # requests that are computed together
    apply_chat_template: bool = False  # whether an example is asked as a user's turn


@dataclass(frozen=True)
class Score:
    task: str
    metric: str
    value: float
    error: float | None  # its standard error, where the harness gives one
    count: int | None  # examples


def evaluate_run(
    run: Path,
    harness: Harness,
    *,
    best: bool,
    exported: str | None,
    published: bool,
    say: Callable[[str], None],
) -> str:
    """The table of a run's model, or of the folder `exported` that it was exported to before; with
    `published` beside that of the model before its training. Everything that lm_eval returned goes
    to a file in the run's folder.

    Raises `ConfigError` for a run of another model or of an encoder, for tasks that there are not,
    and without lm_eval; `RunError` where a task cannot be carried out.
    """
    library = _library()
    _check_model(run)
    manager = _task_manager(library, harness)
    results = {}
    with _models(run, best=best, exported=exported, published=published) as models:
        for name, folder in models:
            say(f"evaluating {name}")
            results[name] = _evaluated(library, manager, folder, harness)
    scores = {name: _scores(result) for name, result in results.items()}
    path = _write(run, harness, scores, results)
    return f"{_table(scores)}\nwritten to {path}"


def _check_model(run: Path) -> None:
    """Raises `ConfigError` if `run` is no run, or its model continues no text."""
    config = load_configuration(run)
    # transformers would open its export as a decoder: scores that mean nothing, and no error.
    if config.model.hf is not None and hub_function("model:is_encoder")(config):
        raise ConfigError(
            f"{run} is a run of an encoder, and lm_eval's tasks ask how a text goes on: train with "
            "train.eval_every, and read held_out_accuracy in metrics.jsonl"
        )


def _library() -> Any:
    try:
        import lm_eval
        import lm_eval.tasks
    except ModuleNotFoundError as error:
        raise ConfigError(f"dpipe eval needs {error.name}: pip install 'dpipe[eval]'") from None
    return lm_eval


def _task_manager(library: Any, harness: Harness) -> Any:
    """Raises `ConfigError` for a task that it does not know."""
    folder = harness.include_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            f"--include-path {folder} is not a folder; it must hold tasks as YAML files"
        )
    manager = library.tasks.TaskManager(include_path=folder)
    for name in harness.tasks:
        if manager.match_tasks([name]):
            continue
        near = difflib.get_close_matches(name, manager.all_tasks)
        hint = f"did you mean {', '.join(near)}?" if near else "lm_eval ls tasks lists its own"
        raise ConfigError(f"lm_eval has no task {name!r}, and --include-path adds none; {hint}")
    return manager


@contextmanager
def _models(
    run: Path, *, best: bool, exported: str | None, published: bool
) -> Iterator[Iterator[tuple[str, Path]]]:
    """Name and folder of each, one after the other. What was exported for it is gone afterwards."""
    if exported is not None and not (Path(exported) / "config.json").is_file():
        raise ConfigError(f"--exported {exported} holds no config.json: dpipe export writes one")
    # In the run's folder, which has room for checkpoints; /tmp may be in memory.
    with needing_room(run), TemporaryDirectory(dir=run, prefix="eval-") as temporary:
        yield _folders(run, Path(temporary), best, exported, published)


def _folders(
    run: Path, temporary: Path, best: bool, exported: str | None, published: bool
) -> Iterator[tuple[str, Path]]:
    if published:
        folder = temporary / _PUBLISHED
        export_folder(run, folder, learned=False)
        yield _PUBLISHED, folder
    if exported is not None:
        yield Path(exported).name, Path(exported)
        return
    folder = temporary / "trained"
    step = export_folder(run, folder, best=best)
    yield f"step-{step}", folder


def _evaluated(library: Any, manager: Any, folder: Path, harness: Harness) -> Any:
    model = {"pretrained": str(folder), "dtype": "auto"}
    # Left out, lm_eval takes a GPU without asking whether there is one.
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = asdict(harness)
    del options["include_path"]
    options["tasks"] = list(harness.tasks)
    try:
        return library.simple_evaluate(
            model="hf",
            model_args=model,
            task_manager=manager,
            device=device,
            log_samples=False,
            **options,
        )
    except Exception as error:  # a task is data from elsewhere, and may be code
        reason = " ".join(str(error).split())[:500]
        raise RunError(
            f"lm_eval cannot carry out {', '.join(harness.tasks)}: {type(error).__name__}: "
            f"{reason}; the data of its own tasks come from the hub: without a network, give tasks "
            "whose data are files, with --include-path"
        ) from error


def _scores(results: Mapping[str, Any]) -> list[Score]:
    """Of "acc,none" and "acc_stderr,none" of each task: a metric, and the filter of its answers."""
    scores = []
    for task, values in results["results"].items():
        counts = results.get("n-samples", {}).get(task, {})
        for key, value in values.items():
            metric, comma, answers = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            error = values.get(f"{metric}_stderr,{answers}")
            count = counts.get("effective")  # of those that were asked
            name = metric
            if answers != "none":
                name = f"{metric} ({answers})"
            score = Score(task, name, value, _number(error), count)
            scores.append(score)
    return scores


def _number(value: object) -> float | None:
    # "N/A" where it is not known
    return float(value) if isinstance(value, int | float) else None


def _table(scores: Mapping[str, Sequence[Score]]) -> str:
    table = Table("task", "metric", "examples")
    for name in scores:
        table.add_column(name, justify="right")
    for rows in zip(*scores.values(), strict=True):
        first = rows[0]
        count = str(first.count or "-")
        cells = map(_cell, rows)
        table.add_row(first.task, first.metric, count, *cells)
    out = StringIO()
    Console(file=out, width=_WIDTH).print(table)
    return out.getvalue().rstrip()


def _cell(score: Score) -> str:
    if score.error is None:
        return f"{score.value:.4f}"
    return f"{score.value:.4f} ± {score.error:.4f}"


def _write(
    run: Path,
    harness: Harness,
    scores: Mapping[str, Sequence[Score]],
    results: Mapping[str, Any],
) -> Path:
    # By the time: the next evaluation of the same step may ask other tasks.
    name = list(results)[-1]
    path = run / "eval" / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}.json"
    table = {
        "harness": asdict(harness),
        "scores": {name: [asdict(row) for row in rows] for name, rows in scores.items()},
        "lm_eval": dict(results),
    }
    with needing_room(path):
        path.parent.mkdir(exist_ok=True)
        # It holds dtypes and functions too.
        path.write_text(json.dumps(table, indent=1, default=str))
    return path
