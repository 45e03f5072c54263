"""Against every plan there is, of few machines and layers."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, permutations

import numpy as np
import pytest
from planner.fleets import job, machines, problem

from dpipe.machines.machine import Cluster, Machine
from dpipe.network.link import Link
from dpipe.placement.climb import seats_of
from dpipe.placement.estimate import estimate
from dpipe.placement.fleet import Ints
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.placement.search import search
from dpipe.placement.shape import PlanShape


def every_shape(given: PlanProblem, num_machines: int) -> Iterator[PlanShape]:
    for stages in range(1, min(num_machines, given.num_layers) + 1):
        for replicas in range(1, num_machines // stages + 1):
            for number in given.choices.micro_batches(replicas):
                for kind in given.choices.kinds if replicas > 1 else ("none",):
                    for recompute in given.choices.recompute:
                        yield PlanShape(
                            stages=stages,
                            replicas=replicas,
                            tensor_parallel=1,
                            num_microbatches=number,
                            recompute=recompute,
                            kind=kind,
                            exchange_wire="none",
                            forward_wires=("none",) * (stages - 1),
                            backward_wires=("none",) * (stages - 1),
                            schedule=given.choices.schedule,
                        )


def every_cut(num_layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for between in combinations(range(1, num_layers), stages - 1):
        yield (0, *between, num_layers)


def every_order(num_machines: int, shape: PlanShape) -> Ints:
    return np.array([*permutations(range(num_machines), shape.num_seats)])


def exhaustive_optimum(given: PlanProblem, objective: Objective, num_machines: int) -> float:
    least = np.inf
    for shape in every_shape(given, num_machines):
        orders = every_order(num_machines, shape)
        seats = seats_of(shape, orders)
        for cut in every_cut(given.num_layers, shape.stages):
            found = estimate(given, shape, seats, np.tile(cut, (len(orders), 1)))
            least = min(least, objective(given, shape, found, seats).min())
    return float(least)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("seed", range(6))
def test_search_of_five_machines_finds_the_optimum(seed: int) -> None:
    given = problem(job(num_layers=5), machines(5, seed))
    objective = Objective()

    best = search(given, objective)[0]

    assert best.value == pytest.approx(exhaustive_optimum(given, objective, 5), rel=1e-9)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("seed", range(3))
def test_search_of_five_machines_finds_the_cheapest(seed: int) -> None:
    cluster = machines(5, seed, price_per_hour=1.0)
    given = problem(job(num_layers=5), cluster)
    objective = Objective("price", max_price=3.5)

    best = search(given, objective)[0]

    assert best.value == pytest.approx(exhaustive_optimum(given, objective, 5), rel=1e-9)
    assert best.shape.num_seats <= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_search_of_machines_with_little_memory_finds_the_optimum(seed: int) -> None:
    cluster = machines(5, seed, memory_gb=0.004)
    given = problem(job(num_layers=5), cluster)
    objective = Objective()

    best = search(given, objective)[0]

    assert best.value == pytest.approx(exhaustive_optimum(given, objective, 5), rel=1e-9)
    assert best.shape.stages > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_search_of_eight_machines_finds_the_optimum(seed: int) -> None:
    stated = {"train": {"num_microbatches": 4}, "pipeline": {"recompute": "none"}}
    config = job(num_layers=5, data_parallel={"kind": "all-reduce"}, **stated)
    given = problem(config, machines(8, seed))
    objective = Objective()

    best = search(given, objective)[0]

    assert best.value == pytest.approx(exhaustive_optimum(given, objective, 8), rel=1e-9)


@pytest.mark.slow
def test_search_finds_the_same_with_the_same_seed() -> None:
    given = problem(job(), machines(12))

    first = search(given, Objective(), seed=3)[0]
    second = search(problem(job(), machines(12)), Objective(), seed=3)[0]

    assert first.value == second.value
    assert first.order.tolist() == second.order.tolist()


@pytest.mark.slow
def test_format_that_rounds_blocks_is_for_replicas_of_single_ranks_alone() -> None:
    """It ended in the error of a run that has both."""
    fleet = machines(4, devices=2)
    given = problem(job(), fleet, ("none", "bf16", "int8"))
    objective = Objective()
    shapes = [placed.shape for placed in search(given, objective)]
    assert {shape.tensor_parallel for shape in shapes} == {1, 2}
    together = {shape.exchange_wire for shape in shapes if shape.tensor_parallel > 1}
    assert "int8" not in together


@pytest.mark.slow
def test_machine_of_rank_0_has_the_first_stage_where_that_is_known() -> None:
    cluster = machines(5, seed=3)
    free = search(problem(job(), cluster), Objective())[0]
    last = cluster.names[free.order[-1]]  # which no free plan would put there

    led = replace(problem(job(), cluster), first=last)
    for placement in search(led, Objective()):
        assert cluster.names[placement.order[0]] == last
        assert sorted(placement.order) == list(range(5))
        assert placement.value >= free.value


def test_machine_that_relays_is_rank_0_and_its_load_counts() -> None:
    """Machines that are alike, but the second and the third reach each other through the first
    alone.
    """
    near = Link(0.5, 0.02)
    alike = tuple(Machine(name, gflops=10, egress_gbps=0.02, ingress_gbps=0.02) for name in "cab")
    cluster = Cluster(alike, default_link=near, relayed=frozenset({("a", "c")}))
    assert cluster.relay == "b"
    given = replace(problem(job(pipeline={"stages": 3}), cluster), first=cluster.relay)
    (shape, *_) = [placed.shape for placed in search(given, Objective())]
    seats = np.array([[[2, 0, 1]], [[0, 2, 1]]])  # b c a: relayed; c b a: rank 0 is hidden
    ends = np.array([[0, 3, 6, 8], [0, 3, 6, 8]])
    direct = replace(given, cluster=replace(cluster, relayed=frozenset()), _known={})
    relayed_s, hidden_s = estimate(given, shape, seats, ends).step_s
    direct_s, _ = estimate(direct, shape, seats, ends).step_s
    assert direct_s < relayed_s
    assert hidden_s == np.inf
