"""A plan's step beside an even cut's: what is compared, and what the docs say of the kept runs."""

import json
from pathlib import Path
from types import ModuleType

import pytest

from dpipe.config.load import load
from dpipe.errors import RunError
from dpipe.machines.file import save_machines
from dpipe.plan.forecast import forecast

ROOT = Path(__file__).resolve().parents[2]
JOB = """
[model]
num_layers = 12
width = 1024
num_heads = 8
context = 1024
vocab_size = 1024
[train]
batch_size = 4
num_microbatches = 4
[pipeline]
stages = 6
recompute = "none"
[data_parallel]
replicas = 1
[transport]
connections = 1
"""


@pytest.fixture
def planned(script) -> ModuleType:
    return script("planned")


@pytest.fixture
def pair(planned, tmp_path, monkeypatch) -> list:
    monkeypatch.setattr("dpipe.placement.search._EFFORT", 100_000)  # some plan will do
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    machines = tmp_path / "machines.toml"
    save_machines(planned.lab_cluster("two-sites"), machines)
    return planned.sides(job, machines, tmp_path)


def test_plan_and_even_cut_are_of_one_job_and_replayed_as_predicted(planned, pair, tmp_path):
    plan, even = pair
    assert even.seats == ("host0", "host1", "host2", "host3", "host4", "host5")
    assert max(even.forecast.split) - min(even.forecast.split) <= 1
    assert plan.config.train == even.config.train
    assert planned.bound_s(plan.config, planned.lab_cluster("two-sites")) < plan.step_s
    assert plan.step_s < even.step_s
    empty = tmp_path / "replay.toml"
    empty.write_text("")
    for side in pair:
        overrides = planned.replayed(side, tmp_path / "ranks.toml", tmp_path)
        replay = forecast(load(empty, overrides))
        # Messages have a head of some bytes, of which a scale makes a larger share.
        assert replay.step_us / 1e6 == pytest.approx(side.step_s, rel=0.01)


def test_ranks_go_into_the_group_of_their_machine(planned):
    groups = (Path("/g/0"), Path("/g/1"))
    venue = planned.core_shares.CoreShares(groups, (1, 0))
    assert venue.enter(0, ["dpipe"])[-2:] == ["/g/1", "dpipe"]


def test_shares_are_quotas_of_the_kernel(planned, tmp_path, monkeypatch):
    shares = planned.core_shares
    monkeypatch.setattr(shares, "_CGROUP", tmp_path)
    monkeypatch.setattr(shares, "_END_S", 0.0)
    with shares.core_shares([1.0, 0.25]) as groups:
        quotas = [(group / "cpu.max").read_text() for group in groups]
        weight = (groups[0].parent / "cpu.weight").read_text()
    assert quotas == ["10000 10000", "2500 10000"]
    assert weight == "10000", "other work gets what the quotas leave"


def test_kernel_that_makes_no_groups_is_named_with_another_way(planned, tmp_path, monkeypatch):
    monkeypatch.setattr(planned.core_shares, "_CGROUP", tmp_path / "none")
    shares = planned.core_shares.core_shares([1.0])
    with pytest.raises(RunError, match="no control groups can be made in .*: run this as root"):
        shares.__enter__()


def kept(case: str = "") -> list[dict]:
    path = ROOT / "scripts/results/planned.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if case in line["case"]]


def test_docs_have_the_kept_table(planned):
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert planned.as_table(kept()) in page


def test_kept_runs_of_the_lab_are_as_predicted_and_the_plans_are_faster(planned):
    for profile in planned.PROFILES:
        steps = {line["side"]: line for line in kept(profile)}
        for line in steps.values():
            assert line["measured_s"] == pytest.approx(line["predicted_s"], rel=0.05)
            assert line["bound_s"] < line["measured_s"]
        assert steps["even cut"]["measured_s"] > 1.5 * steps["plan"]["measured_s"]
