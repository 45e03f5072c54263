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
from dpipe.errors import ConfigError, TransferError
from dpipe.machines.file import dump_machines
from dpipe.machines.groups import groups_of, one_rank_each, with_a_machine_each
from dpipe.measure.found import MeasuredCluster
from dpipe.placement.choices import choices_of
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.planner.decide import decide
from dpipe.planner.fits import refuse_other_machines
from dpipe.planner.plan_file import Plan, dump_plan, keep_text, parse_plan
from dpipe.planner.text import as_row, as_text
from dpipe.planner.whole_model import whole_model_of
from dpipe.processes.environment import ProcessInfo
from dpipe.run.measuring import Say, measuring
from dpipe.toml import parse_toml, to_toml

_SIZES = (1, 4)  # of micro-batches: a line through two tells the others


def plan_together(
    config: Config, process: ProcessInfo, join_s: float | None, say: Say
) -> tuple[Config, ProcessInfo] | None:
    """The job with all that was decided, and which rank of it this process is; None for one that
    the plan leaves out. All ranks call it. `say` is told the progress, and the plan.

    The plan and the machines are kept in `data.cache`. Raises as `measuring` does, and
    `ConfigError` where nothing fits.
    """
    # For its errors, before anybody is met.
    choices = choices_of(config, ("none",))
    sizes = tuple(size for size in _SIZES if size <= config.train.batch_size)
    before = process.meeting("measure")
    with measuring(config, before, micro_batch_sizes=sizes, join_s=join_s, say=say) as (
        coordinator,
        measured,
    ):
        alone = one_rank_each(measured.cluster)
        groups = groups_of(alone, config.tensor_parallel.size)
        cluster = with_a_machine_each(alone, groups)
        text = ""
        if process.rank == 0:
            whole = whole_model_of(config)
            problem = PlanProblem(config, cluster, choices, whole, first=cluster.names[0])
            text = _planned(problem, measured, say)
        shared = coordinator.share("plan/together", text, config.timeouts.transfer, PLAN)
    plan = plan_of_rank_0(shared[0])
    refuse_other_machines(plan, cluster)
    folder = Path(config.data.cache)
    machines = keep_text(folder, "machines", dump_machines(cluster))
    kept = keep_text(folder, "plan", shared[0])
    say(f"kept in {kept} and {machines}: to resume the run, give it --plan and --machines")
    rank = rank_in(plan, groups, alone.names[process.rank])
    if rank is None:
        return None
    planned = _with_plan(config, plan, machines)
    return planned, replace(process, rank=rank, world_size=len(plan.seats))


def _with_plan(config: Config, plan: Plan, machines: Path) -> Config:
    overrides = (
        *plan.overrides,
        f"predict.machines={to_toml(str(machines))}",
        f"predict.seats={to_toml(list(plan.groups))}",
        "pipeline.plan=none",
    )
    # Code that the job names was asked about when it was loaded.
    return load(config, overrides, trust_code=True)


def _planned(problem: PlanProblem, measured: MeasuredCluster, say: Say) -> str:
    """The text of the plan, on rank 0."""
    for line in measured.problems:
        say(line)
    say("planning")
    decided = decide(problem, Objective())
    say(as_text(decided, as_row(decided)))
    return dump_plan(decided.plan)


def plan_of_rank_0(text: str) -> Plan:
    """Raises `TransferError` where it is none."""
    try:
        return parse_plan(parse_toml(text))
    except (ValueError, ConfigError) as error:
        raise TransferError(
            f"rank 0 sent a plan that is none ({error}); install one dpipe version everywhere"
        ) from None


def rank_in(plan: Plan, groups: Sequence[Sequence[str]], name: str) -> int | None:
    """Which rank of the plan that of `groups` by this name is; None if the plan leaves it out."""
    for group in groups:
        if name in group and group[0] in plan.groups:
            return plan.groups.index(group[0]) * len(group) + group.index(name)
    return None
