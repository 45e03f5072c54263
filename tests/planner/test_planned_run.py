"""What was planned is what runs: three ranks as processes, and tensor-parallel groups, predicted."""

import json
import sys
from pathlib import Path

import pytest
from planner.fleets import job, problem

from dpipe.config.load import Config, load
from dpipe.machines.file import save_machines
from dpipe.machines.machine import Cluster, Machine
from dpipe.network.link import Link
from dpipe.placement.objective import Objective
from dpipe.plan.forecast import forecast
from dpipe.planner.decide import Decided, decide
from dpipe.planner.fits import planned
from dpipe.planner.plan_file import dump_plan
from dpipe.report.trace import load_inputs
from dpipe.run.api import launch

NEAR = Link(delay_ms=0.2, bandwidth_gbps=5)
FAR = Link(delay_ms=5, bandwidth_gbps=0.5)
# The slow one is in the middle of the file, and far from one of the others.
THREE = Cluster(
    (Machine("a", gflops=40), Machine("slow", gflops=10), Machine("c", gflops=40)),
    {("a", "slow"): FAR, ("slow", "c"): NEAR, ("a", "c"): NEAR},
)


def kept(decided: Decided, folder: Path) -> tuple[str, ...]:
    """The plan and its machines as files; what a run takes of them."""
    save_machines(decided.problem.cluster, folder / "machines.toml")
    (folder / "plan.toml").write_text(dump_plan(decided.plan))
    machines = f"predict.machines={json.dumps(str(folder / 'machines.toml'))}"
    return planned(decided.problem.config, (machines,), folder / "plan.toml")


def predicted_s(config: Config, overrides: tuple[str, ...]) -> float:
    return forecast(load(config, overrides)).step_us / 1e6


def test_plan_of_three_machines_is_trained(tmp_path: Path, corpus: Path) -> None:
    config = job(
        pipeline={"stages": 3},
        data={"files": [str(corpus)]},
        train={"steps": 3, "num_microbatches": 4},
        run={"folder": str(tmp_path / "run"), "tensorboard": False, "checkpoint_every": None},
    )
    decided = decide(problem(config, THREE), Objective())
    overrides = kept(decided, tmp_path)

    assert predicted_s(config, overrides) == pytest.approx(decided.plan.step_s, rel=1e-9)
    launch(config, overrides=overrides)

    inputs = load_inputs(tmp_path / "run" / "trace")
    assert inputs.seats == decided.plan.replicas[0]
    assert inputs.assumed_network == decided.best.network
