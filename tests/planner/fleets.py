"""Jobs and machines for the planner's tests."""

import numpy as np

from dpipe.config.load import Config, build
from dpipe.machines.machine import Cluster, Machine, Pair
from dpipe.network.link import Link
from dpipe.placement.choices import choices_of
from dpipe.placement.problem import PlanProblem

SPEEDS = (10.0, 20.0, 40.0)  # GFLOP/s
NEAR = Link(delay_ms=0.5, bandwidth_gbps=10)


def job(num_layers: int = 6, batch_size: int = 8, **sections: dict[str, object]) -> Config:
    """A small GPT; `sections` are stated as in its file."""
    model = {"num_layers": num_layers, "width": 64, "num_heads": 4, "vocab_size": 256}
    model |= sections.pop("model", {})  # type: ignore[arg-type]
    train = {"batch_size": batch_size} | sections.pop("train", {})
    return build({"model": model, "train": train, **sections})


def machines(count: int, seed: int = 0, **fields: float) -> Cluster:
    """Of three speeds, with links of their own each."""
    rng = np.random.default_rng(seed)
    every = []
    for number in range(count):
        gflops = float(rng.choice(SPEEDS))
        every.append(Machine(f"m{number}", gflops=gflops, **fields))  # type: ignore[arg-type]
    links: dict[Pair, Link] = {}
    for source in every:
        for target in every:
            if source is not target:
                delay_ms, gbps = rng.uniform(1, 30), rng.uniform(0.05, 1)
                links[source.name, target.name] = Link(float(delay_ms), float(gbps))
    return Cluster(tuple(every), links)


def problem(config: Config, cluster: Cluster, formats: tuple[str, ...] = ("none",)) -> PlanProblem:
    return PlanProblem(config, cluster, choices_of(config, formats))
