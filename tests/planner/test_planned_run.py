"""What was planned is what is predicted, and what runs: three ranks as processes, for real."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from planner.fleets import job, problem

from dpipe.config.load import load
from dpipe.errors import ConfigError
from dpipe.machines.file import save_machines
from dpipe.machines.machine import Cluster, Machine
from dpipe.network.link import Link
from dpipe.placement.objective import Objective
from dpipe.plan.forecast import forecast
from dpipe.planner.decide import Decided, decide
from dpipe.planner.fits import planned
from dpipe.planner.plan_file import dump_plan
from dpipe.planner.text import as_row, as_text
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_inputs
from dpipe.run.api import launch
from dpipe.toml import to_toml

NEAR = Link(delay_ms=0.2, bandwidth_gbps=5.0)
FAR = Link(delay_ms=100.0, bandwidth_gbps=0.05)
# The first two of the file are far from each other: no good plan has them side by side.
THREE = Cluster(
    (Machine("a", gflops=40.0), Machine("b", gflops=10.0), Machine("c", gflops=40.0)),
    {("a", "b"): FAR, ("b", "c"): NEAR, ("a", "c"): NEAR},
)


def alike(count: int, link: Link = NEAR, **fields: int) -> Cluster:
    every = [Machine(f"m{number}", gflops=20.0, **fields) for number in range(count)]
    return Cluster(tuple(every), default_link=link)


def two_pairs() -> Cluster:
    """Two near machines here, two there: 40 and 10, 20 and 20. One cut for both pairs would let
    each stage wait for its slower machine.
    """
    speeds = {"a": 40.0, "b": 10.0, "c": 20.0, "d": 20.0}
    links = {("a", "b"): NEAR, ("c", "d"): NEAR}
    far = Link(delay_ms=5.0, bandwidth_gbps=1.0)
    every = [Machine(name, gflops=gflops) for name, gflops in speeds.items()]
    return Cluster(tuple(every), links, default_link=far)


REPLICATED: dict[str, dict[str, object]] = {
    "model": {"num_layers": 14},
    "train": {"batch_size": 32, "num_microbatches": 16},
    "data_parallel": {"kind": "all-reduce", "replicas": 2},
    "pipeline": {"stages": 2},
}


def overrides_of(decided: Decided, folder: Path) -> tuple[str, ...]:
    """What a run takes of the plan, which is kept in `folder` with its machines."""
    save_machines(decided.problem.cluster, folder / "machines.toml")
    (folder / "plan.toml").write_text(dump_plan(decided.plan))
    machines = f"predict.machines={to_toml(str(folder / 'machines.toml'))}"
    return planned(decided.problem.config, (machines,), folder / "plan.toml")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm_ranks")
def test_plan_of_three_machines_is_trained_where_it_places_the_stages(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a pipeline of machines that are not alike\n" * 200)
    config = job(
        pipeline={"stages": 3},
        train={"steps": 2, "num_microbatches": 4},
        data={"files": [str(text)], "cache": str(tmp_path / "cache")},
        run={"folder": str(tmp_path / "run"), "tensorboard": False},
    )
    decided = decide(problem(config, THREE), Objective())
    (seats,) = decided.plan.replicas
    assert seats[1] == "c", "between the two that are far from each other"

    launch(config, overrides=overrides_of(decided, tmp_path))

    assert sum("loss" in row for row in read_rows(tmp_path / "run")) == 2
    inputs = load_inputs(tmp_path / "run" / "trace")
    assert inputs.seats == seats
    assert inputs.assumed_network.links == decided.best.network.links


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(
    ("sections", "cluster"),
    [
        ({"pipeline": {"stages": 3}}, THREE),
        ({"tensor_parallel": {"size": 2}, "pipeline": {"stages": 3}}, alike(3, devices=2)),
        ({"pipeline": {"stages": 4}}, alike(2, devices=2, cores=1)),  # ranks share a core
        ({"transport": {"connections": 2}, "pipeline": {"stages": 2}}, alike(2, Link(50.0, 1.0))),
        ({"pipeline": {"split": "estimated"}}, alike(2)),
        ({"data_parallel": {"kind": "sharded"}}, alike(3)),
        (REPLICATED, two_pairs()),
        (
            {"data_parallel": {"kind": "local-sgd", "inner_steps": 8, "replicas": 2}},
            alike(4, Link(20.0, 0.1)),
        ),
    ],
)
def test_run_predicts_what_was_planned(
    sections: dict[str, dict[str, object]], cluster: Cluster, tmp_path: Path
) -> None:
    config = job(**sections)
    decided = decide(problem(config, cluster), Objective())

    overrides = overrides_of(decided, tmp_path)

    predicted = forecast(load(config, overrides))
    assert predicted.step_us / 1e6 == pytest.approx(decided.plan.step_s, rel=1e-9)


def test_plan_needs_a_number_of_inner_steps() -> None:
    auto = {"kind": "local-sgd", "inner_steps": "auto", "replicas": 2}
    with pytest.raises(ConfigError, match="state data_parallel.inner_steps"):
        problem(job(data_parallel=auto), alike(4))


def test_replicas_are_cut_each_by_its_own_machines() -> None:
    decided = decide(problem(job(**REPLICATED), two_pairs()), Objective())
    alike = job(**REPLICATED | {"pipeline": {"stages": 2, "split": [8, 8]}})

    cuts = decided.best.placement.cuts
    assert len(set(cuts)) == 2
    by_pair = dict(zip(decided.plan.replicas, cuts, strict=True))
    (pair,) = [names for names in by_pair if "a" in names]
    layers = dict(zip(pair, by_pair[pair], strict=True))
    assert layers["a"] > 2 * layers["b"]
    assert "splits" in decided.plan.settings["pipeline"]
    row = as_row(decided)
    assert row["layers_per_stage"] == [list(cut) for cut in cuts]
    assert decided.plan.step_s < decide(problem(alike, two_pairs()), Objective()).plan.step_s


def test_tensor_parallel_group_is_planned_onto_one_machine(tmp_path: Path) -> None:
    machines = (Machine("one", gflops=20.0), *alike(2, devices=2).machines)
    cluster = Cluster(machines, default_link=NEAR)
    config = job(tensor_parallel={"size": 2}, pipeline={"stages": 2})
    decided = decide(problem(config, cluster), Objective())

    assert decided.left_out == ("one",)
    assert sorted(decided.plan.replicas[0]) == ["m0", "m1"]
    assert sorted(decided.plan.seats) == ["m0", "m0", "m1", "m1"]
    overrides = overrides_of(decided, tmp_path)
    assert f"predict.seats={json.dumps([*decided.plan.replicas[0]])}" in overrides


def test_vocabulary_that_no_group_divides_is_planned_without_one() -> None:
    config = job(model={"num_layers": 4, "width": 64, "num_heads": 4, "vocab_size": 257})
    decided = decide(problem(config, alike(2, devices=2)), Objective())

    assert decided.plan.group_size == 1


def test_kind_alone_leaves_the_number_of_replicas_open() -> None:
    config = job(data_parallel={"kind": "all-reduce"})
    decided = decide(problem(config, alike(4, Link(0.01, 100.0))), Objective())

    assert len(decided.plan.replicas) > 1


def test_format_that_replicas_cannot_take_is_left_to_stages() -> None:
    config = job(pipeline={"stages": 2})
    decided = decide(problem(config, alike(4), ("fp16",)), Objective())

    assert decided.plan.settings["pipeline"]["wire"] == "fp16"


def test_format_is_chosen_for_each_link_and_direction(tmp_path: Path) -> None:
    """From a to b all that is sent has to be short; back, and beyond b, there is time. The way from
    a to c is so long that no plan takes it.
    """
    slow = Link(delay_ms=0.2, bandwidth_gbps=0.002)
    long = Link(delay_ms=5000, bandwidth_gbps=0.002)
    links = {("a", "b"): slow, ("b", "a"): NEAR, ("b", "c"): NEAR, ("a", "c"): long}
    cluster = Cluster(tuple(Machine(name, gflops=20.0) for name in "abc"), links)
    config = job(pipeline={"stages": 3}, train={"num_microbatches": 8})
    decided = decide(problem(config, cluster, ("none", "int8")), Objective())

    (seats,) = decided.plan.replicas
    formats = decided.best.trial.formats
    names = {}
    for hop, pair in enumerate(pairwise(seats)):
        names[pair] = formats.forward[hop]
        names[pair[::-1]] = formats.backward[hop]
    assert sorted(names.values()) == ["int8", "none", "none", "none"]
    assert names.get(("a", "b")) == "int8"
    predicted = forecast(load(config, overrides_of(decided, tmp_path)))
    assert predicted.formats == formats
    assert 'links = {"' in "\n".join(as_text(decided, as_row(decided)).splitlines()[:6])
