"""`plan.toml`: written, read, and refused where it is no plan, or another job's."""

from dataclasses import replace
from pathlib import Path

import pytest
from planner.fleets import job, machines

from dpipe.errors import ConfigError
from dpipe.plan.forecast import forecast
from dpipe.planner.fits import (
    planned,
    refuse_other_job,
    refuse_other_machines,
    refuse_other_seat,
)
from dpipe.planner.plan_file import Plan, dump_plan, load_plan
from dpipe.schedule.text import to_csv

MODEL = job().layers_digest()
PLAN = Plan(
    model=MODEL,
    machines="machines",
    step_s=1.25,
    settings={
        "train": {"num_microbatches": 4},
        "pipeline": {"stages": 2, "split": [5, 3], "schedule": "1f1b"},
        "tensor_parallel": {"size": 2},
        "data_parallel": {"replicas": 2, "kind": "all-reduce"},
    },
    replicas=(("m0", "m1"), ("m3", "m2")),
    price_per_million_tokens=0.5,
)
TEXT = dump_plan(PLAN)


def read(folder: Path, text: str) -> Plan:
    path = folder / "plan.toml"
    path.write_text(text, encoding="utf-8")
    return load_plan(path)


def test_plan_reads_as_it_was_written(tmp_path: Path) -> None:
    assert read(tmp_path, TEXT) == PLAN
    without_price = replace(PLAN, price_per_million_tokens=None)
    assert read(tmp_path, dump_plan(without_price)) == without_price


def test_ranks_of_a_stage_are_on_one_machine() -> None:
    assert PLAN.seats == ("m0", "m0", "m1", "m1", "m3", "m3", "m2", "m2")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("[plan]", "[plans]", "unknown key 'plans' in the file"),
        ("step_s = 1.25", "steps = 1.25", "unknown key 'steps'"),
        ("step_s = 1.25", "step_s = -1", "not negative"),
        ("step_s = 1.25", "step_s = nan", "not negative"),
        ('machines = "machines"', "machines = 3", "must be a name"),
        ("stages = 2", "stages = true", "must be a number from 1"),
        ("stages = 2", "stages = 3", "lists 2 machines, but .* stages is 3"),
        ("replicas = 2", "replicas = 1", "replicas is 1, but 2 are listed"),
        ("size = 2", "size = 0", "must be a number from 1"),
        ("stages = 2", "stage = 2", "unknown key 'stage'"),
        ('machines = ["m0", "m1"]', "machines = []", "a list of names"),
        ('machines = ["m0", "m1"]', 'machines = ["m0", 1]', "must be a name"),
        ("[[replica]]", "[[replicas]]", "unknown key 'replicas'"),
        ("stages = 2", "stages = ", "plan .*plan.toml: "),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    assert old in TEXT
    with pytest.raises(ConfigError, match=words):
        read(tmp_path, TEXT.replace(old, new))


@pytest.mark.parametrize("text", ["", "[plan]\n", "plan = 3\n", 'replica = "x"\n[plan]\n'])
def test_part_of_a_plan_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="plan.toml: "):
        read(tmp_path, text)


def test_plan_without_replicas_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs the machines of each replica"):
        read(tmp_path, TEXT[: TEXT.index("[[replica]]")])


def test_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_plan(tmp_path / "plan.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_plan(tmp_path)
    with pytest.raises(ConfigError, match="not a regular file"):
        load_plan("/dev/null")


def test_plan_of_another_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=f"of another model: its digest is {MODEL}"):
        refuse_other_job(PLAN, job(num_layers=7))


def test_plan_that_says_otherwise_than_the_job_is_refused_with_the_difference() -> None:
    stated = job(pipeline={"stages": 4, "schedule": "1f1b"})

    with pytest.raises(ConfigError, match="pipeline.stages is 4, planned 2; leave") as caught:
        refuse_other_job(PLAN, stated)

    assert "schedule" not in str(caught.value)


def test_plan_for_other_machines_is_refused_with_the_difference() -> None:
    with pytest.raises(ConfigError, match="machines that machines has not: m3, m2"):
        refuse_other_machines(PLAN, machines(2))
    with pytest.raises(ConfigError, match=r"2 ranks on m0, which has devices = 1"):
        refuse_other_machines(PLAN, machines(4))
    refuse_other_machines(PLAN, machines(4, devices=2))


@pytest.mark.parametrize("name", ["m3", "m2"])
def test_rank_starts_on_the_machine_that_the_plan_has_it_on(tmp_path: Path, name: str) -> None:
    (tmp_path / "plan.toml").write_text(TEXT)
    rank = PLAN.seats.index(name)
    refuse_other_seat(tmp_path / "plan.toml", rank, name)
    with pytest.raises(ConfigError, match=f"rank {rank} on {name}, but this is desk: the plan "):
        refuse_other_seat(tmp_path / "plan.toml", rank, "desk")


def test_rank_of_another_seat_is_told_which_one_starts_here(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(TEXT)
    other = PLAN.seats.index("m2")
    with pytest.raises(ConfigError, match=f"but this is m2: start --rank {other} ?.* here, or say"):
        refuse_other_seat(tmp_path / "plan.toml", PLAN.seats.index("m3"), "m2")


def test_machines_of_one_host_name_are_taken_by_it(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(TEXT.replace('"m3"', '"desk-0"'))
    rank = PLAN.seats.index("m3")
    refuse_other_seat(tmp_path / "plan.toml", rank, "desk")
    with pytest.raises(ConfigError, match="on desk-0, but this is des"):
        refuse_other_seat(tmp_path / "plan.toml", rank, "des")


def test_job_takes_what_the_plan_decided(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(TEXT)

    overrides = planned(job(), ("train.steps=3",), tmp_path / "plan.toml")

    assert overrides[0] == "train.steps=3"
    assert "pipeline.split=[5, 3]" in overrides
    assert "data_parallel.replicas=2" in overrides


ORDER = ("0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1")


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"schedule": "1f1b", "stages": 2}, 'for pipeline.schedule "auto", not for "1f1b"'),
        ({"schedule": "auto", "stages": 3}, "are of 2 ranks, but pipeline.stages 3 make 3"),
    ],
)
def test_order_that_does_not_go_with_the_pipeline_is_refused(
    pipeline: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        job(pipeline={**pipeline, "programs": ORDER})


def test_order_of_a_plan_is_the_one_that_runs() -> None:
    pipeline = {"schedule": "auto", "stages": 2, "programs": ORDER}

    predicted = forecast(job(pipeline=pipeline, train={"num_microbatches": 2}))

    assert to_csv(predicted.schedule).split() == list(ORDER)
    with pytest.raises(ConfigError, match="of 2 stages and 2 micro-batches, but"):
        forecast(job(pipeline=pipeline, train={"num_microbatches": 4}))
