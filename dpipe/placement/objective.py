"""What a plan is to have least of: seconds a step, or the price of a million tokens, within a
budget an hour.
"""

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from dpipe.placement.estimate import Estimate
from dpipe.placement.fleet import Floats, Ints, Units
from dpipe.placement.problem import PlanProblem
from dpipe.placement.shape import PlanShape

Number = TypeVar("Number", float, Floats)

OBJECTIVES = ("time", "price")
_HOUR_S = 3600
_MILLION = 1e6


@dataclass(frozen=True)
class Objective:
    name: str = "time"
    max_price: float = math.inf  # an hour, of all machines that are used

    def __call__(
        self, problem: PlanProblem, shape: PlanShape, found: Estimate, seats: Ints
    ) -> Floats:
        units = problem.units(shape.tensor_parallel)
        # Without prices there is no budget to keep to.
        if not units.price.any():
            return found.step_s
        price = hourly(units, seats)
        value = found.step_s
        if self.name == "price":
            value = of_million_tokens(price, found.step_s, problem.tokens)
        allowed: Floats = np.where(price <= self.max_price, value, np.inf)
        return allowed


def hourly(units: Units, seats: Ints) -> Floats:
    """What the machines of each candidate's seats cost an hour, each once: [candidate]."""
    flat = seats.reshape(len(seats), -1)
    if units.one_each:
        total: Floats = units.price[flat].sum(axis=1)
        return total
    price = np.zeros(units.num_machines)
    price[units.machine] = units.price
    count = len(seats)
    candidate = np.arange(count)[:, None]
    used = np.zeros((count, units.num_machines), dtype=bool)
    used[candidate, units.machine[flat]] = True
    of_machines: Floats = used @ price
    return of_machines


def of_million_tokens(price: Number, step_s: Number, tokens: int) -> Number:
    """From a price an hour and the tokens of a step."""
    millions = _HOUR_S * tokens / _MILLION  # an hour, at a step a second
    return price * step_s / millions
