"""Three machines in namespaces of their own, two of them behind NATs that let nobody in.

    rank 1, 192.168.1.2 --- NAT 203.0.113.2 ---+--- rank 0 and the coordinator, 203.0.113.1
    rank 2, 192.168.1.2 --- NAT 203.0.113.3 ---'

Both private networks have the same addresses, as those of two homes have. Rank 1 and rank 2 each
reach rank 0, and nothing reaches them.
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.small_job import TEXT, small_toml

from dpipe.machines.file import load_machines
from dpipe.report.metrics import read_rows

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("possible"), pytest.mark.timeout(300)]
NAME = f"dpipe-nat{os.getpid()}"
WORLD = "203.0.113.1"
PORT = 7200
MASQUERADE = """
table ip nat {
  chain post { type nat hook postrouting priority 100; oifname "out" masquerade; }
}
table ip filter {
  chain forward {
    type filter hook forward priority 0; policy drop;
    iifname "in" accept
    ct state established,related accept
  }
}
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Houses:
    """Namespaces: `world`, and for each house its `nat` and the machine behind it."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.world = self._namespace("world")
        ip("-n", self.world, "link", "add", "bridge", "type", "bridge")
        ip("-n", self.world, "addr", "add", f"{WORLD}/24", "dev", "bridge")
        ip("-n", self.world, "link", "set", "bridge", "up")
        self.machines = [self.world, self._house(2), self._house(3)]

    def _namespace(self, name: str) -> str:
        name = f"{NAME}-{name}"
        ip("netns", "add", name)
        self._stack.callback(ip, "netns", "del", name)
        ip("-n", name, "link", "set", "lo", "up")
        return name

    def _house(self, number: int) -> str:
        nat = self._namespace(f"nat{number}")
        machine = self._namespace(f"house{number}")
        port = f"port{number}"
        ip("-n", nat, "link", "add", "out", "type", "veth", "peer", port, "netns", self.world)
        ip("-n", nat, "link", "add", "in", "type", "veth", "peer", "eth0", "netns", machine)
        ip("-n", self.world, "link", "set", port, "master", "bridge", "up")
        for namespace, device, address in (
            (nat, "out", f"203.0.113.{number}/24"),
            (nat, "in", "192.168.1.1/24"),
            (machine, "eth0", "192.168.1.2/24"),
        ):
            ip("-n", namespace, "addr", "add", address, "dev", device)
            ip("-n", namespace, "link", "set", device, "up")
        ip("-n", machine, "route", "add", "default", "via", "192.168.1.1")
        enter = ["ip", "netns", "exec", nat]
        subprocess.run([*enter, "sysctl", "-qw", "net.ipv4.ip_forward=1"], check=True)
        subprocess.run([*enter, "nft", "-f", "-"], input=MASQUERADE, text=True, check=True)
        return machine


@pytest.fixture(scope="module")
def houses() -> Iterator[Houses]:
    with ExitStack() as stack:
        yield Houses(stack)


def in_houses(houses: Houses, folder: Path, python: str, *words: str) -> list[str]:
    """Run `dpipe WORDS` as one rank on each machine; what each has said."""
    environment = {**os.environ, "DPIPE_TOKEN": "a secret"}
    processes = []
    for rank, machine in enumerate(houses.machines):
        place = ["--rank", str(rank), "--world-size", "3", "--coordinator", f"{WORLD}:{PORT}"]
        argv = ["ip", "netns", "exec", machine, python, "-m", "dpipe", *words, *place]
        processes.append(
            subprocess.Popen(
                argv,
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        said = [process.communicate(timeout=200)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [0, 0, 0], said
    return said


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder) if "loss" in row]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("kind", ["grpc", "tcp"])
def test_two_nats_change_no_loss(
    houses: Houses, tmp_path: Path, warm_python: str, kind: str
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    job = small_toml(
        model={"num_layers": 4},
        train={"steps": 3},
        pipeline={"stages": 3},
        transport={"kind": kind, "connections": 2},
    )
    (tmp_path / "job.toml").write_text(job)
    said = in_houses(houses, tmp_path, warm_python, "train", "job.toml", "-o", "run.folder=nat")
    assert "rank 1 and rank 2 cannot dial each other" in said[0]
    assert "1->2 " in said[0] and "(relayed)" in said[0]
    rows = read_rows(tmp_path / "nat")
    assert [row["relayed"] for row in rows if "loss" in row] == [["1->2", "2->1"]] * 3
    alone = [warm_python, "-m", "dpipe", "launch", "job.toml", "-o", "run.folder=alone"]
    subprocess.run(alone, cwd=tmp_path, check=True, capture_output=True)
    assert len(losses(tmp_path / "nat")) == 3
    assert losses(tmp_path / "nat") == losses(tmp_path / "alone")


@pytest.mark.slow
def test_link_behind_two_nats_is_measured_and_marked(
    houses: Houses, tmp_path: Path, warm_python: str
) -> None:
    (tmp_path / "job.toml").write_text('[model]\nlayers = "replay"\n')
    in_houses(houses, tmp_path, warm_python, "measure", "job.toml")
    cluster = load_machines(tmp_path / "machines.toml")
    first, second, third = cluster.names
    assert cluster.relayed == {(second, third), (third, second)}
    assert not cluster.missing(cluster.names)
    assert cluster.link(first, second) is not None
