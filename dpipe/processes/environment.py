"""Which rank this process is, and where the coordinator is. The only reader of `os.environ`.

    flags  ▶  DPIPE_*  ▶  torchrun's  ▶  Slurm's  ▶  alone      the first that is set decides

Rank 0 makes the coordinator's server, the others find it:

    rank 0:  server = CoordinatorServer(..., port=process.port)
             process.publish(f"{host}:{server.port}")
    others:  address = process.find(timeout_s)
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from dpipe.errors import ConfigError, JoinError

LAYER_COSTS = "DPIPE_LAYER_COSTS"  # the text of probe/launcher_costs.py
_PUBLISH_S = 60.0  # for torchrun's agent to answer; it was up before its ranks
# gRPC 1.85 moves bytes faster with its older event loop, and that one faster with poll than with
# epoll (`dpipe bench transport`).
_GRPC_SETTINGS = {
    "GRPC_EXPERIMENTS": "-event_engine_client,-event_engine_listener",
    "GRPC_POLL_STRATEGY": "poll",
}


def environment() -> Mapping[str, str]:
    """The environment of this process, for `process_info` and `launch`."""
    return os.environ


def load_kernels_at_start() -> None:
    """For NCCL, before the first use of CUDA: load all kernels at start.

    A kernel that is loaded at its first use may wait for everything that runs on the device, and a
    receive that was posted early runs until its peer sends.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def set_up_grpc() -> None:
    """Before the first import of grpc, which reads these settings then and from the environment
    alone. What the user has set stays. Processes that are started later inherit them.
    """
    for name, value in _GRPC_SETTINGS.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True)
class AgentStore:
    """torchrun's key-value store. Its agent listens on MASTER_PORT, so the coordinator cannot: it
    takes another port, which rank 0 publishes here.
    """

    host: str
    port: int
    key: str

    def publish(self, address: str) -> None:
        """Raises `JoinError` if the store does not answer."""
        try:
            self._connect(_PUBLISH_S).set(self.key, address)
        except RuntimeError as error:  # the base of torch's DistError
            raise JoinError(
                f"torchrun's store at {self.host}:{self.port} does not answer: {error}"
            ) from error

    def find(self, timeout_s: float) -> str:
        """Raises `JoinError` if rank 0 has not published within `timeout_s`, or the store does not
        answer.
        """
        try:
            return bytes(self._connect(timeout_s).get(self.key)).decode()
        except RuntimeError as error:
            raise JoinError(
                f"rank 0 has not said within {timeout_s:g} s where the coordinator listens (key "
                f"{self.key} of torchrun's store at {self.host}:{self.port}); check that rank 0 is "
                "running"
            ) from error

    def _connect(self, timeout_s: float) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs do not export it

        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True)
