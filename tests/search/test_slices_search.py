"""Schedule "auto" where sequences are cut into slices."""

import pytest

from dpipe.errors import ScheduleError
from dpipe.network.link import Link, Network
from dpipe.schedule.check import check, peak_in_flight
from dpipe.search.slices import orders_of_slices, search_slices
from dpipe.timeline.cost import Cost
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import period

SLOW = Network(default=Link(50, 1))


def cost(num_slices: int) -> Cost:
    return Cost.uniform(4, 10_000 / num_slices, 20_000 / num_slices, 1_000_000 // num_slices)


def step_us(num_slices: int, **limits: int) -> float:
    found = search_slices(4, 4, num_slices, cost(num_slices), SLOW, **limits)
    check(found)
    return period(Scenario(found, cost(num_slices), SLOW))


def test_slices_shorten_a_step_of_few_micro_batches_on_a_slow_network() -> None:
    times = [step_us(number) for number in (1, 2, 4)]
    assert times[0] > 1.05 * times[1] > 1.05 * times[2]


def test_no_depth_that_was_weighed_is_faster() -> None:
    least_us = step_us(2)
    for order in orders_of_slices(4, 4, 2):
        assert period(Scenario(order, cost(2), SLOW)) > least_us - 1


def test_memory_limit_counts_slices_and_is_kept() -> None:
    found = search_slices(4, 4, 2, cost(2), SLOW, memory_limit=3)
    assert max(peak_in_flight(found)) <= 3
    assert step_us(2, memory_limit=3) > step_us(2)
    with pytest.raises(ScheduleError, match="raise it to 2, or cut fewer slices"):
        search_slices(4, 4, 2, cost(2), SLOW, memory_limit=1)


def test_bytes_are_limited_by_what_each_order_holds() -> None:
    found = search_slices(4, 4, 2, cost(2), SLOW, held_bytes=peak_in_flight, most_bytes=4)
    assert max(peak_in_flight(found)) <= 4
