"""`dpipe plan`, from files to what it prints and writes."""

import json
import re
import sys
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from planner.fleets import machines

from dpipe.cli.main import main
from dpipe.machines.file import dump_machines
from dpipe.machines.machine import KINDS, Cluster, LayerTime, Machine, Measurement
from dpipe.network.link import Link
from dpipe.planner.plan_file import load_plan

JOB = """\
[model]
num_layers = 4
width = 64
num_heads = 4
vocab_size = 256
[train]
batch_size = 8
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "machines.toml").write_text(dump_machines(machines(4, price_per_hour=0.5)))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


def plan(*arguments: str) -> Result:
    return run("plan", "job.toml", "--machines", "machines.toml", *arguments)


def relayed_machines(*relayed: tuple[str, str]) -> str:
    """Four that are alike, in the order b, a, c, d; their links as fast as their interfaces."""
    alike = [Machine(name, gflops=5, egress_gbps=0.01, ingress_gbps=0.01) for name in "bacd"]
    links = {pair: Link(0.1, 0.01) for pair in permutations("bacd", 2)}
    return dump_machines(Cluster(tuple(alike), links, relayed=frozenset(relayed)))


def test_plan_has_rank_0_where_the_relay_is_and_goes_around_relayed_links(folder: Path) -> None:
    (folder / "machines.toml").write_text(relayed_machines(("a", "b"), ("b", "d")))
    done = plan("-o", "pipeline.stages=3", "--write", "plan.toml")
    assert done.exit_code == 0, done.output
    assert "relayed         no link of this plan; rank 0 is on c" in done.output
    (names,) = load_plan("plan.toml").replicas
    assert names[0] == "c"


@pytest.mark.slow
def test_plan_says_which_of_its_links_are_relayed(folder: Path) -> None:
    (folder / "machines.toml").write_text(relayed_machines(("a", "b"), ("a", "d"), ("b", "d")))
    done = plan("-o", "pipeline.stages=4")
    assert re.search(r"relayed         . - ., . - .; rank 0 is on c", done.output)
    relayed = json.loads(plan("-o", "pipeline.stages=4", "--json").output)["relayed"]
    assert len(relayed) == 2


def test_machines_that_are_all_behind_the_relay_are_refused(folder: Path) -> None:
    (folder / "machines.toml").write_text(relayed_machines(("a", "b"), ("c", "d")))
    done = plan()
    assert done.exit_code == 2
    assert "every machine has a relayed link" in done.output


def test_plan_is_explained_written_and_simulated(folder: Path) -> None:
    done = plan("--write", "plan.toml")

    assert done.exit_code == 0, done.output
    assert "s predicted" in done.output
    assert "bound by" in done.output
    assert "next best" in done.output
    written = load_plan("plan.toml")
    simulated = run(
        "simulate", "job.toml", "--plan", "plan.toml", "--machines", "machines.toml", "--json"
    )
    assert simulated.exit_code == 0, simulated.output
    row = json.loads(simulated.output)
    assert row["step_s"] == pytest.approx(written.step_s, rel=1e-9)


def test_explanation_says_bubble_price_bounds_and_what_a_faster_link_brings(folder: Path) -> None:
    """Of four machines on slow links, with prices."""
    lines = plan("-o", "pipeline.stages=3", "-o", "data_parallel.replicas=1").output.splitlines()
    text = "\n".join(lines)

    assert re.search(r"^step +[\d.]+ s predicted, bubble [\d.]+%$", text, re.M)
    assert re.search(r"^price +[\d.]+ a million tokens, 1.5 an hour$", text, re.M)
    assert re.search(r"10 Gbit/s on link m\d - m\d: -\d+%$", text, re.M)
    bound = [line.split()[-1] for line in lines if line.startswith("  m")]
    assert len(bound) == 3
    assert {*bound} <= {"compute", "egress", "ingress", "memory", "delay"}


@pytest.mark.slow
def test_explanation_says_what_one_more_machine_brings(folder: Path) -> None:
    """Of two that are alike and near, a third takes its part of the layers."""

    def planned_with(count: int, *options: str) -> str:
        alike = [Machine(f"m{number}", gflops=20.0) for number in range(count)]
        cluster = Cluster(tuple(alike), default_link=Link(0.1, 10))
        (folder / "machines.toml").write_text(dump_machines(cluster))
        return plan("-o", "data_parallel.replicas=1", *options).output

    two = json.loads(planned_with(2, "--json"))
    three = json.loads(planned_with(3, "--json"))
    (more,) = [each for each in two["what_if"] if "one more" in each["change"]]
    assert more["change"] == "one more machine like m0"
    # It is asked in short: what a search of three machines finds is as good at least.
    whole = 1 - three["estimated_step_s"] / two["estimated_step_s"]
    assert 0.1 < more["gain"] <= whole + 1e-9
    assert re.search(r"one more machine like m0: -\d+%$", planned_with(2), re.M)


def test_explanation_counts_one_stage_in_the_singular(folder: Path) -> None:
    printed = plan("-o", "pipeline.stages=1", "-o", "data_parallel.replicas=1").output
    assert re.search(r"^pipeline +1 stage, \d+ micro-batch", printed, re.M)


def test_job_that_states_the_cut_of_each_replica_is_refused(folder: Path) -> None:
    done = plan(
        *("-o", "pipeline.splits=[[3,3],[2,4]]", "-o", "pipeline.stages=2"),
        *("-o", "data_parallel.replicas=2", "-o", "data_parallel.kind=all-reduce"),
    )
    assert done.exit_code == 2
    assert "leave pipeline.splits out" in done.output


def test_json_names_each_seat_and_what_binds_it(folder: Path) -> None:
    row = json.loads(plan("--json").output)

    assert len(row["seats"]) == row["stages"] * len(row["replicas"])
    assert {seat["bound"] for seat in row["seats"]} <= {
        "compute",
        "egress",
        "ingress",
        "memory",
        "delay",
    }
    assert sum(row["layers_per_stage"]) == 6
    used = {name for names in row["replicas"] for name in names}
    assert used.isdisjoint(row["left_out"])
    assert len(used) + len(row["left_out"]) == 4
    assert row["price_per_hour"] == 0.5 * len(used)


def test_what_the_job_states_is_fixed(folder: Path) -> None:
    row = json.loads(plan("--json", "-o", "pipeline.stages=2", "-o", "pipeline.wire=bf16").output)

    assert row["stages"] == 2
    assert row["wire"] == "bf16"


def test_stated_cut_is_kept(folder: Path) -> None:
    cut = ("-o", "pipeline.split=[1,3,2]", "-o", "pipeline.stages=3")

    row = json.loads(plan("--json", *cut).output)

    assert row["layers_per_stage"] == [1, 3, 2]


def test_formats_are_chosen_where_they_are_allowed(folder: Path) -> None:
    exact = json.loads(plan("--json", "-o", "pipeline.stages=3").output)
    rounded = json.loads(plan("--json", "-o", "pipeline.stages=3", "--formats", "none,int8").output)

    assert exact["wire"] == "none"
    assert "int8" in json.dumps(rounded["wire"])
    assert rounded["step_s"] < exact["step_s"]


def test_budget_leaves_machines_out(folder: Path) -> None:
    row = json.loads(plan("--json", "--max-price", "1.0").output)

    assert len(row["left_out"]) >= 2
    assert row["price_per_hour"] <= 1.0


def test_budget_that_buys_nothing_is_refused(folder: Path) -> None:
    done = plan("--max-price", "0.1")

    assert done.exit_code == 2
    assert "cost 0.5 an hour, and --max-price is 0.1" in done.output


@pytest.mark.slow
@pytest.mark.parametrize("asked", [("--max-price", "1"), ("--objective", "price")])
def test_price_that_is_not_known_is_not_taken_for_nothing(
    folder: Path, asked: tuple[str, str]
) -> None:
    path = folder / "machines.toml"
    path.write_text(path.read_text().replace("price_per_hour = 0.5\n", "", 2))

    done = plan(*asked)

    assert done.exit_code == 2
    assert "does not say what these machines cost: m0, m1; give" in done.output
    assert "million tokens" not in plan().output
    assert json.loads(plan("--json").output)["price_per_hour"] is None


def test_limit_of_a_rank_is_kept_to(folder: Path) -> None:
    """What a run would refuse is no plan."""
    done = plan("-o", "pipeline.memory_gb=0.000001")

    assert done.exit_code == 2
    assert "pipeline.memory_gb lets a rank hold 1e-06 GB; raise it" in done.output


@pytest.mark.parametrize(
    "stated",
    [
        ("data_parallel.kind=all-reduce", "data_parallel.wire=bf16", "pipeline.stages=4"),
        ("pipeline.split=estimated", "transport.connections=auto"),
        ("transport.connections=3",),
    ],
)
def test_job_that_was_planned_takes_its_plan(folder: Path, stated: tuple[str, ...]) -> None:
    """Also where the plan has one replica, or decides what the job states as open."""
    more = [word for each in stated for word in ("-o", each)]
    assert plan("--write", "plan.toml", *more).exit_code == 0

    done = run("simulate", "job.toml", "--plan", "plan.toml", "--machines", "machines.toml", *more)

    assert done.exit_code == 0, done.output


def test_machines_too_small_for_any_stage_are_refused(folder: Path) -> None:
    small = machines(4, memory_gb=1e-5)
    (folder / "machines.toml").write_text(dump_machines(small))

    done = plan("--write", "plan.toml")

    assert done.exit_code == 2
    assert "no machines hold the model: the smallest stage" in done.output
    assert not (folder / "plan.toml").exists()


def test_times_of_another_model_are_refused(folder: Path) -> None:
    """By `plan`, which would place layers by them, and by a run that takes the file."""
    layers = [LayerTime(kind, 1, 1, 2) for kind in KINDS]
    every = [replace(machine, layers=tuple(layers)) for machine in machines(2).machines]
    measured = Measurement("2026-11-23T12:00:00Z", "5f84501")
    other = replace(machines(2), machines=tuple(every), measured=measured)
    (folder / "machines.toml").write_text(dump_machines(other))

    done = plan("--write", "plan.toml")
    launched = run("launch", "job.toml", "--machines", "machines.toml", "-o", "pipeline.stages=2")

    assert done.exit_code == launched.exit_code == 2
    assert "were measured with another model or precision" in done.output
    assert "were measured with another model or precision" in launched.output
    assert not (folder / "plan.toml").exists()


def test_links_that_are_missing_are_named(folder: Path) -> None:
    apart = "".join(f'[[machine]]\nname = "{name}"\ngflops = 20\n' for name in "ab")
    (folder / "machines.toml").write_text(apart)

    done = plan("-o", "pipeline.stages=2")

    assert done.exit_code == 2
    assert "no link from machine a to b" in done.output


def test_more_stages_than_machines_are_refused_with_what_there_is(folder: Path) -> None:
    done = plan("-o", "pipeline.stages=5")

    assert done.exit_code == 2
    assert "pipeline.stages 5" in done.output
    assert "the machines have 4 devices" in done.output


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('name = "m1"', 'name = "m0"', "machine 'm0' is listed twice"),
        ("bandwidth_gbps = 0", "bandwidth_gbps = -0", "bandwidth_gbps"),
    ],
)
def test_machines_that_cannot_be_are_refused(folder: Path, old: str, new: str, words: str) -> None:
    path = folder / "machines.toml"
    path.write_text(path.read_text().replace(old, new, 1))

    done = plan()

    assert done.exit_code == 2
    assert words in done.output


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ('model.layers="replay"', "no layers to place"),
        ("pipeline.stages_per_rank=2", "one stage on each rank"),
    ],
)
def test_jobs_without_a_plan_are_refused(folder: Path, override: str, words: str) -> None:
    more = ("-o", "pipeline.stages=2", "-o", 'pipeline.schedule="gpipe"')

    done = plan("-o", override, *more)

    assert done.exit_code == 2
    assert words in done.output


def test_servers_of_their_own_are_refused(folder: Path) -> None:
    done = plan(
        "-o", 'data_parallel.kind="parameter-server"', "-o", 'data_parallel.address="10.0.0.1:7"'
    )

    assert done.exit_code == 2
    assert "leave data_parallel.address out" in done.output


def test_format_that_is_unknown_is_refused(folder: Path) -> None:
    done = plan("--formats", "int9")

    assert done.exit_code == 2
    assert "int9" in done.output


@pytest.mark.parametrize("path", ["job.toml", "./machines.toml"])
def test_plan_does_not_replace_what_it_is_made_from(folder: Path, path: str) -> None:
    before = (folder / path).read_text()

    done = plan("--write", path)

    assert done.exit_code == 2
    assert "would replace what the plan is made from" in done.output
    assert (folder / path).read_text() == before


def test_seed_below_zero_is_refused(folder: Path) -> None:
    assert "--seed" in plan("--seed", "-1").output


def test_plan_that_cannot_be_written_is_refused(folder: Path) -> None:
    done = plan("--write", "no/such/plan.toml")

    assert done.exit_code == 2
    assert "cannot be written" in done.output


@pytest.mark.parametrize("command", ["simulate", "launch", "train"])
def test_plan_of_another_model_is_refused_everywhere(folder: Path, command: str) -> None:
    assert plan("--write", "plan.toml").exit_code == 0
    where = ("--machines", "machines.toml") if command == "simulate" else ()

    done = run(command, "job.toml", "--plan", "plan.toml", "-o", "model.width=128", *where)

    assert done.exit_code == 2
    assert "is of another model" in done.output


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("command", ["simulate", "launch", "train"])
def test_plan_for_other_machines_is_refused_everywhere(folder: Path, command: str) -> None:
    assert plan("--write", "plan.toml", "-o", "pipeline.stages=4").exit_code == 0
    (folder / "machines.toml").write_text(dump_machines(machines(3)))

    done = run(command, "job.toml", "--plan", "plan.toml", "--machines", "machines.toml")

    assert done.exit_code == 2
    assert "places stages on machines that machines has not: m3" in done.output


def test_rank_that_is_started_elsewhere_than_planned_is_refused(folder: Path) -> None:
    assert plan("--write", "plan.toml", "-o", "pipeline.stages=2").exit_code == 0
    ranks = ("--rank", "0", "--world-size", "2", "--coordinator", "127.0.0.1:1")

    done = run("train", "job.toml", "--plan", "plan.toml", *ranks, "--name", "nowhere")

    assert done.exit_code == 2
    assert "but this is nowhere: the plan leaves this machine out" in done.output
    assert run("train", "job.toml", *ranks, "--name", "m0").exit_code == 2


def test_plan_is_drawn(folder: Path) -> None:
    done = plan("--png", "plan.png")
    assert done.exit_code == 0, done.output
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("plan.words", "--png plan.words cannot be written: "),
        ("no/plan.png", "--png no/plan.png cannot be written: "),
        ("job.toml", "--png job.toml would replace what the plan is made from"),
    ],
)
def test_picture_that_cannot_be_written_is_named(folder: Path, path: str, words: str) -> None:
    done = plan("--png", path)
    assert done.exit_code == 2
    assert words in done.output


def test_picture_needs_matplotlib(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    done = plan("--png", "plan.png")
    assert done.exit_code == 2
    assert "pip install 'dpipe[plot]'" in done.output


def test_order_of_another_plan_is_refused(folder: Path) -> None:
    """It was planned without a word, and the plan refused at launch."""
    order = 'pipeline.programs=["0F0,0B0", "1F0,1B0"]'
    done = plan("-o", "pipeline.stages=2", "-o", "pipeline.schedule=auto", "-o", order)
    assert done.exit_code == 2
    assert "pipeline.programs is the order of another plan: leave it out" in done.output
