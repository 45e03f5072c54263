"""Starting a run: the arguments and environment of each rank, and that all ranks start or none."""

import time

import pytest
from fleet.hosts import HostsError, load_hosts
from fleet.job import Job

from dpipe.errors import ConfigError

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


def test_second_run_is_refused_and_the_first_goes_on(cloud):
    cloud.play("time.sleep(60)")
    cloud.run("--name", "first", "--detach")
    done = cloud.run("--name", "second")
    assert done.exit_code == 2
    assert "run first is still going here; scripts/cluster down stops it" in done.output
    assert cloud("status").output.count("running") == 2
