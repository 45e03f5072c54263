"""Three machines and a laptop in a lab: OpenSSH servers, the kernel's TCP, a router that shapes. A
minute, as root.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from netem import lab as labs
from netem import measure
from netem.lab import Lab

ROOT = Path(__file__).resolve().parents[3]
NAME = f"c{os.getpid()}"
NUM_MACHINES = 3
LAPTOP = NUM_MACHINES
JOB = f"""
[model]
num_layers = 4
width = 16
num_heads = 2
context = 16
[data]
files = ["text.txt"]
[train]
batch_size = 8
num_microbatches = 4
steps = 100000
[pipeline]
stages = {NUM_MACHINES}
[run]
tensorboard = false
sample = "The"
"""
TEXT = (
    "The quick brown fox jumps over the lazy dog, and nobody knows why it never gets tired of it. "
    * 60
)
# Where the kernel has no sch_netem, a host's tc is that of the router, in which its egress is the
# device shape<i>.
TC = f"""#!{sys.executable}
import fcntl, os, shlex, sys
sys.path.insert(0, {str(ROOT)!r})
from netem import lab, shell
fcntl.flock(os.open({{folder!r}}, os.O_RDONLY), fcntl.LOCK_EX)  # the router answers one at a time
words = [word.replace("eth0", "shape{{number}}") for word in sys.argv[1:]]
try:
    print(lab.load({NAME!r}).router.run(shlex.join(["tc", *words])), end="")
except shell.NetemError as error:
    sys.exit(str(error))
"""

pytestmark = [
    pytest.mark.lab,
    pytest.mark.slow,
    pytest.mark.usefixtures("possible"),
    pytest.mark.timeout(580),
]


@dataclass
class Laptop:
    """A fifth host of the lab, from which `scripts/cluster` is used; `repository` is a copy of the
    working tree.
    """

    lab: Lab
    repository: Path
    folder: Path
    started: list["subprocess.Popen[str]"] = field(default_factory=list)

    def argv(self, words: Sequence[str | Path]) -> list[str]:
        command = [
            sys.executable,
            "-m",
            "fleet.cluster",
            *map(str, words),
            "--hosts",
            str(self.folder / "hosts.toml"),
        ]
        return self.lab.hosts[LAPTOP].enter(command)

    @property
    def where(self) -> dict[str, object]:
        path = f"{self.repository / 'scripts'}:{self.repository}"
        return {
            "cwd": self.folder,
            "env": {**os.environ, "PYTHONPATH": path},
            "stderr": subprocess.STDOUT,
            "text": True,
        }

    def __call__(self, *words: str | Path) -> str:
        done = subprocess.run(self.argv(words), stdout=subprocess.PIPE, timeout=240, **self.where)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def start(self, *words: str | Path) -> "subprocess.Popen[str]":
        self.started.append(
            subprocess.Popen(self.argv(words), stdout=subprocess.PIPE, **self.where)
        )
        return self.started[-1]


@pytest.fixture
def lab(possible, tmp_path, monkeypatch) -> Iterator[Lab]:
    monkeypatch.setattr(labs, "measured", lambda lab: lab)  # it is slow enough for any router
    (tmp_path / "near.toml").write_text("delay_ms = 5\nbandwidth_gbps = 0.5\n")
    yield labs.up(NAME, NUM_MACHINES + 1, tmp_path / "near.toml")
    labs.down(NAME)


@pytest.fixture
def laptop(lab, keys, tmp_path) -> Iterator[Laptop]:
    repository = tmp_path / "repository"
    unwanted = (".git", ".venv", "runs", "*cache*", "__pycache__", "*_pb2*", "*.egg-info", "shared")
    shutil.copytree(ROOT, repository, ignore=shutil.ignore_patterns(*unwanted))
    who = "-c user.name=t -c user.email=t@localhost"
    for words in (
        "init --quiet --initial-branch main",
        "add --all",
        f"{who} commit --quiet --message all",
    ):
        subprocess.run(["git", "-C", repository, *words.split()], check=True, timeout=30)
    blocks = [
        f'[[host]]\naddress = "{lab.addresses[n]}"\nfolder = "{tmp_path}/host{n}"\n'
        for n in range(NUM_MACHINES)
    ]
    (tmp_path / "hosts.toml").write_text(f'venv = "{sys.prefix}"\n{keys.lines}{"".join(blocks)}')
    (tmp_path / "job.toml").write_text(JOB)
    (tmp_path / "text.txt").write_text(TEXT)
    servers = []
    for number in range(NUM_MACHINES):
        path = "" if lab.router_kind == "namespace" else str(tc_of(tmp_path, number).parent)
        servers.append(keys.serve(22, [lab.addresses[number]], lab.hosts[number].enter([]), path))
    laptop = Laptop(lab, repository, tmp_path)
    yield laptop
    for process in [*laptop.started, *(server.process for server in servers)]:
        process.terminate()
        process.communicate(timeout=30)


def tc_of(folder: Path, number: int) -> Path:
    tc = folder / f"bin{number}/tc"
    tc.parent.mkdir()
    tc.write_text(TC.format(folder=str(folder), number=number))
    tc.chmod(0o755)
    return tc


def read_until(process: "subprocess.Popen[str]", words: str) -> list[str]:
    """The output of a command up to a line with `words`; fails if the command ends before."""
    seen = []
    for line in process.stdout:
        seen.append(line.rstrip())
        if words in line:
            return seen
    raise AssertionError(f"it ended before it said {words!r}:\n" + "\n".join(seen))


def steps_s(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["step_s"] for row in rows if "step_s" in row]


def test_machines_train_through_a_change_of_network_and_say_who_was_killed(laptop, lab):
    assert laptop("up").count("has ") == NUM_MACHINES
    laptop("put", "text.txt")

    training = laptop.start("run", "job.toml", "--name", "endless")
    read_until(training, "rank 0 | step 3/")
    (laptop.folder / "far.toml").write_text("delay_ms = 20\nbandwidth_gbps = 0.5\n")
    assert laptop("netem", "far.toml").count("eth0 is shaped as far.toml") == NUM_MACHINES
    assert measure.delay_ms(*lab.hosts[:2]) == pytest.approx(20, rel=0.2)
    done = len(steps_s(laptop.folder / "host0/src/runs/endless"))
    read_until(training, f"rank 0 | step {done + 6}/")

    pids = json.loads((laptop.folder / "host1/cluster/endless/rank-1.pid").read_text())
    os.kill(pids["rank"]["pid"], signal.SIGKILL)
    said = training.communicate(timeout=120)[0]
    assert training.returncode == 137
    assert f"rank 1 on {lab.addresses[1]}: exit code 137 (SIGKILL); the others stop" in said
    for rank in (0, 2):
        assert re.search(rf"rank {rank} \| dpipe: .*rank 1", said), said
        assert f"rank {rank} on {lab.addresses[rank]}: exit code 1\n" in said
    assert laptop("netem", "clear").count("cleared eth0") == NUM_MACHINES
    assert measure.delay_ms(*lab.hosts[:2]) < 5

    folder = laptop.folder / laptop("collect").strip()
    assert min(steps_s(folder)[-5:]) > 2 * 2 * 0.020  # the last stage is two hops away, and back
    assert sorted(path.name for path in (folder / "output").iterdir()) == [
        f"rank-{n}.log" for n in range(NUM_MACHINES)
    ]
    laptop("down")
