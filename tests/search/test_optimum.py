"""The search compared with exact optima, under the simulator's model."""

import json
from pathlib import Path
from statistics import mean

import pytest
from golden_optima import (
    PATH,
    SEVERAL_PATH,
    cases,
    exact_of_several_us,
    exact_us,
    is_bound,
    pipeline_of,
    several,
)
from optimum import enumerated_us, optimum_us

from dpipe.network.link import Link, Network
from dpipe.search.auto import search
from dpipe.search.bound import lower_bound_us
from dpipe.timeline.scenario import Scenario
from dpipe.timeline.simulate import simulate_alone

ROWS = json.loads(Path(PATH).read_text())
SEVERAL = json.loads(Path(SEVERAL_PATH).read_text())
VOTE = Network(default=Link(0, 1))  # takes no time: the step time is that of a step alone


def found_us(row):
    pipeline = pipeline_of(row)
    cost, network = pipeline.cost, pipeline.network
    schedule = search(
        pipeline.num_stages,
        pipeline.num_microbatches,
        cost,
        network,
        memory_limit=row["limit"],
        stages_per_rank=pipeline.num_stages // pipeline.num_ranks,
        ballots=VOTE,
    )
    return simulate_alone(Scenario(schedule, cost, network)).duration_us


def gaps(rows):
    return [found_us(row) / row["optimum_us"] - 1 for row in rows]


@pytest.mark.slow
def test_search_is_within_1_percent_of_the_optimum_on_average_and_3_at_most():
    found = gaps(ROWS[:120])
    assert len(found) == 120
    assert mean(found) <= 0.01
    assert max(found) <= 0.03
    assert min(found) > -1e-4, "nothing is faster than the optimum"


@pytest.mark.slow
def test_search_is_as_near_over_links_that_differ():
    """The bound of those whose interfaces are narrow is reached by all but a few: it is the optimum
    there.
    """
    found = gaps(ROWS[120:])
    assert len(found) == 60
    assert mean(found) <= 0.001
    assert max(found) <= 0.005
    narrow = [gap for gap, row in zip(found, ROWS[120:], strict=True) if is_bound(row)]
    assert sum(abs(gap) < 1e-4 for gap in narrow) >= len(narrow) - 3
    assert min(found) > -1e-4, "nothing is faster than the optimum"


@pytest.mark.slow
def test_search_is_as_near_with_two_stages_a_rank():
    found = gaps(SEVERAL)
    assert len(found) == 60
    assert sum(gap < 1e-4 for gap in found) >= 59
    assert max(found) <= 0.01
    assert min(found) > -1e-4, "nothing is faster than the optimum"


@pytest.mark.parametrize(("rows", "made"), [(ROWS, cases), (SEVERAL, several)])
def test_golden_optima_are_those_of_the_cases_here(rows, made):
    written = [{key: row[key] for key in row if key != "optimum_us"} for row in rows]
    assert written == json.loads(json.dumps([*made()]))


@pytest.mark.parametrize("number", [0, 1, 3, 8])
def test_golden_optimum_of_two_stages_a_rank_is_found_again(number):
    row = SEVERAL[number]
    assert exact_of_several_us(row) == pytest.approx(row["optimum_us"], rel=1e-4)


@pytest.mark.parametrize("number", [1, 28, 90, 93, 121, 126])
def test_golden_optimum_is_found_again(number):
    assert exact_us(ROWS[number]) == pytest.approx(ROWS[number]["optimum_us"], rel=1e-4)


@pytest.mark.parametrize("number", [0, 1, 9, 18])
def test_mixed_integer_program_and_enumeration_agree(number):
    row = ROWS[number]
    pipeline = pipeline_of(row)
    tried_us = enumerated_us(pipeline, row["limit"])
    horizon_us = 3 * tried_us
    assert optimum_us(pipeline, row["limit"], horizon_us) == pytest.approx(tried_us, rel=1e-4)


def test_nothing_is_below_the_bound():
    for row in ROWS:
        if is_bound(row):
            continue
        assert lower_bound_us(pipeline_of(row)) <= row["optimum_us"] * (1 + 1e-4)
