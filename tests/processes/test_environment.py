import os
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dpipe.errors import ConfigError, JoinError
from dpipe.processes.environment import AgentStore, ProcessInfo, first_host, process_info

DPIPE = {
    "DPIPE_RANK": "1",
    "DPIPE_WORLD_SIZE": "2",
    "DPIPE_LOCAL_RANK": "1",
    "DPIPE_COORDINATOR": "127.0.0.1:4000",
}
TORCHRUN = {
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[03-05,9]-ib,login1",
}
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "1"}


def test_process_info_is_one_process_by_default():
    assert process_info({}) == ProcessInfo(rank=0, world_size=1, local_rank=0, coordinator=None)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (DPIPE, ProcessInfo(1, 2, 1, "127.0.0.1:4000")),
        (TORCHRUN, ProcessInfo(2, 4, 0, "node0:29500")),
        (
            TORCHRUN | AGENT,
            ProcessInfo(2, 4, 0, store=AgentStore("node0", 29500, "dpipe/coordinator/1")),
        ),
        (SLURM, ProcessInfo(3, 8, 1, "gpu03-ib:23456")),
        (SLURM | {"SLURM_STEP_NODELIST": "gpu9"}, ProcessInfo(3, 8, 1, "gpu9:23456")),
        ({"RANK": "0", "WORLD_SIZE": "1"}, ProcessInfo()),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, ProcessInfo()),
        ({"DPIPE_RANK": "0", "DPIPE_WORLD_SIZE": "1"}, ProcessInfo()),
        (SLURM | TORCHRUN, ProcessInfo(2, 4, 0, "node0:29500")),
        (SLURM | TORCHRUN | DPIPE, ProcessInfo(1, 2, 1, "127.0.0.1:4000")),
    ],
)
def test_process_info_reads_the_environment(environ, expected):
    assert process_info(environ) == expected


def test_process_info_flags_win():
    here = process_info(SLURM | TORCHRUN | DPIPE, rank=0, world_size=3, coordinator="10.0.0.5:4000")
    assert here == ProcessInfo(0, 3, 0, "10.0.0.5:4000")
    assert process_info(TORCHRUN, rank=0, world_size=1) == ProcessInfo()


def test_process_info_carries_the_token_and_does_not_show_it():
    here = process_info(DPIPE | {"DPIPE_TOKEN": "open sesame"})
    assert here.token == "open sesame"
    assert "sesame" not in repr(here)


@pytest.mark.parametrize(
    ("flags", "missing"),
    [
        ({"rank": 1}, "--world-size and --coordinator missing"),
        ({"world_size": 2}, "--rank and --coordinator missing"),
        ({"rank": 1, "world_size": 2}, "together; --coordinator missing"),
        ({"coordinator": "10.0.0.5:4000"}, "--rank and --world-size missing"),
    ],
)
def test_process_info_names_the_flags_that_are_missing(flags, missing):
    with pytest.raises(ConfigError, match=missing):
        process_info(TORCHRUN, **flags)


def test_process_info_brackets_the_ipv6_address_of_torchrun():
    here = process_info(TORCHRUN | {"MASTER_ADDR": "fd00::5", "MASTER_PORT": "7000"})
    assert (here.coordinator, here.coordinator_host, here.port) == (
        "[fd00::5]:7000",
        "[fd00::5]",
        7000,
    )


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        (TORCHRUN, "WORLD_SIZE"),
        (TORCHRUN, "RANK"),
        (TORCHRUN, "MASTER_ADDR"),
        (TORCHRUN, "MASTER_PORT"),
        (SLURM, "SLURM_NTASKS"),
        (SLURM, "SLURM_JOB_ID"),
        (SLURM, "SLURM_JOB_NODELIST"),
        (DPIPE, "DPIPE_COORDINATOR"),
    ],
)
def test_process_info_names_the_variable_that_is_missing(environ, name):
    with pytest.raises(ConfigError, match=f"^{name} is missing in the environment"):
        process_info({key: value for key, value in environ.items() if key != name})


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        (TORCHRUN | {"RANK": "two"}, "RANK in the environment must be a whole number, got 'two'"),
        (
            TORCHRUN | {"LOCAL_RANK": ""},
            "LOCAL_RANK in the environment must be a whole number, got ''",
        ),
        (TORCHRUN | {"RANK": "4"}, "rank 4 of 4: ranks are numbered from 0"),
        (DPIPE | {"DPIPE_COORDINATOR": "here"}, "coordinator 'here' must be HOST:PORT"),
        (DPIPE | {"DPIPE_COORDINATOR": ":4000"}, "coordinator ':4000' must be HOST:PORT"),
        (DPIPE | {"DPIPE_COORDINATOR": "here:70000"}, "coordinator 'here:70000' must be HOST:PORT"),
        (
            DPIPE | {"DPIPE_COORDINATOR": "::1:7000"},
            r"write an IPv6 address in brackets, \[::1\]:7000",
        ),
        (SLURM | {"SLURM_JOB_NODELIST": ",x"}, "',x' is not a list of hosts"),
    ],
)
def test_process_info_refuses_invalid_values(environ, complaint):
    with pytest.raises(ConfigError, match=complaint):
        process_info(environ)


