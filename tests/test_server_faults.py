"""Runs over a parameter server as a user starts them, in processes that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from dpipe.engine import checkpoint
from dpipe.engine.launch import free_port

TEXT = "The quick brown fox jumps over the lazy dog, and nobody knows why it never gets tired of it. " * 60
CONFIG = """
[model]
num_layers = 2
width = 16
num_heads = 2
context = 16
[data]
files = ["text.txt"]
held_out = 0.1
[train]
batch_size = 8
num_microbatches = 2
steps = {steps}
clip_norm = {clip_norm}
[data_parallel]
kind = "parameter-server"
replicas = 2
address = "127.0.0.1:{port}"
[run]
folder = "{folder}"
tensorboard = false
[timeouts]
join = 60
transfer = 60
"""
DPIPE = (sys.executable, "-m", "dpipe")
Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command in `tmp_path`; whatever is left of it at the end is killed."""
    (tmp_path / "text.txt").write_text(TEXT)
    root = str(Path(__file__).resolve().parent.parent)
    environ = {
        **os.environ,
        "PYTHONPATH": root,
        "OMP_NUM_THREADS": "1",
        "DPIPE_TOKEN": "secret",
        "PYTHONUNBUFFERED": "1",
    }
    started: list[subprocess.Popen[str]] = []

    def popen(*words: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, env=environ))
        return started[-1]

    yield popen
    for process in started:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
            child.kill()
        process.kill()
        process.communicate(timeout=10)


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., str]:
    """`job("run", steps=9)` writes a configuration whose server listens on one port throughout."""
    port = free_port()

    def write(folder: str, steps: int = 100_000, clip_norm: float = 1.0) -> str:
        path = tmp_path / f"{folder}.toml"
        path.write_text(CONFIG.format(port=port, folder=folder, steps=steps, clip_norm=clip_norm))
        return str(path)

    return write


def num_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return sum("loss" in json.loads(line) for line in path.read_text().splitlines()) if path.exists() else 0


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "the run did not get far enough"
        time.sleep(0.02)


def parameters(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.load(str(folder / "checkpoints"), lambda name: True)
    return {**found.tensors, **found.optimizer}


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_killed_server_that_is_started_again_costs_no_bit(
    clip_norm: float, job: Callable[..., str], start: Start, tmp_path: Path
) -> None:
    """Killed three times, whatever it was doing; against a run whose server lived, and left when it was done."""
    settings = {"steps": 40, "clip_norm": clip_norm}
    whole = job("whole", **settings)
    server, run = start(*DPIPE, "serve", whole), start(*DPIPE, "launch", whole)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert server.wait(10) == 0
    assert "all workers have left" in server.communicate()[0]

    killed = job("killed", **settings)
    server, run = start(*DPIPE, "serve", killed), start(*DPIPE, "launch", killed)
    for steps in (8, 16, 24):
        wait_until(lambda steps=steps: num_steps(tmp_path / "killed") >= steps, run)
        server.send_signal(signal.SIGKILL)
        server.wait(10)
        server = start(*DPIPE, "serve", killed)
    _, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert num_steps(tmp_path / "killed") == 40
    one, other = parameters(tmp_path / "whole"), parameters(tmp_path / "killed")
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_killed_worker_stops_the_others_and_is_named(job: Callable[..., str], start: Start, tmp_path: Path) -> None:
    path = job("run")
    server, run = start(*DPIPE, "serve", path), start(*DPIPE, "launch", path)
    wait_until(lambda: num_steps(tmp_path / "run") > 3, run)
    (victim,) = [p for p in psutil.Process(run.pid).children() if p.environ().get("DPIPE_RANK") == "1"]
    victim.kill()
    killed_at = time.monotonic()
    _, err = run.communicate(timeout=20)
    assert time.monotonic() - killed_at < 10
    assert run.returncode != 0
    assert "rank 1" in err
    assert server.poll() is None, "it waits for the run to be resumed"
    server.send_signal(signal.SIGTERM)
    out, _ = server.communicate(timeout=10)
    assert "start it again to go on" in out
