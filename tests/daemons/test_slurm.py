"""scripts/slurm/train.sbatch under Debian's Slurm: five nodes on this machine, four of them for the
job.

    127.0.0.1  rank 0 ─────────────x                  rank 0 ──────────▶ done
    127.0.0.2  rank 1 ────✗ fails     down
    127.0.0.3  rank 2 ─────────────x  ── requeued ──▶ rank 1 ──────────▶ done
    127.0.0.4  rank 3 ─────────────x                  rank 2 ──────────▶ done
    127.0.0.5  idle                                   rank 3 ──────────▶ done

scripts/apt-daemons installs it; `scripts/test -m daemon` runs this.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster, slurm_cluster
from support.daemons import until

from dpipe.report.metrics import read_rows

pytestmark = [pytest.mark.daemon, pytest.mark.timeout(400)]

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
NUM_STEPS = 100
QUICKSTART = (
    "job.toml",
    "-o",
    f"train.steps={NUM_STEPS}",
    "-o",
    "train.warmup_steps=5",
    "-o",
    "run.checkpoint_every=10",
    "-o",
    # All nodes are this machine, which is 127.0.0.1 to itself whatever node it asks for.
    "node.bind=0.0.0.0",
)
WAIT_S = 180.0


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    monkeypatch.setenv("DPIPE", str(Path(sys.executable).with_name("dpipe")))
    shutil.copy(SCRIPTS / "quickstart.toml", tmp_path / "job.toml")
    with slurm_cluster(tmp_path) as cluster:
        yield cluster


def submit(cluster: SlurmCluster, *arguments: str) -> str:
    """The number of the job."""
    script = str(SCRIPTS / "slurm/train.sbatch")
    return cluster.command("sbatch", "--parsable", "--nodes", "4", script, *arguments)


def wait_for_a_checkpoint(cluster: SlurmCluster, job: str) -> None:
    checkpoints = cluster.folder / f"runs/slurm-{job}/checkpoints"
    until(
        lambda: any(checkpoints.glob("step-*/index.json")),
        f"job {job} has a checkpoint; see {cluster.folder}",
        WAIT_S,
    )


def wait_for_the_next_start(cluster: SlurmCluster, job: str) -> None:
    """Slurm leaves two minutes before it, the test some seconds. Credentials of the start before
    are revoked by the second, and one of the same second would be too.
    """
    until(
        lambda: cluster.show(job, "JobState") == "PENDING",
        f"job {job} is in the queue again; see {cluster.folder}",
        WAIT_S,
    )
    assert cluster.show(job, "Restarts") == "1"
    cluster.command("scontrol", "update", f"JobId={job}", "StartTime=now+5")


def wait_for_the_end(cluster: SlurmCluster, job: str, state: str) -> None:
    until(
        lambda: cluster.show(job, "JobState") in ("COMPLETED", "FAILED"),
        f"job {job} has ended; see {cluster.folder}",
        WAIT_S,
    )
    assert cluster.show(job, "JobState") == state


def check_that_it_went_on(cluster: SlurmCluster, job: str) -> None:
    """Each step has its row, and no later start began anew."""
    rows = read_rows(cluster.folder / f"runs/slurm-{job}")
    assert [row["step"] for row in rows if "loss" in row] == list(range(NUM_STEPS))
    log = (cluster.folder / f"dpipe-{job}.log").read_text()
    assert log.count("rank 1 step 0 loss") == 1


def test_quickstart_goes_on_from_its_checkpoint_when_a_node_has_failed(
    cluster: SlurmCluster,
) -> None:
    job = submit(cluster, *QUICKSTART)
    wait_for_a_checkpoint(cluster, job)
    cluster.fail("127.0.0.2")
    wait_for_the_next_start(cluster, job)
    wait_for_the_end(cluster, job, "COMPLETED")
    check_that_it_went_on(cluster, job)
    assert cluster.show(job, "NodeList") == "127.0.0.[1,3-5]"


def reach_the_time_limit(cluster: SlurmCluster, job: str) -> None:
    """The signal that --signal=B:USR1@300 asks for."""
    cluster.command("scancel", "--batch", "--signal=USR1", job)


def kill_a_rank(cluster: SlurmCluster, job: str) -> None:
    """And not its node: Slurm takes that for a program that has failed."""
    cluster.processes_on("127.0.0.3")[-1].kill()


@pytest.mark.parametrize("interrupt", [reach_the_time_limit, kill_a_rank])
def test_job_is_requeued_by_its_script(
    cluster: SlurmCluster, interrupt: Callable[[SlurmCluster, str], None]
) -> None:
    job = submit(cluster, *QUICKSTART)
    wait_for_a_checkpoint(cluster, job)
    interrupt(cluster, job)
    wait_for_the_next_start(cluster, job)
    wait_for_the_end(cluster, job, "COMPLETED")
    check_that_it_went_on(cluster, job)


def test_configuration_that_cannot_work_is_not_started_again(cluster: SlurmCluster) -> None:
    job = submit(cluster, *QUICKSTART, "-o", "pipeline.stages=3")
    wait_for_the_end(cluster, job, "FAILED")
    assert cluster.show(job, "Restarts") == "0"
    assert cluster.show(job, "ExitCode") == "2:0"
