"""A job and its machines become a plan: a search by the estimate, then the simulator decides among
the best dozen.
"""

import math
from dataclasses import dataclass

from dpipe.errors import ConfigError
from dpipe.placement.objective import Objective
from dpipe.placement.priced import names_of, price_of
from dpipe.placement.problem import PlanProblem
from dpipe.placement.search import search
from dpipe.planner.evaluate import Evaluated, Trial
from dpipe.planner.impossible import why_nothing_fits
from dpipe.planner.plan_file import Plan
from dpipe.schedule.generate import AUTO
from dpipe.schedule.text import to_csv

_CLOSE = 1.3  # times the best estimate: what is farther off, the simulator does not make the best

_ALWAYS = 4  # are simulated: the best, and alternatives to show


@dataclass(frozen=True)
class Decided:
    """The best placement as the simulator sees it, and the next best."""

    problem: PlanProblem
    objective: Objective
    best: Evaluated
    others: tuple[Evaluated, ...]  # best first

    @property
    def plan(self) -> Plan:
        return plan_of(self.problem, self.best)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Machines that would only slow the run down, or cost more than they bring."""
        used = set(names_of(self.problem, self.best.placement))
        return tuple(name for name in self.problem.cluster.names if name not in used)


def decide(problem: PlanProblem, objective: Objective, seed: int = 0) -> Decided:
    """Raises `ConfigError` where nothing fits, saying why."""
    placements = search(problem, objective, seed)
    if not placements:
        raise ConfigError(why_nothing_fits(problem, objective))

    def value(found: Evaluated) -> float:
        step_s = found.step_us / 1e6
        if objective.name == "price":
            return price_of(problem, found.placement, step_s)
        return step_s

    most = _CLOSE * placements[0].value
    close = [placement for placement in placements[_ALWAYS:] if placement.value <= most]
    close = [*placements[:_ALWAYS], *close]
    quick = [Trial(problem, placement).quickly() for placement in close]
    quick = [found for found in quick if math.isfinite(found.step_us)]
    if not quick:
        raise ConfigError(why_nothing_fits(problem, objective))
    quick.sort(key=value)
    # Only the best has its order searched for, which takes as long as simulating all others.
    best = quick[0]
    if problem.choices.schedule == AUTO:
        best = best.trial.improved(best)
    best = best.trial.fully(best.schedule)
    return Decided(problem, objective, best, tuple(quick[1:]))


def plan_of(problem: PlanProblem, found: Evaluated) -> Plan:
    placement = found.placement
    shape = placement.shape
    names = names_of(problem, placement)
    replicas = [
        tuple(names[start : start + shape.stages]) for start in range(0, len(names), shape.stages)
    ]
    step_s = found.step_us / 1e6
    price = None
    if all(machine.price_per_hour is not None for machine in problem.cluster.machines):
        price = price_of(problem, placement, step_s)
    return Plan(
        model=problem.config.layers_digest(),
        machines=problem.cluster.name,
        step_s=step_s,
        settings=_settings(found),
        replicas=tuple(replicas),
        price_per_million_tokens=price,
    )


def _settings(found: Evaluated) -> dict[str, dict[str, object]]:
    config = found.config
    pipeline = config.pipeline
    settings: dict[str, dict[str, object]] = {
        "train": {"num_microbatches": config.train.num_microbatches},
        "pipeline": {
            "stages": pipeline.stages,
            "split": list(pipeline.split),
            "recompute": pipeline.recompute,
            "wire": pipeline.wire,
            "schedule": pipeline.schedule,
        },
        "tensor_parallel": {"size": config.tensor_parallel.size},
        "data_parallel": {"replicas": config.data_parallel.replicas},
        "transport": {"connections": found.network.connections},
    }
    # One replica agrees with nobody: what the job says of it stays.
    if config.data_parallel.replicas > 1:
        settings["data_parallel"] |= {
            "kind": config.data_parallel.kind,
            "wire": config.data_parallel.wire,
        }
    if pipeline.schedule == AUTO:
        settings["pipeline"]["programs"] = to_csv(found.schedule).split()
    return settings
