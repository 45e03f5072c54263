"""`pipeline.plan = "auto"`: the ranks measure each other as they join, and rank 0 plans the rest of
the job for them.

    rank 0    join  measure  search, share the plan ──┐  leave   join the run
    rank 1    join  measure  take the plan  <─────────┤  leave   join the run
    rank 2    join  measure  take the plan  <─────────┘  leave   (left out: it ends here)

Each rank counts as a machine of its own; where the job states tensor_parallel.size, each so many
ranks of one host do. Rank 0 keeps its number: the others know its address, and somebody looks at
its output.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dpipe.config.load import Config, load
from dpipe.coordinator.shared import PLAN
from dpipe.machines.file import dump_machines
from dpipe.machines.groups import RankGroups
from dpipe.machines.machine import Cluster
from dpipe.placement.choices import OpenChoices, choices_of
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.planner.decide import decide
from dpipe.planner.fits import refuse_other_machines
from dpipe.planner.plan_file import Plan, dump_plan, keep_text, plan_of_rank_0
from dpipe.planner.text import as_row, as_text
from dpipe.planner.whole_model import whole_model_of
from dpipe.processes.environment import ProcessInfo
from dpipe.run.measuring import Say, measuring, silent
from dpipe.toml import to_toml

_SIZES = (1, 4)  # of micro-batches: a line through two tells the others
_TOO_SLOW = "the plan leaves this rank out: it would only slow the run down"
_NO_GROUP = "{} is left out: its host has no tensor_parallel.size ranks for another group"


def plan_together(
    config: Config, process: ProcessInfo, join_s: float | None, say: Say
) -> tuple[Config, ProcessInfo] | None:
    """The job with all that was decided, and which rank of it this process is; None for one that
    is left out, once it has said why. All ranks call it; rank 0 says the progress, and the plan.

    The plan and the machines are kept in `data.cache`. Raises as `measuring` does, and
    `ConfigError` where nothing fits.
    """
    groups, text = _planned_by_rank_0(config, process, join_s, say)
    plan = plan_of_rank_0(text)
    refuse_other_machines(plan, groups.cluster)
    folder = Path(config.data.cache)
    machines = keep_text(folder, "machines", dump_machines(groups.cluster))
    kept = keep_text(folder, "plan", text)
    if process.rank == 0:
        say(f"kept in {kept} and {machines}: to resume the run, give it --plan and --machines")
    name = groups.ranks.names[process.rank]
    rank = groups.rank_in(plan.groups, name)
    if rank is None:
        say(_NO_GROUP.format("this rank") if name in groups.ungrouped else _TOO_SLOW)
        return None
    planned = _with_plan(config, plan, machines)
    return planned, replace(process, rank=rank, world_size=len(plan.seats))


def _planned_by_rank_0(
    config: Config, process: ProcessInfo, join_s: float | None, say: Say
) -> tuple[RankGroups, str]:
    """The text of the plan, and the ranks that it is for."""
    # For its errors, before anybody is met.
    choices = choices_of(config, ("none",))
    sizes = tuple(size for size in _SIZES if size <= config.train.batch_size)
    before = process.before_the_run("measure")
    if process.rank != 0:
        say = silent
    with measuring(config, before, micro_batch_sizes=sizes, join_s=join_s, say=say) as (
        coordinator,
        measured,
    ):
        groups = RankGroups.of(measured.cluster, config.tensor_parallel.size)
        text = ""
        if process.rank == 0:
            notes = (*measured.problems, *map(_NO_GROUP.format, groups.ungrouped))
            text = _planned(config, groups.cluster, choices, notes, say)
        shared = coordinator.share("plan/together", text, config.timeouts.transfer, PLAN)
    return groups, shared[0]


def _with_plan(config: Config, plan: Plan, machines: Path) -> Config:
    overrides = (
        *plan.overrides,
        f"predict.machines={to_toml(str(machines))}",
        f"predict.seats={to_toml(list(plan.groups))}",
        "pipeline.plan=none",
    )
    # Code that the job names was asked about when it was loaded.
    return load(config, overrides, trust_code=True)


def _planned(
    config: Config, cluster: Cluster, choices: OpenChoices, notes: Sequence[str], say: Say
) -> str:
    """The text of the plan, on rank 0."""
    for line in notes:
        say(line)
    say("planning")
    whole = whole_model_of(config)
    problem = PlanProblem(config, cluster, choices, whole, first=cluster.names[0])
    decided = decide(problem, Objective())
    say(as_text(decided, as_row(decided)))
    return dump_plan(decided.plan)
