"""Starting a run: the arguments and environment of each rank, and that all ranks start or none."""

import time

import pytest
from fleet.hosts import HostsError, load_hosts
from fleet.job import Job

from dpipe.config.load import load
from dpipe.errors import ConfigError, DpipeError, ProfileError
from dpipe.planner.plan_file import Plan, dump_plan

HOSTS = """
coordinator_port = 7100
[[host]]
address = "cloud-1"
advertise = "10.0.0.1"
[[host]]
address = "10.0.0.2"
slots = 2
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "job.toml").write_text('[pipeline]\nstages = 3\n[node]\nbind = "127.0.0.1"\n')
    hosts = load_hosts(tmp_path / "hosts.toml")
    return lambda *overrides, **given: Job.of(tmp_path / "job.toml", overrides, hosts, **given)


def test_rank_finds_its_place_in_its_environment(job):
    environ = job().environ(job().ranks[2], "secret")
    assert environ == {
        "DPIPE_RANK": "2",
        "DPIPE_LOCAL_RANK": "1",
        "DPIPE_WORLD_SIZE": "3",
        "DPIPE_COORDINATOR": "10.0.0.1:7100",
        "DPIPE_TOKEN": "secret",
    }


def test_rank_listens_to_others_and_says_where_it_is_reached(job):
    argv = job("train.steps=5", name="n").argv(job().ranks[0])
    assert argv[:4] == ["-m", "dpipe", "train", "../cluster/n/job.toml"]
    assert argv[5::2] == [
        'node.bind="0.0.0.0"',
        'node.advertise="10.0.0.1"',
        "train.steps=5",
        'run.folder="runs/n"',
    ]


def test_resumed_run_keeps_its_name_and_folder(job):
    resumed = job(resume="n", fallback=True)
    assert resumed.argv(resumed.ranks[0])[-3:] == ["--resume", "runs/n", "--fallback"]
    trusted = job(trust_code=True)
    assert trusted.argv(trusted.ranks[0])[-1] == "--trust-code"


def test_spares_take_slots_beyond_the_ranks(job):
    elastic = job("pipeline.stages=2", 'run.checkpoint_url="s3://b/run"', spares=1, resume="n")
    assert len(elastic.ranks) == 3
    # It goes on where there is a run, without being told.
    assert elastic.argv(elastic.ranks[0])[-2:] == ["--spares", "1"]


@pytest.mark.parametrize(
    ("overrides", "given", "words"),
    [
        (("pipeline.stages=2",), {}, r"set run\.checkpoint_url"),
        (('run.checkpoint_url="s3://b/run"',), {}, "4 ranks need as many slots"),
        ((), {"plan": "plan.toml"}, "--spares moves them"),
    ],
)
def test_spares_that_cannot_be_are_refused(overrides, given, words, job):
    with pytest.raises(DpipeError, match=words):
        job(*overrides, spares=1, **given)


def test_folder_that_is_given_stays(job):
    given = job("run.folder=/data/run")
    assert given.config.run.folder == "/data/run"


def test_name_is_that_of_the_configuration_and_the_time(job):
    assert job().name.startswith("job-20")


@pytest.mark.parametrize("name", ["a/b", "..", "a b"])
def test_name_that_is_no_folder_is_refused(job, name):
    with pytest.raises(HostsError, match="names a run and its folder"):
        job(name=name)


def test_invalid_configuration_is_refused(job):
    with pytest.raises(ConfigError, match="unknown key 'train.step'"):
        job("train.step=5")


def test_missing_configuration_is_named(job, tmp_path):
    (tmp_path / "job.toml").unlink()
    with pytest.raises(ConfigError, match=r"job.toml does not exist"):
        job()


def test_more_ranks_than_slots_are_refused(job):
    with pytest.raises(HostsError, match="4 ranks need as many slots"):
        job("pipeline.stages=4")


def test_token_is_on_no_command_line(cloud, command_lines):
    cloud.play('print("token", os.environ["DPIPE_TOKEN"], flush=True)\ntime.sleep(60)')
    cloud.run("--name", "r", "--detach")
    said = cloud("logs").output
    tokens = {line.split()[-1] for line in said.splitlines() if "| token" in line}
    assert len(tokens) == 1
    assert any(str(cloud.root) in word for words in command_lines() for word in words)
    assert not [words for words in command_lines() if tokens & set(words)]


def test_ranks_of_one_host_start_together(cloud):
    cloud.play('print("local", os.environ["DPIPE_LOCAL_RANK"])')
    cloud.write_hosts(slots=2, name="slots.toml")
    job = cloud.root / "job.toml"
    job.write_text("[pipeline]\nstages = 3\n")
    done = cloud("run", job, "--name", "r", hosts=cloud.root / "slots.toml")
    assert done.exit_code == 0, done.output
    said = [line for line in done.output.splitlines() if "| local" in line]
    assert sorted(said) == ["rank 0 | local 0", "rank 1 | local 1", "rank 2 | local 0"]


def test_run_starts_on_all_hosts_or_on_none(cloud):
    cloud.play("time.sleep(60)")
    (cloud.folder(1) / "cluster/r").mkdir(parents=True)
    done = cloud.run("--name", "r")
    assert done.exit_code == 2
    assert (
        f"host 127.0.0.2:{cloud.port}: there was a run r here before; choose another --name, or "
        "--resume "
        "r" in done.output
    )
    assert not (cloud.folder(1) / "cluster/current").exists()
    time.sleep(0.1)
    state = cloud("status").output
    assert "exit code 137" in state
    assert "running" not in state


@pytest.mark.slow
def test_second_run_is_refused_and_the_first_goes_on(cloud):
    cloud.play("time.sleep(60)")
    cloud.run("--name", "first", "--detach")
    done = cloud.run("--name", "second")
    assert done.exit_code == 2
    assert "run first is still going here; scripts/cluster down stops it" in done.output
    assert cloud("status").output.count("running") == 2


MACHINES = """
[default_link]
delay_ms = 1
bandwidth_gbps = 1
[[machine]]
name = "desk"
host = "10.0.0.1"
[[machine]]
name = "laptop"
host = "10.0.0.2"
devices = 2
"""


@pytest.fixture
def planned_job(tmp_path):
    """A job on the hosts of MACHINES, with a plan for machines of these names."""
    path = tmp_path / "job.toml"
    path.write_text("[model]\nnum_layers = 4\n")

    def make(*seats, machines=MACHINES, pipeline=()):
        (tmp_path / "machines.toml").write_text(machines)
        settings = {"pipeline": {"stages": len(seats), **dict(pipeline)}}
        model = load(path, ()).layers_digest()
        plan = tmp_path / "plan.toml"
        plan.write_text(dump_plan(Plan(model, "machines", 1.0, settings, (seats,))))
        return Job.of(path, (), load_hosts(tmp_path / "machines.toml"), plan=plan)

    return make


def test_ranks_start_where_the_plan_places_them(planned_job):
    job = planned_job("laptop", "desk", "laptop")
    places = [(rank.host.reached_at, rank.local_rank) for rank in job.ranks]
    assert places == [("10.0.0.2", 0), ("10.0.0.1", 0), ("10.0.0.2", 1)]
    assert job.coordinator == "10.0.0.2:7000"
    assert job.config.pipeline.stages == 3
    assert "pipeline.stages=3" in job.argv(job.ranks[0])


def test_machines_of_the_plan_go_along(planned_job):
    job = planned_job("laptop", "desk", "laptop")
    (rank, *_) = job.ranks
    files = job.spec([rank], "secret")["files"]
    assert files == {"job.toml": job.text, "machines.toml": MACHINES}
    *_, last = [word for word in job.argv(rank) if word.startswith("predict.machines")]
    assert last == f'predict.machines="../cluster/{job.name}/machines.toml"'


def test_links_that_are_missing_are_named_before_anything_starts(planned_job):
    _, without_links = MACHINES.split("bandwidth_gbps = 1\n")
    with pytest.raises(ProfileError, match="desk"):
        planned_job("laptop", "desk", machines=without_links)


def test_plan_for_other_hosts_is_refused_with_the_difference(planned_job):
    with pytest.raises(
        HostsError, match=r"machines that .*machines.toml has not: cloud \(it has desk, laptop\)"
    ):
        planned_job("desk", "cloud")


def test_plan_with_more_ranks_than_a_host_has_slots_is_refused(planned_job):
    with pytest.raises(HostsError, match="2 ranks on desk, which has slots = 1 in .*; raise it"):
        planned_job("desk", "desk")


def test_plan_for_hosts_that_have_no_other_name_goes_by_their_addresses(planned_job):
    hosts = '[[host]]\naddress = "10.0.0.1"\n[[host]]\naddress = "10.0.0.2"\nmachine = "b"\n'
    job = planned_job("b", "10.0.0.1", machines=hosts)
    assert [rank.host.address for rank in job.ranks] == ["10.0.0.2", "10.0.0.1"]


def test_rank_0_is_not_planned_onto_a_host_that_cannot_be_reached(planned_job):
    hosts = '[[host]]\naddress = "a"\n[[host]]\naddress = "b"\nadvertise = "none"\n'
    with pytest.raises(HostsError, match='the plan starts rank 0 on b, .* advertise = "none"'):
        planned_job("b", "a", machines=hosts)


AUTO = """
[model]
num_layers = 3
width = 32
num_heads = 4
context = 16
vocab_size = 256
[train]
steps = 2
batch_size = 4
[pipeline]
plan = "auto"
[data]
files = ["text.txt"]
[run]
tensorboard = false
"""
# The stand-in becomes the real one, which -P finds where the tests' own Python does.
REAL = """
Path("text.txt").write_text("machines that plan themselves\\n" * 200)
os.execv(sys.executable, [sys.executable, "-P", "-m", "dpipe", *sys.argv[1:]])
"""


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_run_is_planned_as_its_ranks_join(cloud):
    """One rank a slot: the job says how many only once it is planned."""
    cloud.play(REAL)
    job = cloud.root / "job.toml"
    job.write_text(AUTO)
    done = cloud("run", job, "--name", "r")
    assert done.exit_code == 0, done.output
    assert "2 ranks on 2 hosts" in done.output
    assert "rank 0 | step  " in done.output, "the plan"
    assert "rank 0 | step 2/2" in done.output
