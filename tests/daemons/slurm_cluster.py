"""A cluster of Slurm's on this machine, without systemd: everything it keeps is in one folder.

    munged ── slurmctld ──┬── slurmd 127.0.0.1 ── slurmstepd ── rank
                          ├── slurmd 127.0.0.2 ── slurmstepd ── rank
                          ...

A node is named by its address: ranks find the coordinator by the name of the first node, and
addresses need no entry in /etc/hosts.
"""

import os
import secrets
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
from support.daemons import needs, started, until

from dpipe.processes.launch import free_port

NODES = tuple(f"127.0.0.{number}" for number in range(1, 6))
_COMMAND_S = 60.0
_CLUSTER = """
ClusterName=dpipe
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SwitchType=switch/none
MpiDefault=none
SlurmdTimeout=5
KillWait=5
MessageTimeout=10
SchedulerParameters=sched_interval=2,batch_sched_delay=1
FirstJobId={first_job}
"""
_NODE = "NodeName={node} NodeHostname={host} NodeAddr={node} Port={port} CPUs=1\n"
_PARTITION = "PartitionName=all Nodes=ALL Default=YES State=UP\n"
_FIRST_PORT = 20_000  # of dpipe.processes.environment, to which a job's number is added


class SlurmCluster:
    """`sbatch`, `squeue` and so on of this cluster."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}

    def command(self, *words: str) -> str:
        """What it prints. The commands start in the folder of the cluster."""
        ended = subprocess.run(
            words,
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            text=True,
            timeout=_COMMAND_S,
        )
        assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
        return ended.stdout.strip()

    def show(self, job: str, key: str) -> str:
        """A value of `scontrol show job`."""
        words = self.command("scontrol", "show", "job", job).split()
        values = dict(word.split("=", 1) for word in words if "=" in word)
        return values[key]

    def idle_nodes(self) -> int:
        return int(self.command("sinfo", "--noheader", "--states=idle", "--format=%D") or 0)

    def fail(self, node: str) -> None:
        """As if its machine had lost power: no process on it says farewell."""
        for process in self.processes_on(node):
            process.send_signal(signal.SIGKILL)

    def processes_on(self, node: str) -> list[psutil.Process]:
        """Its slurmd, the tasks on it, and the daemon of each task's step."""
        pid = int((self.folder / f"slurmd-{node}.pid").read_text())
        found = [psutil.Process(pid)]
        for step_daemon in self.step_daemons():
            tasks = step_daemon.children(recursive=True)
            if any(_node_of(task) == node for task in tasks):
                found += [step_daemon, *tasks]
        return found

    def step_daemons(self) -> list[psutil.Process]:
        """Those of this cluster, which have its configuration in their environment."""
        configuration = self.env["SLURM_CONF"]
        found = []
        for process in psutil.process_iter():
            try:
                is_daemon = process.name() == "slurmstepd"
                tasks = process.children() if is_daemon else []
                if any(task.environ().get("SLURM_CONF") == configuration for task in tasks):
                    found.append(process)
            except psutil.NoSuchProcess:
                continue
        return found


def _node_of(task: psutil.Process) -> str | None:
    try:
        return task.environ().get("SLURMD_NODENAME")
    except psutil.NoSuchProcess:
        return None


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[SlurmCluster]:
    """Five nodes that wait for jobs. What its daemons say is in FOLDER/*.log."""
    needs("munged", "slurmctld", "slurmd", "srun")
    (folder / "state").mkdir()
    cluster = SlurmCluster(folder)
    (folder / "slurm.conf").write_text(_configuration(folder))
    with ExitStack() as stack:

        def start(name: str, *words: str) -> None:
            stack.enter_context(started(words, folder / f"{name}.log", cluster.env))

        start("munged", *_munged(folder))
        until((folder / "munge.sock").exists, "munged listens")
        start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            start(f"slurmd-{node}", "slurmd", "-D", "-N", node)
        until(
            lambda: cluster.idle_nodes() == len(NODES),
            f"all nodes are idle; see {folder}/*.log",
        )
        try:
            yield cluster
        finally:
            # slurmd leaves what runs on its node running when it ends.
            for daemon in cluster.step_daemons():
                for process in (daemon, *daemon.children(recursive=True)):
                    process.kill()


def _configuration(folder: Path) -> str:
    host = os.uname().nodename
    cluster = _CLUSTER.format(
        folder=folder,
        host=host,
        controller_port=free_port(),
        first_job=free_port() - _FIRST_PORT,
    )
    nodes = [_NODE.format(node=node, host=host, port=free_port()) for node in NODES]
    return cluster + "".join(nodes) + _PARTITION


def _munged(folder: Path) -> Sequence[str]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o400)
    return (
        "munged",
        "--foreground",
        "--force",  # that others may enter the folder is no matter here
        f"--key-file={key}",
        f"--socket={folder}/munge.sock",
        f"--pid-file={folder}/munged.pid",
        f"--seed-file={folder}/munged.seed",
    )