class ProcessInfo:
    """This process among the ranks, as its launcher said."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0  # among the processes of this machine
    coordinator: str | None = None  # host:port; None: `store` holds it, or this is the only rank
    store: AgentStore | None = None
    token: str = field(default="", repr=False)  # that peers must show
    layer_costs: str = field(default="", repr=False)  # as its launcher counted them, if it has
    coordinator_is_elsewhere: bool = False  # in a process of its own: rank 0 starts none

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} of {self.world_size}: ranks are numbered from 0 to the world "
                "size minus one"
            )
        if self.coordinator is not None:
            _check_address(self.coordinator)

    def before_the_run(self, name: str) -> "ProcessInfo":
        """The same for what ranks do together before the run, `name`: torchrun's store keeps one
        address a key.
        """
        if self.store is None:
            return self
        return replace(self, store=replace(self.store, key=f"{self.store.key}/{name}"))

    @property
    def port(self) -> int:
        """Where rank 0's coordinator listens; 0, any free port, if `publish` tells it to the
        others.
        """
        return int(self.coordinator.rpartition(":")[2]) if self.coordinator else 0

    @property
    def coordinator_host(self) -> str:
        """The coordinator's host, or that of torchrun's store."""
        if self.store is not None:
            return self.store.host
        if self.coordinator is not None:
            return self.coordinator.rpartition(":")[0]
        return "127.0.0.1"

    def publish(self, address: str) -> None:
        """On rank 0: tell the others where the coordinator listens, unless they know."""
        if self.store is not None:
            self.store.publish(address)

    def find(self, timeout_s: float) -> str:
        """The coordinator's `host:port`. Raises `JoinError` if rank 0 has not published it within
        `timeout_s`.
        """
        if self.store is not None:
            return self.store.find(timeout_s)
        if self.coordinator is None:
            raise JoinError("there is no coordinator: this process was started as the only rank")
        return self.coordinator


def process_info(
    environ: Mapping[str, str],
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | None = None,
) -> ProcessInfo:
    """From the flags, or else from the environment. Raises `ConfigError` naming what is missing or
    not a number.
    """
    token = environ.get("DPIPE_TOKEN", "")
    if any(flag is not None for flag in (rank, world_size, coordinator)):
        return _from_flags(rank, world_size, coordinator, token)
    if _any(environ, "DPIPE_RANK", "DPIPE_WORLD_SIZE"):
        return _from_dpipe(environ, token)
    if _any(environ, "RANK", "WORLD_SIZE"):
        return _from_torchrun(environ, token)
    if _any(environ, "SLURM_PROCID"):
        return _from_slurm(environ, token)
    return ProcessInfo(token=token)


def _from_flags(
    rank: int | None, world_size: int | None, coordinator: str | None, token: str
) -> ProcessInfo:
    if rank is None or world_size is None or (coordinator is None and world_size > 1):
        flags = {"--rank": rank, "--world-size": world_size, "--coordinator": coordinator}
        missing = " and ".join(flag for flag, value in flags.items() if value is None)
        raise ConfigError(f"--rank, --world-size and --coordinator go together; {missing} missing")
    return ProcessInfo(rank, world_size, 0, coordinator, token=token)


def _from_dpipe(environ: Mapping[str, str], token: str) -> ProcessInfo:
    rank = _int(environ, "DPIPE_RANK")
    world_size = _int(environ, "DPIPE_WORLD_SIZE")
    coordinator = _get(environ, "DPIPE_COORDINATOR") if world_size > 1 else None
    local_rank = _int(environ, "DPIPE_LOCAL_RANK", "0")
    costs = environ.get(LAYER_COSTS, "")
    return ProcessInfo(rank, world_size, local_rank, coordinator, token=token, layer_costs=costs)


def _from_torchrun(environ: Mapping[str, str], token: str) -> ProcessInfo:
    rank = _int(environ, "RANK")
    world_size = _int(environ, "WORLD_SIZE")
    local_rank = _int(environ, "LOCAL_RANK", "0")
    if world_size == 1:
        return ProcessInfo(rank, world_size, local_rank, token=token)
    host = _get(environ, "MASTER_ADDR")
    port = _int(environ, "MASTER_PORT")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # A key for each try: after a restart, ranks would find the coordinator of before.
        key = f"dpipe/coordinator/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        store = AgentStore(host, port, key)
        return ProcessInfo(rank, world_size, local_rank, store=store, token=token)
    return ProcessInfo(rank, world_size, local_rank, f"{_bracketed(host)}:{port}", token=token)


def _from_slurm(environ: Mapping[str, str], token: str) -> ProcessInfo:
    rank = _int(environ, "SLURM_PROCID")
    world_size = _int(environ, "SLURM_NTASKS")
    local_rank = _int(environ, "SLURM_LOCALID", "0")
    if world_size == 1:
        return ProcessInfo(rank, 1, local_rank, token=token)
    # The step's: a job may run one on some of its nodes alone.
    nodes = environ.get("SLURM_STEP_NODELIST") or _get(environ, "SLURM_JOB_NODELIST")
    # Every rank comes to the same port without a word, and jobs that share a node to others.
    port = 20_000 + _int(environ, "SLURM_JOB_ID") % 40_000
    return ProcessInfo(rank, world_size, local_rank, f"{first_host(nodes)}:{port}", token=token)


def first_host(hostlist: str) -> str:
    """Of a list as Slurm writes it: of `gpu[03-05,9]-ib,login1` it is `gpu03-ib`."""
    # Up to the first comma that stands in no brackets; then of each bracket its first number.
    first = re.match(r"(?:[^,\[\]]|\[[^\]]+\])+", hostlist)
    if first is None:
        raise ConfigError(f"{hostlist!r} is not a list of hosts as Slurm writes it")
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first[0])


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 65_536):
        raise ConfigError(f"coordinator {address!r} must be HOST:PORT, such as 10.0.0.5:4000")
    if host != _bracketed(host):
        raise ConfigError(
            f"coordinator {address!r}: write an IPv6 address in brackets, {_bracketed(host)}:{port}"
        )


def _bracketed(host: str) -> str:
    """As it stands before a port: an IPv6 address has colons, and goes in brackets."""
    if ":" in host and not host.startswith("["):
        return f"[{host}]"
    return host


def _any(environ: Mapping[str, str], *names: str) -> bool:
    return any(name in environ for name in names)


def _get(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(
            f"{name} is missing in the environment, although other variables of that launcher are "
            "set"
        )
    return environ[name]


def _int(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = _get(environ, name) if default is None else environ.get(name, default)
    try:
        return int(text)
    except ValueError:
        raise ConfigError(
            f"{name} in the environment must be a whole number, got {text!r}"
        ) from None
