"""A job and its machines become a plan: a search by the estimate; of the best dozen the clock of a
search of schedules says which may be best, and the simulator decides among these.
"""

from dataclasses import dataclass, replace

from dpipe.errors import ConfigError
from dpipe.placement.objective import Objective
from dpipe.placement.priced import names_of, price_of
from dpipe.placement.problem import PlanProblem
from dpipe.placement.search import search
from dpipe.plan.on_machines import digest_of_layers
from dpipe.planner.evaluate import Evaluated, Trial
from dpipe.planner.impossible import why_nothing_fits
from dpipe.planner.plan_file import Plan
from dpipe.schedule.generate import AUTO
from dpipe.schedule.text import to_csv
from dpipe.search.wire_choice import AS_FAST, choose_formats
from dpipe.wire.format import HopFormats

_CLOSE = 1.3  # times the best estimate: what is farther off, the simulator does not make the best

_CLOCK_IS_OFF = 1.05  # times the least by the clock: what is farther off is not simulated

# Of what machines have, in turn, while nothing that the search finds there fits. Half of it is more
# than the estimate was ever seen to be off by.
_SHARES_OF_MEMORY = (1.0, 0.9, 0.75, 0.5)

_ALWAYS = 4  # are timed: the best, and alternatives to show


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
    timed = _timed(problem, objective, seed)
    if not timed:
        raise ConfigError(why_nothing_fits(problem, objective))

    def value(found: Evaluated) -> float:
        step_s = found.step_us / 1e6
        if objective.name == "price":
            return price_of(problem, found.placement, step_s)
        return step_s

    least = min(map(value, timed))
    quick = []
    for found in timed:
        # The step of the others is shown beside the plan's, for which the clock does.
        # The clock is right to a few percent: only who may be the best is simulated.
        may_be_best = value(found) <= _CLOCK_IS_OFF * least
        quick.append(found.trial.quickly() if may_be_best else found)
    quick.sort(key=value)
    # Only the best has its order searched for, which takes as long as simulating all others.
    best = _with_larger_formats(quick[0])
    if problem.choices.schedule == AUTO:
        best = best.trial.improved(best)
    best = best.trial.fully(best.schedule)
    return Decided(problem, objective, best, tuple(quick[1:]))


def _timed(problem: PlanProblem, objective: Objective, seed: int) -> list[Evaluated]:
    """The best few placements, and all that are close to the best, of those that fit.

    The estimate adds up what layers hold one by one, and may let all that is close to the best be a
    little too large. The search is then made again as if the machines had less memory.
    """
    for share in _SHARES_OF_MEMORY:
        placements = search(_with_memory(problem, share), objective, seed)
        if not placements:
            break
        most = _CLOSE * placements[0].value
        close = [placement for placement in placements[_ALWAYS:] if placement.value <= most]
        trials = [Trial(problem, placement) for placement in (*placements[:_ALWAYS], *close)]
        timed = [trial.by_clock[0] for trial in trials if trial.by_clock]
        if timed:
            return timed
    return []


def _with_memory(problem: PlanProblem, share: float) -> PlanProblem:
    """The same where each machine has `share` of its memory, and a rank may hold as much less."""
    if share == 1:
        return problem
    machines = []
    for machine in problem.cluster.machines:
        memory_gb = None if machine.memory_gb is None else share * machine.memory_gb
        machines.append(replace(machine, memory_gb=memory_gb))
    limit_gb = problem.config.pipeline.memory_gb
    limit_gb = None if limit_gb is None else share * limit_gb
    config = problem.config.with_(pipeline__memory_gb=limit_gb)
    cluster = replace(problem.cluster, machines=tuple(machines))
    return replace(problem, config=config, cluster=cluster, _known={})


def _with_larger_formats(found: Evaluated) -> Evaluated:
    """The search takes the smallest formats everywhere: larger ones round less, and on links that
    have time to spare they cost nothing.
    """
    problem = found.trial.problem
    placement = found.placement
    shape = placement.shape

    def trial(formats: HopFormats) -> Trial:
        other = replace(shape, forward_wires=formats.forward, backward_wires=formats.backward)
        return Trial(problem, replace(placement, shape=other))

    def step_us(formats: HopFormats) -> float:
        return float(trial(formats).estimate.step_s[0]) * 1e6

    if len(problem.choices.wires) < 2 or shape.stages == 1:
        return found
    formats = choose_formats(problem.choices.wires, shape.stages - 1, step_us)
    larger = trial(formats).quickly()
    # The estimate may have overlooked what the simulator sees.
    return larger if larger.step_us <= AS_FAST * found.step_us else found


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
        model=digest_of_layers(problem.config),
        machines=problem.cluster.name,
        step_s=step_s,
        settings=_settings(found),
        replicas=tuple(replicas),
        price_per_million_tokens=price,
    )


def _cut_of(found: Evaluated) -> dict[str, object]:
    cuts = [list(cut) for cut in found.placement.cuts]
    return {"split": cuts[0]} if len(cuts) == 1 else {"splits": cuts}


def _settings(found: Evaluated) -> dict[str, dict[str, object]]:
    config = found.config
    pipeline = config.pipeline
    settings: dict[str, dict[str, object]] = {
        "train": {"num_microbatches": config.train.num_microbatches},
        "pipeline": {
            "stages": pipeline.stages,
            **_cut_of(found),
            "recompute": pipeline.recompute,
            "wire": pipeline.model_dump()["wire"],
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
