"""Which machines a placement uses, and what they cost."""

from dpipe.placement.climb import Placed
from dpipe.placement.objective import hourly, of_million_tokens
from dpipe.placement.problem import PlanProblem


def names_of(problem: PlanProblem, placement: Placed) -> list[str]:
    """The machine of each stage, replica after replica."""
    units = problem.units(placement.shape.tensor_parallel)
    return [problem.cluster.names[place] for place in units.machine[placement.seats.ravel()]]


def price_per_hour(problem: PlanProblem, placement: Placed) -> float:
    """Of all machines that are used."""
    units = problem.units(placement.shape.tensor_parallel)
    return float(hourly(units, placement.seats[None])[0])


def price_of(problem: PlanProblem, placement: Placed, step_s: float) -> float:
    """Of a million tokens."""
    return of_million_tokens(price_per_hour(problem, placement), step_s, problem.tokens)
