"""`scripts/cluster measure`: one process a host, and the file of rank 0."""

import pytest
from fleet.hosts import HostsError, load_hosts
from fleet.measuring import MeasureJob, refuse_file

HOSTS = """
price_per_hour = 0.5
[[host]]
address = "10.0.0.1"
[[host]]
address = "10.0.0.2"
slots = 2
price_per_hour = 2
"""
WRITES = """
out = Path(sys.argv[sys.argv.index("--out") + 1])
if rank == 0:
    out.write_text('[[machine]]\\nname = "a"\\n')
"""


def test_each_host_is_measured_once_under_its_name_and_at_its_price(tmp_path):
    (tmp_path / "hosts.toml").write_text(HOSTS)
    (tmp_path / "job.toml").write_text("[pipeline]\nstages = 3\n")
    hosts = load_hosts(tmp_path / "hosts.toml")
    job = MeasureJob.on_all(tmp_path / "job.toml", (), hosts, (1, 4), trust_code=False)
    assert [rank.host.name for rank in job.ranks] == ["10.0.0.1", "10.0.0.2"]
    argv = job.argv(job.ranks[1])
    assert argv[:4] == ["-m", "dpipe", "measure", f"../cluster/{job.name}/job.toml"]
    assert 'node.advertise="10.0.0.2"' in argv
    told = dict(zip(argv[-10::2], argv[-9::2], strict=True))
    assert told["--name"] == "10.0.0.2"
    assert told["--out"] == f"../cluster/{job.name}/machines.toml"
    assert told["--price"] == "2.0"
    assert argv[-4:] == ["--micro-batch-size", "1", "--micro-batch-size", "4"]
    assert job.environ(job.ranks[1], "secret")["DPIPE_WORLD_SIZE"] == "2"


def test_file_of_rank_0_is_brought_here(cloud, tmp_path):
    cloud.play(WRITES)
    (cloud.root / "job.toml").write_text("")
    out = tmp_path / "machines.toml"
    done = cloud("measure", cloud.root / "job.toml", "--out", out)
    assert done.exit_code == 0, done.output
    assert out.read_text() == '[[machine]]\nname = "a"\n'
    again = cloud("measure", cloud.root / "job.toml", "--out", out)
    assert again.exit_code == 2
    assert "exists, and may have been edited by hand" in again.output


@pytest.mark.slow
def test_measurement_that_fails_writes_nothing(cloud, tmp_path):
    cloud.play("sys.exit(rank)")
    (cloud.root / "job.toml").write_text("")
    done = cloud("measure", cloud.root / "job.toml", "--out", tmp_path / "machines.toml")
    assert done.exit_code == 1
    assert list(tmp_path.iterdir()) == []


def test_file_that_would_be_lost_is_refused(tmp_path):
    (tmp_path / "machines.toml").write_text("")
    with pytest.raises(HostsError, match="exists, and may have been edited by hand"):
        refuse_file(tmp_path / "machines.toml")
