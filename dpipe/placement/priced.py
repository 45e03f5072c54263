"""Which machines a placement uses, and what they cost."""

from dpipe.placement.climb import Placed
from dpipe.placement.objective import hourly, of_million_tokens
from dpipe.placement.problem import PlanProblem


def names_of(problem: PlanProblem, placement: Placed) -> list[str]:
    """The machine of each stage, replica after replica."""
    units = problem.units(placement.shape.tensor_parallel)
    names = problem.cluster.names
    seats = placement.seats.ravel()
    return [names[place] for place in units.machine[seats]]


def price_per_hour(problem: PlanProblem, placement: Placed) -> float:
    """Of all machines that are used."""
    units = problem.units(placement.shape.tensor_parallel)
    candidates = placement.seats[None]
    (price,) = hourly(units, candidates)
    return float(price)


def price_of(problem: PlanProblem, placement: Placed, step_s: float) -> float:
    """Of a million tokens."""
    per_hour = price_per_hour(problem, placement)
    return of_million_tokens(per_hour, step_s, problem.tokens)
