"""`pipeline.plan = "auto"`: measured, planned and started, with two ranks as processes."""

from pathlib import Path

import pytest

from dpipe.config.load import Config, build
from dpipe.errors import ConfigError, InputError, TransferError
from dpipe.machines import groups
from dpipe.machines.machine import Cluster, Machine
from dpipe.network.link import Link
from dpipe.planner.plan_file import Plan, keep_text, load_plan, plan_of_rank_0
from dpipe.processes.environment import AgentStore, ProcessInfo
from dpipe.report.metrics import read_rows
from dpipe.report.trace import load_inputs
from dpipe.run import planning
from dpipe.run.api import launch, train
from dpipe.store.run_folder import load_configuration


def job(folder: Path, **sections: dict[str, object]) -> Config:
    text = folder / "text.txt"
    text.write_text("a pipeline that nobody has cut by hand\n" * 200)
    model = {"num_layers": 3, "width": 32, "num_heads": 4, "vocab_size": 256, "context": 16}
    return build(
        {
            "model": model,
            "pipeline": {"plan": "auto", "stages": 2} | sections.pop("pipeline", {}),
            "train": {"steps": 2, "batch_size": 2, "num_microbatches": 2},
            "data": {"files": [str(text)], "cache": str(folder / "cache")},
            "run": {"folder": str(folder / "run"), "tensorboard": False},
            **sections,
        }
    )


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.usefixtures("warm_ranks")
def test_ranks_are_measured_planned_and_trained(tmp_path: Path) -> None:
    """Three start; of a plan of two stages and one replica the third is left out."""
    config = job(tmp_path, data_parallel={"replicas": 1})

    launch(config, num_ranks=3)

    assert sum("loss" in row for row in read_rows(tmp_path / "run")) == 2
    (kept,) = (tmp_path / "cache").glob("plan-*.toml")
    plan = load_plan(kept)
    assert len(plan.seats) == 2
    ran = load_configuration(tmp_path / "run", trust_code=True)
    assert ran.pipeline.plan == "none"
    assert list(ran.pipeline.split) == plan.settings["pipeline"]["split"]
    # Rank 0 is where it was: its terminal, its folder.
    inputs = load_inputs(tmp_path / "run" / "trace")
    assert inputs.seats == plan.seats
    assert plan.seats[0].endswith("-0")


def test_number_of_ranks_to_plan_for_has_to_be_said(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="say how many to start"):
        launch(job(tmp_path))


def test_run_that_was_planned_is_resumed_with_its_plan(tmp_path: Path) -> None:
    config = job(tmp_path)
    words = "resume run with the plan that it was given, --plan and --machines"
    with pytest.raises(InputError, match=words):
        train(config, resume="run")


def test_ranks_of_one_host_share_its_memory() -> None:
    machines = (
        Machine("a", host="10.0.0.1", devices=2, memory_gb=8.0),
        Machine("b", host="10.0.0.1", memory_gb=8.0),
        Machine("c", host="10.0.0.2", memory_gb=8.0),
        Machine("d", host="10.0.0.1", device="cuda X", devices=4, memory_gb=8.0),
    )
    found = groups.one_rank_each(Cluster(machines)).machines
    assert [machine.devices for machine in found] == [1, 1, 1, 1]
    assert [machine.memory_gb for machine in found] == pytest.approx([8 / 3, 8 / 3, 8, 8])


def test_text_of_rank_0_that_is_no_plan_is_refused() -> None:
    for text in ("", "[plan", "[plan]\nmodel = 3\n"):
        with pytest.raises(TransferError, match="rank 0 sent a plan that cannot be read"):
            plan_of_rank_0(text)


def test_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set data.cache"):
        keep_text(tmp_path / "file", "plan", "")


def test_what_is_done_before_the_run_has_a_key_of_its_own_in_torchruns_store() -> None:
    process = ProcessInfo(0, 2, store=AgentStore("h", 1, "dpipe/coordinator/0"))
    other = process.before_the_run("measure").store
    assert other is not None
    assert other.key == "dpipe/coordinator/0/measure"
    alone = ProcessInfo(0, 1)
    assert alone.before_the_run("measure") is alone


TWO_HOSTS = Cluster(
    tuple(
        Machine(f"{host}-{rank}", host=host, memory_gb=8.0)
        for rank, host in enumerate(["near", "far", "near", "far", "near"])
    ),
    default_link=Link(1.0, 1.0),
)


def plan_of(*replicas: tuple[str, ...], size: int) -> Plan:
    """Of nothing but its machines."""
    return Plan("", "", 1.0, {"tensor_parallel": {"size": size}}, replicas)


def test_ranks_of_one_host_are_a_tensor_parallel_group() -> None:
    pairs = groups.groups_of(TWO_HOSTS, 2)
    assert pairs == (("near-0", "near-2"), ("far-1", "far-3"))

    grouped = groups.with_a_machine_each(TWO_HOSTS, pairs)
    assert [(each.name, each.devices) for each in grouped.machines] == [("near-0", 2), ("far-1", 2)]

    together = groups.RankGroups(TWO_HOSTS, pairs)
    ranks = [together.rank_in(("near-0", "far-1"), name) for name in TWO_HOSTS.names]
    # As they joined; the fifth has nobody to be a group with.
    assert ranks == [0, 2, 1, 3, None]
    assert together.ungrouped == ["near-4"]


def test_run_that_was_planned_sits_by_groups_and_not_by_ranks(tmp_path: Path) -> None:
    """Each name stood once a rank: a group of two had taken the place of two stages."""
    plan = plan_of(("near-0", "far-1"), size=2)
    planned = planning._with_plan(job(tmp_path), plan, tmp_path / "machines.toml")
    assert planned.predict.seats == ("near-0", "far-1")
    assert plan.seats == ("near-0", "near-0", "far-1", "far-1")


def test_host_with_too_few_ranks_for_a_group_is_named() -> None:
    with pytest.raises(ConfigError, match=r"rank 0 has 3 ranks, but tensor_parallel\.size is 4"):
        groups.groups_of(TWO_HOSTS, 4)
