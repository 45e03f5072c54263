"""Which rank this process is, and where the coordinator is. The only reader of `os.environ`.

    flags  ▶  DPIPE_*  ▶  torchrun's  ▶  Slurm's  ▶  alone          the first that is there says it all

Rank 0 makes the coordinator's server, the others find it:

    rank 0:  server = CoordinatorServer(..., port=here.port);  here.publish(f"{host}:{server.port}")
    others:  address = here.find(timeout_s)
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from dpipe.errors import ConfigError, JoinError

_PUBLISH_S = 60.0


def environment() -> Mapping[str, str]:
    """The environment of this process, for `process_info` and `launch`."""
    return os.environ


def load_kernels_at_start() -> None:
    """For NCCL, before the first use of CUDA: load all kernels at start.

    A kernel that is loaded at its first use may wait for everything that runs on the device, and a
    receive that was posted early runs until its peer sends.
    """
    os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


@dataclass(frozen=True)
class AgentStore:
    """torchrun's key-value store. Its agent holds MASTER_PORT, so the coordinator cannot: its
    address is kept here.
    """

    host: str
    port: int
    key: str

    def publish(self, address: str) -> None:
        """Raises `JoinError` where the store does not answer."""
        try:
            self._connect(_PUBLISH_S).set(self.key, address)
        except RuntimeError as error:  # the base of torch's DistError
            raise JoinError(
                f"torchrun's store at {self.host}:{self.port} does not answer: {error}"
            ) from error

    def find(self, timeout_s: float) -> str:
        """Raises `JoinError` where rank 0 has not published within `timeout_s`, or the store does
        not answer.
        """
        try:
            return bytes(self._connect(timeout_s).get(self.key)).decode()
        except RuntimeError as error:
            raise JoinError(
                f"rank 0 has not said within {timeout_s:g} s where the coordinator listens (in "
                "torchrun's store at "
                f"{self.host}:{self.port}, key {self.key}); see whether rank 0 is up"
            ) from error

    def _connect(self, timeout_s: float) -> Any:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # its stubs do not export it

        return TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=timeout_s))


@dataclass(frozen=True)
class ProcessInfo:
    """This process among the ranks. `coordinator` is `host:port`; None where `store` tells it, or
    where it is alone.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    coordinator: str | None = None
    store: AgentStore | None = None
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank {self.rank} of {self.world_size}: ranks count from 0 to the world size less "
                "one"
            )
        if self.coordinator is not None:
            _check_address(self.coordinator)

    @property
    def port(self) -> int:
        """Where rank 0's coordinator listens; 0, any free port, where `publish` tells it to the
        others.
        """
        return int(self.coordinator.rpartition(":")[2]) if self.coordinator else 0

    @property
    def coordinator_host(self) -> str:
        """The host where the ranks meet: rank 0's, or torchrun's store's."""
        if self.store:
            return self.store.host
        return self.coordinator.rpartition(":")[0] if self.coordinator else "127.0.0.1"

    def publish(self, address: str) -> None:
        """Rank 0: tell the others where the coordinator listens, unless they know."""
        if self.store:
            self.store.publish(address)

    def find(self, timeout_s: float) -> str:
        """The coordinator's `host:port`. Raises `JoinError` where rank 0 has not told it within
        `timeout_s`.
        """
        if self.store:
            return self.store.find(timeout_s)
        if self.coordinator is None:
            raise JoinError("no coordinator is known: this process was placed as the only rank")
        return self.coordinator


def process_info(
    environ: Mapping[str, str],
    rank: int | None = None,
    world_size: int | None = None,
    coordinator: str | None = None,
) -> ProcessInfo:
    """Read the flags, or else the environment. Raises `ConfigError` naming what is missing or is
    not a number.
    """
    token = environ.get("DPIPE_TOKEN", "")
    if (rank, world_size, coordinator) != (None, None, None):
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
    return ProcessInfo(
        rank, world_size, _int(environ, "DPIPE_LOCAL_RANK", "0"), coordinator, token=token
    )


def _from_torchrun(environ: Mapping[str, str], token: str) -> ProcessInfo:
    rank = _int(environ, "RANK")
    world_size = _int(environ, "WORLD_SIZE")
    here = ProcessInfo(rank, world_size, _int(environ, "LOCAL_RANK", "0"), token=token)
    if world_size == 1:
        return here
    host = _get(environ, "MASTER_ADDR")
    port = _int(environ, "MASTER_PORT")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # else a restart finds the last one
        key = f"dpipe/coordinator/{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return ProcessInfo(
            here.rank, world_size, here.local_rank, store=AgentStore(host, port, key), token=token
        )
    return ProcessInfo(
        here.rank, world_size, here.local_rank, f"{_bracketed(host)}:{port}", token=token
    )


def _from_slurm(environ: Mapping[str, str], token: str) -> ProcessInfo:
    rank = _int(environ, "SLURM_PROCID")
    world_size = _int(environ, "SLURM_NTASKS")
    local_rank = _int(environ, "SLURM_LOCALID", "0")
    if world_size == 1:
        return ProcessInfo(rank, 1, local_rank, token=token)
    nodes = environ.get("SLURM_STEP_NODELIST") or _get(environ, "SLURM_JOB_NODELIST")
    port = 20_000 + _int(environ, "SLURM_JOB_ID") % 40_000
    return ProcessInfo(rank, world_size, local_rank, f"{first_host(nodes)}:{port}", token=token)


def first_host(hostlist: str) -> str:
    """The first host of Slurm's `gpu[03-05,9]-ib,login1`: `gpu03-ib`."""
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
    """As it stands before a port: an IPv6 address has colons of its own."""
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _any(environ: Mapping[str, str], *names: str) -> bool:
    return any(name in environ for name in names)


def _get(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ConfigError(
            f"{name} is missing in the environment, where the rest of this process's place is"
        )
    return environ[name]


def _int(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default) if default is not None else _get(environ, name)
    try:
        return int(str(text))
    except ValueError:
        raise ConfigError(
            f"{name} in the environment must be a whole number, got {text!r}"
        ) from None
