"""Placements of a GPT over the regions of a cloud, by what the planner estimates a step to take:
its search beside random, greedy and exhaustive placement, and beside the best by DT-FM's cost.

Delays and rates between regions are those published with DT-FM (scripts/published); the sizes of
the model are GPT-3 XL's. Stages, replicas and micro-batches are stated, so that placements alone
are compared; every one is cut as well as can be for its machines.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, permutations

import aws_profiles
import dtfm
import numpy as np

from dpipe.config.load import Config, build
from dpipe.machines.machine import Cluster, Machine, Pair
from dpipe.network.link import Link
from dpipe.placement.balance import balanced
from dpipe.placement.choices import choices_of
from dpipe.placement.climb import Placed, best_of, seats_of
from dpipe.placement.fleet import Ints
from dpipe.placement.objective import Objective
from dpipe.placement.problem import PlanProblem
from dpipe.placement.search import search
from dpipe.placement.shape import PlanShape
from dpipe.placement.starts import chained, starting_orders
from dpipe.planner.decide import decide

WORLD = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
_RANDOM = 1000
_BLOCK = 5_000  # placements that are estimated at once
_MOST_EXHAUSTIVE = 8  # machines
_MICRO_BATCHES = 32
_GFLOPS = 15_000.0
_BETWEEN = aws_profiles.published()
_PARAMETERS_GB = 5.2  # GPT-3 XL, fp32


@dataclass(frozen=True)
class Case:
    """`replicas` pipelines of `stages` on as many machines, dealt out over `regions` in turn."""

    name: str
    stages: int
    replicas: int
    regions: Sequence[str] = WORLD
    speeds: Sequence[float] = (1.0,)  # of machines in turn, times _GFLOPS
    num_blocks: int = 24

    @property
    def count(self) -> int:
        return self.stages * self.replicas


CASES = (
    # Of so few blocks that every cut of every placement can be tried.
    Case("8 regions, 6 blocks", 8, 1, num_blocks=6),
    Case("8 regions, 6 blocks", 4, 2, num_blocks=6),
    Case("8 regions, 6 blocks", 2, 4, num_blocks=6),
    Case("8 regions, 6 blocks, three speeds", 4, 2, speeds=(1.0, 0.5, 0.25), num_blocks=6),
    Case("8 regions", 8, 8),
    Case("8 regions, three speeds", 8, 8, speeds=(1.0, 0.5, 0.25)),
    Case("8 regions", 8, 16),
)


# Of which everything is decided: how many stages, replicas and micro-batches, too.
FLEETS = (
    Case("8 regions", 64, 1),
    Case("8 regions", 128, 1),
    Case("8 regions, three speeds", 512, 1, speeds=(1.0, 0.5, 0.25)),
)
_FLEET_BATCH = 512  # sequences a step
_FORMATS = ("none", "bf16")


@dataclass(frozen=True)
class FleetRow:
    """What `dpipe plan` decides for a fleet, and the processor time that it takes."""

    fleet: str
    machines: int
    stages: int
    replicas: int
    num_microbatches: int
    estimated_s: float  # a step
    step_s: float  # as simulated
    cpu_s: float  # of all decisions, from machines in memory to the plan


def fleet_row(fleet: Case, batch_size: int = _FLEET_BATCH) -> FleetRow:
    machines = cluster_of(fleet)
    job = build({"model": _model(fleet), "train": {"batch_size": batch_size}})
    began = time.process_time()
    problem = PlanProblem(job, machines, choices_of(job, _FORMATS))
    decided = decide(problem, Objective())
    cpu_s = time.process_time() - began
    shape = decided.best.placement.shape
    return FleetRow(
        fleet=fleet.name,
        machines=fleet.count,
        stages=shape.stages,
        replicas=shape.replicas,
        num_microbatches=shape.num_microbatches,
        estimated_s=decided.best.placement.step_s,
        step_s=decided.plan.step_s,
        cpu_s=cpu_s,
    )


@dataclass(frozen=True)
class Row:
    """One case; seconds of a step as the planner estimates them."""

    case: str
    stages: int
    replicas: int
    planner: float
    exhaustive: float | None  # of all placements with all cuts; None: they are too many
    greedy: float
    random_best: float  # of a thousand
    random_median: float
    by_dtfm: float  # the placement that is best by DT-FM's cost
    dtfm_cost: float  # DT-FM's cost of that placement
    dtfm_cost_of_planner: float  # and of the planner's
    search_cpu_s: float


def row_of(case: Case, dtfm_seconds: float) -> Row:
    problem = PlanProblem(job_of(case), cluster_of(case), choices_of(job_of(case), ("none",)))
    shape = shape_of(problem, case)
    began = time.process_time()
    found = search(problem, Objective())[0]
    search_cpu_s = time.process_time() - began
    published = published_problem(case)
    theirs = dtfm.search(published, dtfm_seconds)
    exhaustive = None
    if case.count <= _MOST_EXHAUSTIVE:
        exhaustive = _least(problem, shape, permutations(range(case.count)))
    randoms = _values(problem, shape, np.array(list(_random_orders(case.count))))
    greedy = starting_orders(problem, shape, chained(problem.units(1)))
    # By stage there, by replica here.
    by_replica = np.array(theirs.stages).T.reshape(1, -1)
    return Row(
        case=case.name,
        stages=case.stages,
        replicas=case.replicas,
        planner=found.value,
        exhaustive=exhaustive,
        greedy=float(_values(problem, shape, greedy).min()),
        random_best=float(randoms.min()),
        random_median=float(np.median(randoms)),
        by_dtfm=float(_values(problem, shape, by_replica)[0]),
        dtfm_cost=theirs.cost_s,
        dtfm_cost_of_planner=dtfm.cost_s(published, _groups(found)),
        search_cpu_s=search_cpu_s,
    )


def job_of(case: Case) -> Config:
    """GPT-3 XL, each replica with the same number of micro-batches of one sequence."""
    return build(
        {
            "model": _model(case),
            "train": {
                "batch_size": _MICRO_BATCHES * case.replicas,
                "num_microbatches": _MICRO_BATCHES,
            },
            "pipeline": {"stages": case.stages, "recompute": "none"},
            "data_parallel": {"replicas": case.replicas, "kind": "all-reduce"},
        }
    )


def _model(case: Case) -> dict[str, int]:
    sizes = {"num_layers": case.num_blocks, "width": 2048, "num_heads": 16, "context": 2048}
    return sizes | {"vocab_size": 50304}


def region_of(case: Case, machine: int) -> str:
    return case.regions[machine % len(case.regions)]


def cluster_of(case: Case) -> Cluster:
    links: dict[Pair, Link] = {}
    names = [f"m{number}" for number in range(case.count)]
    for here, there in permutations(range(case.count), 2):
        delay_ms, gbps = _published_link(region_of(case, here), region_of(case, there))
        links[names[here], names[there]] = Link(delay_ms, gbps)
    machines = []
    for number, name in enumerate(names):
        # In runs of a region's length, so that each region has machines of every speed.
        turn = number // len(case.regions) if case.count > len(case.regions) else number
        speed = case.speeds[turn % len(case.speeds)]
        machines.append(Machine(name, gflops=_GFLOPS * speed))
    return Cluster(tuple(machines), links)


def _published_link(here: str, there: str) -> tuple[float, float]:
    if here == there:
        return aws_profiles.WITHIN_A_REGION
    return _BETWEEN[frozenset((here, there))]


def published_problem(case: Case) -> dtfm.Problem:
    """The same sizes as DT-FM's cost takes them: a stage's gradients, and what one hop carries in a
    step.
    """
    shape = (case.count, case.count)
    delay_ms = np.zeros(shape)
    bandwidth_gbps = np.ones(shape)
    for here, there in permutations(range(case.count), 2):
        link = _published_link(region_of(case, here), region_of(case, there))
        delay_ms[here, there], bandwidth_gbps[here, there] = link
    parameters_gb = _PARAMETERS_GB * case.num_blocks / 24
    activation_gb = _MICRO_BATCHES * 2048 * 2048 * 4 / 1e9
    return dtfm.Problem(
        delay_ms,
        bandwidth_gbps,
        stages=case.stages,
        replicas=case.replicas,
        gradient_gb=parameters_gb / case.stages,
        activation_gb=activation_gb,
    )


def shape_of(problem: PlanProblem, case: Case) -> PlanShape:
    choices = problem.choices
    hops = ("none",) * (case.stages - 1)
    replicated = case.replicas > 1
    return PlanShape(
        stages=case.stages,
        replicas=case.replicas,
        tensor_parallel=1,
        num_microbatches=_MICRO_BATCHES,
        recompute="none",
        kind="all-reduce" if replicated else "none",
        exchange_wire="none",
        forward_wires=hops,
        backward_wires=hops,
        schedule=choices.schedule,
    )


def _values(problem: PlanProblem, shape: PlanShape, orders: Ints) -> np.ndarray:
    """Seconds of each placement, cut for its machines."""
    values = []
    for order in orders:
        one = order[None]
        values.append(_best(problem, shape, one).value)
    return np.array(values)


def _best(problem: PlanProblem, shape: PlanShape, orders: Ints) -> Placed:
    ends = balanced(problem, shape, seats_of(shape, orders))
    return best_of(problem, shape, Objective(), orders, ends)


def _least(problem: PlanProblem, shape: PlanShape, orders: Iterator[tuple[int, ...]]) -> float:
    """Of every placement with every cut."""
    least = np.inf
    every = np.array(list(orders))
    inner = range(1, problem.num_layers)
    for boundaries in combinations(inner, shape.stages - 1):
        ends = np.array([[0, *boundaries, problem.num_layers]])
        for start in range(0, len(every), _BLOCK):
            block = every[start : start + _BLOCK]
            cuts = np.repeat(ends, len(block), axis=0)
            best = best_of(problem, shape, Objective(), block, cuts)
            least = min(least, best.value)
    return float(least)


def _random_orders(count: int) -> Iterator[Ints]:
    rng = np.random.default_rng(0)
    for _ in range(_RANDOM):
        yield rng.permutation(count)


def _groups(placed: Placed) -> list[list[int]]:
    groups: list[list[int]] = placed.seats.T.tolist()
    return groups


def as_dict(row: Row | FleetRow) -> dict[str, object]:
    """As the file of results has it: four digits."""
    rounded: dict[str, object] = {}
    for key, value in asdict(row).items():
        rounded[key] = float(f"{value:.4g}") if isinstance(value, float) else value
    return rounded


def as_table(rows: Sequence[dict[str, object]]) -> str:
    """Markdown, of the rows of `as_dict`."""
    titles = (
        "machines",
        "stages x replicas",
        "planner",
        "all placements",
        "greedy",
        "best of 1,000 random",
        "median random",
        "best by DT-FM's cost",
    )
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(titles) + "|"]
    for row in rows:
        cells = [str(row["case"]), f"{row['stages']} x {row['replicas']}"]
        for key in ("planner", "exhaustive", "greedy", "random_best", "random_median", "by_dtfm"):
            value = row[key]
            cells.append("-" if value is None else f"{value:.4g}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
