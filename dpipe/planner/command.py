"""`dpipe plan`, from files to text."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

from dpipe.config.load import load
from dpipe.errors import ConfigError
from dpipe.machines.file import load_machines
from dpipe.machines.machine import Cluster
from dpipe.placement.choices import choices_of
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.plan.on_machines import refuse_times_of_other_model
from dpipe.planner.decide import decide
from dpipe.planner.picture import draw
from dpipe.planner.plan_file import dump_plan
from dpipe.planner.text import as_row, as_text
from dpipe.planner.whole_model import whole_model_of

_NAMED = 6


def plan_text(
    path: str,
    overrides: Sequence[str],
    machines: str,
    *,
    write: str | None,
    max_price: float | None,
    objective: str,
    formats: Sequence[str],
    seed: int,
    as_json: bool,
    png: str | None = None,
    trust_code: bool = False,
) -> str:
    """Plan the job in `path` on the machines in `machines`; `write` is where the plan is kept."""
    # By where they lead: ./job.toml is job.toml.
    read = [Path(path).resolve(), Path(machines).resolve()]
    for flag, file in (("--write", write), ("--png", png)):
        if file is not None and Path(file).resolve() in read:
            raise ConfigError(
                f"{flag} {file} would replace what the plan is made from: take another"
            )
    config = load(path, overrides, trust_code=trust_code)
    if config.pipeline.programs:
        raise ConfigError(
            "pipeline.programs is the order of another plan: leave it out of the job, and dpipe "
            "plan finds one"
        )
    cluster = load_machines(machines)
    # A plan of times that belong to other layers would look as good as any.
    refuse_times_of_other_model(config, cluster)
    if max_price is not None or objective == "price":
        _refuse_unknown_prices(cluster)
    choices = choices_of(config, formats)
    whole = whole_model_of(config)
    problem = PlanProblem(config, cluster, choices, whole, first=cluster.relay)
    decided = decide(
        problem, Objective(objective, math.inf if max_price is None else max_price), seed
    )
    if write is not None:
        _write(Path(write), dump_plan(decided.plan))
    if png is not None:
        draw(decided, png)
    row = as_row(decided)
    return json.dumps(row, indent=2) if as_json else as_text(decided, row)


def _refuse_unknown_prices(cluster: Cluster) -> None:
    """One that is not known would count as nothing."""
    unknown = [machine.name for machine in cluster.machines if machine.price_per_hour is None]
    if unknown:
        more = f" and {len(unknown) - _NAMED} more" if len(unknown) > _NAMED else ""
        raise ConfigError(
            f"{cluster.name} does not say what these machines cost: "
            f"{', '.join(unknown[:_NAMED])}{more}; give each its price_per_hour, 0 where it is "
            "free, or leave out --max-price and --objective price"
        )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"plan {path} cannot be written: {error.strerror}") from None
