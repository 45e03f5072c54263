"""The cable is pulled for a while between two machines, which are network namespaces: the kernel's
own TCP, its retransmissions and their growing pauses. A minute, as root; hardly any of it
computes.
"""

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.small_job import small_toml

from dpipe.config.load import load
from dpipe.report.metrics import read_rows

pytestmark = [
    pytest.mark.lab,
    pytest.mark.usefixtures("possible"),
    pytest.mark.timeout(300),
]

STEPS = 300  # which a busy machine may take half of before it cuts the link
PORT = 7200
HOSTS = [f"dpipe-cut{os.getpid()}-{rank}" for rank in range(2)]
ADDRESSES = ["10.254.254.1", "10.254.254.2"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@pytest.fixture
def hosts(possible: None) -> Iterator[list[str]]:
    """Two namespaces with a cable between them."""
    try:
        for host in HOSTS:
            ip("netns", "add", host)
        end, other = ["type", "veth"], ["peer", "name", "eth0", "netns", HOSTS[1]]
        ip("link", "add", "eth0", "netns", HOSTS[0], *end, *other)
        for host, address in zip(HOSTS, ADDRESSES, strict=True):
            ip("-n", host, "address", "add", f"{address}/30", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host, "link", "set", device, "up")
        yield HOSTS
    finally:
        for host in HOSTS:
            subprocess.run(["ip", "netns", "del", host], check=False)


def num_steps(folder: Path) -> int:
    return len(read_rows(folder)) if (folder / "metrics.jsonl").exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cut_s"), [("tcp", 5.0), ("tcp", 15.0), ("grpc", 15.0)])
def test_cut_of_seconds_is_waited_out_and_changes_no_loss(
    kind: str,
    cut_s: float,
    hosts: list[str],
    losses: Callable[..., list[float]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warm_python: str,
) -> None:
    """15 s ended the run, with the link back."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("All that is known of the fox is that it is quick. " * 100)
    Path("job.toml").write_text(
        small_toml(
            train={"steps": STEPS},
            pipeline={"stages": 2},
            transport={"kind": kind},
            run={"folder": "run"},
            node={"token": "secret"},
        )
    )
    ranks = []
    for rank, host in enumerate(hosts):
        words = [warm_python, "-m", "dpipe", "train", "job.toml", "--rank", str(rank)]
        words += ["--world-size", "2", "--coordinator", f"{ADDRESSES[0]}:{PORT}"]
        with open(f"rank-{rank}.log", "w") as log:  # a pipe that nobody reads stops the run
            ranks.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *words], stdout=log, stderr=subprocess.STDOUT
                )
            )
    try:
        deadline = time.monotonic() + 90
        while num_steps(Path("run")) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
        ip("-n", hosts[0], "link", "set", "eth0", "down")
        time.sleep(1.0)
        before = num_steps(Path("run"))
        time.sleep(cut_s - 1.0)
        assert [rank.poll() for rank in ranks] == [None, None]
        assert 5 <= before == num_steps(Path("run")) < STEPS, "nothing was cut"
        ip("-n", hosts[0], "link", "set", "eth0", "up")
        for number, rank in enumerate(ranks):
            rank.wait(timeout=120)
            said = Path(f"rank-{number}.log").read_text()
            assert rank.returncode == 0, said
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "was opened again and continues" in said or kind == "tcp"
    cut = [row["loss"] for row in read_rows(Path("run")) if "loss" in row]
    assert cut == losses(load("job.toml", ("run.folder=undisturbed", "node.bind=127.0.0.1")))