@pytest.mark.parametrize(
    ("hostlist", "host"),
    [
        ("login1", "login1"),
        ("a,b", "a"),
        ("gpu[03-05,9]-ib", "gpu03-ib"),
        ("gpu[7,9-11]", "gpu7"),
        ("rack[1-2]n[01-04],login", "rack1n01"),
        ("node-a-[2]", "node-a-2"),
    ],
)
def test_first_host_reads_slurm_lists(hostlist, host):
    assert first_host(hostlist) == host


def test_known_coordinator_needs_no_publishing():
    here = ProcessInfo(0, 2, 0, "10.0.0.5:4000")
    here.publish("ignored:1")
    assert (here.find(0.0), here.port) == ("10.0.0.5:4000", 4000)


def test_single_process_has_no_coordinator_to_find():
    assert ProcessInfo().port == 0
    with pytest.raises(JoinError, match="started as the only rank"):
        ProcessInfo().find(1.0)


@pytest.fixture
def agent():
    """The store that torchrun's agent holds, as `TORCHRUN | AGENT` describes it."""
    store = TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10)
    )
    return TORCHRUN | AGENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}, store


def test_agent_store_passes_the_address_on(agent):
    environ, _ = agent
    found: list[str] = []
    waiting = threading.Thread(target=lambda: found.append(process_info(environ).find(10.0)))
    waiting.start()
    first = process_info(environ | {"RANK": "0"})
    assert first.port == 0
    first.publish("10.0.0.5:4321")
    waiting.join(10)
    assert found == ["10.0.0.5:4321"]


def test_agent_store_keeps_restarts_apart(agent):
    environ, _ = agent
    process_info(environ | {"RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0"}).publish(
        "10.0.0.5:4321"
    )
    with pytest.raises(
        JoinError,
        match=r"rank 0 has not said within 0.2 s .*key dpipe/coordinator/1.*rank 0 is running",
    ):
        process_info(environ).find(0.2)


def test_agent_store_that_is_gone_is_a_join_error(agent, monkeypatch):
    monkeypatch.setattr("dpipe.processes.environment._PUBLISH_S", 0.2)
    with pytest.raises(JoinError, match=r"torchrun's store at 127.0.0.1:1 does not answer"):
        AgentStore("127.0.0.1", 1, "key").publish("10.0.0.5:4321")


JOIN = """
import os
from dpipe.coordinator.client import Coordinator
from dpipe.coordinator.server import CoordinatorServer
from dpipe.processes.environment import environment, process_info

here = process_info(environment())
server = CoordinatorServer(here.world_size, port=here.port) if here.rank == 0 else None
if server:
    here.publish(f"127.0.0.1:{server.port}")
coordinator = Coordinator.join(here.find(30.0), here.rank, here.world_size, shared={})
parts = coordinator.gather("who", str(here.local_rank).encode()).wait(30.0)
os.write(1, f"{parts}\\n".encode())  # one line at a time
coordinator.leave()
if server:
    server.close()
"""


def test_ranks_of_torchrun_find_each_other(warm_python: str) -> None:
    torchrun = [warm_python, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    argv = [*torchrun, "--no-python", warm_python, "-c", JOIN]
    environ = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    output = subprocess.run(
        argv, env=environ, stdout=subprocess.PIPE, text=True, timeout=100, check=True
    ).stdout
    assert output.split() == ["(b'0',", "b'1')"] * 2


def test_process_info_does_not_import_torch():
    modules = "sys, dpipe.processes.environment, dpipe.processes.launch"
    code = f"import {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_grpc_is_set_up_before_it_is_imported_and_what_the_user_has_set_stays() -> None:
    """gRPC reads its settings once, when it is imported."""
    code = """
import os, sys
from click.testing import CliRunner
from dpipe.cli.main import main
assert "grpc" not in sys.modules
CliRunner().invoke(main, ["schedule", "--help"], catch_exceptions=False)
assert os.environ["GRPC_EXPERIMENTS"].startswith("-event_engine_client")
print(os.environ["GRPC_POLL_STRATEGY"])
"""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("GRPC_")}
    for own, strategy in (({}, "poll"), ({"GRPC_POLL_STRATEGY": "epoll1"}, "epoll1")):
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env=inherited | own, capture_output=True, text=True, timeout=60
        )
        assert (done.stdout.strip(), done.stderr) == (strategy, "")
