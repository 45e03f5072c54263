import socket

import pytest

from dpipe.config.load import Config
from dpipe.coordinator.alone import Alone
from dpipe.errors import ConfigError, JoinError
from dpipe.processes.environment import ProcessInfo
from dpipe.ranks import ParallelRanks
from dpipe.run.agreement import torch_group
from dpipe.run.api import train
from dpipe.run.build import run_rank
from dpipe.run.join import address_toward, advertised_host
from dpipe.run.start import launch_ranks


@pytest.mark.parametrize(
    ("bind", "advertise", "host"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("10.0.0.5", None, "10.0.0.5"),
        ("10.0.0.5", "203.0.113.7", "203.0.113.7"),
        ("10.0.0.5", "none", None),  # behind NAT: only this end can dial
    ],
)
def test_advertised_address(bind: str, advertise: str | None, host: str | None) -> None:
    assert advertised_host(bind, advertise, "127.0.0.1") == host


def test_wildcard_advertises_the_address_that_leads_to_the_coordinator() -> None:
    assert advertised_host("0.0.0.0", None, "127.0.0.1") == "127.0.0.1"


def test_ranks_of_one_machine_listen_on_loopback_alone() -> None:
    assert address_toward("localhost") == "127.0.0.1"


def test_coordinator_of_an_ipv6_address_is_reached_from_one() -> None:
    """It was "no way to [::1]: Name or service not known"; in brackets, as node.bind and gRPC have
    it.
    """
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    assert address_toward("[::1]") == "[::1]"


def test_coordinator_whose_name_is_unknown_is_named() -> None:
    with pytest.raises(JoinError, match="no way to nowhere.invalid"):
        advertised_host("0.0.0.0", None, "nowhere.invalid")


def test_another_number_of_processes_than_ranks_says_what_to_set(tmp_path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[pipeline]\nstages = 4\n")
    with pytest.raises(ConfigError, match="2 processes were started.*-o pipeline.stages=2"):
        train(path, rank=0, world_size=2, coordinator="127.0.0.1:1")


def test_replicas_count_among_the_needed_processes(tmp_path) -> None:
    path = tmp_path / "job.toml"
    path.write_text('[pipeline]\nstages = 4\n[data_parallel]\nkind = "all-reduce"\nreplicas = 2\n')
    with pytest.raises(
        ConfigError, match=r"6 processes were started.*replicas 2 need 8.*-o pipeline.stages=3"
    ):
        train(path, rank=0, world_size=6, coordinator="127.0.0.1:1")
    with pytest.raises(ConfigError, match="replicas 2 do not divide 5 processes"):
        train(path, rank=0, world_size=5, coordinator="127.0.0.1:1")
    with pytest.raises(ConfigError, match="replicas 2 do not divide 3 processes"):
        launch_ranks(str(path), (), num_ranks=3, resume=None, fallback=False, say=lambda line: None)


def test_tensor_parallel_ranks_count_among_the_needed_processes(tmp_path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[pipeline]\nstages = 2\n[tensor_parallel]\nsize = 2\n")
    with pytest.raises(
        ConfigError, match=r"tensor_parallel.size 2 and .* need 4.*-o pipeline.stages=3"
    ):
        train(path, rank=0, world_size=6, coordinator="127.0.0.1:1")
    with pytest.raises(
        ConfigError, match="of stages on tensor_parallel.size 2 ranks do not divide 5 processes"
    ):
        train(path, rank=0, world_size=5, coordinator="127.0.0.1:1")


def test_torch_group_needs_addresses(tiny) -> None:
    config: Config = tiny(
        data_parallel__kind="all-reduce", data_parallel__replicas=2, data_parallel__group="torch"
    )
    with pytest.raises(JoinError, match="rank 0 has node.advertise"):
        torch_group(config, ParallelRanks(0, 1, 2), Alone(), [])


def test_missing_coordinator_is_reported_after_the_timeout(tiny, run_ranks) -> None:
    config: Config = tiny(pipeline__stages=2)
    with pytest.raises(JoinError, match="127.0.0.1:9"):
        run_rank(config, ProcessInfo(1, 2, 1, "127.0.0.1:9"), join_s=1.0)


def test_port_in_use_is_refused(tiny) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(JoinError, match="in use"):
            run_rank(tiny(pipeline__stages=2), ProcessInfo(0, 2, 0, address), join_s=1.0)
