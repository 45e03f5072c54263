"""Why no plan fits: the first limit without which one would."""

import math
from dataclasses import replace

from dpipe.placement.objective import Objective
from dpipe.placement.priced import price_per_hour
from dpipe.placement.problem import PlanProblem
from dpipe.placement.search import leanest_bytes, search


def why_nothing_fits(problem: PlanProblem, objective: Objective) -> str:
    """What to change. Raises `ProfileError` naming the links that are missing, if it is these."""
    # The budget first: it is the quickest to change.
    if objective.max_price < math.inf:
        found = search(problem, Objective("price"))
        if found:
            least = min(price_per_hour(problem, placement) for placement in found)
            return (
                f"machines that hold the model cost {least:g} an hour, and --max-price is "
                f"{objective.max_price:g}: raise it, or give cheaper machines"
            )
    if search(_without_limits_of_memory(problem), Objective()):
        return _too_little_memory(problem)
    problem.cluster.check_links(problem.cluster.names)
    return _wrong_sizes(problem)


def _without_limits_of_memory(problem: PlanProblem) -> PlanProblem:
    cluster = problem.cluster
    machines = tuple(replace(machine, memory_gb=None) for machine in cluster.machines)
    cluster = replace(cluster, machines=machines)
    config = problem.config.with_(pipeline__memory_gb=None)
    return replace(problem, config=config, cluster=cluster, _known={})


def _too_little_memory(problem: PlanProblem) -> str:
    least = (
        f"no machines hold the model: the smallest stage there can be, one layer with one "
        f"micro-batch under way, takes {leanest_bytes(problem) / 1e9:.3f} GB"
    )
    machines = problem.cluster.machines
    limited = [machine for machine in machines if machine.memory_gb is not None]
    allowed_gb = problem.config.pipeline.memory_gb
    largest = max(limited, key=lambda machine: machine.memory_gb or 0.0, default=None)
    largest_gb = None if largest is None else largest.memory_gb
    if allowed_gb is not None and allowed_gb <= (largest_gb or math.inf):
        return (
            f"{least}, and pipeline.memory_gb lets a rank hold {allowed_gb:g} GB; raise it, give "
            "more machines, or a smaller model"
        )
    assert largest is not None, "nothing else limits memory"
    return (
        f"{least}, and of {len(machines)} machines the largest, {largest.name}, has "
        f"{largest_gb:g} GB; give more machines or larger ones, or a smaller model"
    )


def _wrong_sizes(problem: PlanProblem) -> str:
    choices = problem.choices
    devices = sum(machine.devices for machine in problem.cluster.machines)
    stated = []
    for key, value in (
        ("pipeline.stages", choices.stages),
        ("data_parallel.replicas", choices.replicas),
        ("tensor_parallel.size", choices.tensor_parallel),
        ("train.num_microbatches", choices.num_microbatches),
    ):
        if value is not None:
            stated.append(f"{key} {value}")
    return (
        f"no plan has what the job states: {', '.join(stated) or 'nothing'}, train.batch_size "
        f"{choices.batch_size}, {problem.num_layers} layers, and the machines have {devices} "
        "devices; leave some of these out of the job"
    )
