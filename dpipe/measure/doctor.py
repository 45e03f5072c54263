"""What of this machine would hurt a run, and how to mend it: `dpipe doctor`.

    versions   device   ports   TCP   clock   files   disk   ──▶ findings, one a line

Each check looks at one thing and changes nothing. Where a check cannot look (another system, no
/proc), it says so: what was not seen is not well.
"""

import ctypes
import os
import platform
import resource
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from dpipe.config.load import Config
from dpipe.errors import ConfigError
from dpipe.plan.assumed_network import losses_are_outrun
from dpipe.session.window import set_congestion_control

_PACKAGES = ("torch", "grpcio", "protobuf", "numpy")
EXTRAS = {  # the package of each that shows whether it is installed
    "hf": "transformers",
    "quantised": "torchao",
    "eval": "lm-eval",
    "watch": "starlette",
    "prometheus": "prometheus_client",
    "wandb": "wandb",
    "mlflow": "mlflow-skinny",  # which the whole mlflow brings as well
    "otel": "opentelemetry-sdk",
}
_SYSCTL = Path("/proc/sys/net/ipv4")
_LEAST_BUFFER_BYTES = 4 << 20  # of a connection: 1 Gbit/s over 32 ms
_LEAST_FILES = 1024
_LEAST_DISK_BYTES = 5 << 30
_TIMEX_BYTES = 512  # more than the kernel's struct, whose fields are not read
_UNSYNCHRONISED = 5  # TIME_ERROR


class State(Enum):
    WELL = "ok"
    NOTE = "note"  # may cost time
    HURTS = "bad"  # a run fails, or is slow


@dataclass(frozen=True)
class Finding:
    what: str
    state: State = State.WELL
    mend: str = ""  # what to do


def examine(config: Config) -> Iterator[Finding]:
    """Findings about this machine, for `config`: its [node], its transport and its folder."""
    for check in CHECKS:
        yield from check(config)


def _versions(config: Config) -> Iterator[Finding]:
    packages = [f"{name} {version(name)}" for name in _PACKAGES]
    yield Finding(f"Python {platform.python_version()}, {', '.join(packages)}")
    for extra, package in EXTRAS.items():
        try:
            version(package)
        except PackageNotFoundError:
            yield Finding(
                f"extra {extra} is not installed", State.NOTE, f"pip install 'dpipe[{extra}]'"
            )


def _device(config: Config) -> Iterator[Finding]:
    wanted = config.node.device
    if wanted == "cpu":
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        yield Finding(f"device cpu: {cores} cores, {config.node.threads} threads a rank")
        if torch.cuda.is_available():
            name = torch.cuda.get_device_name(0)
            yield Finding(f"{name} is here and not used", State.NOTE, "set node.device = cuda")
    elif torch.cuda.is_available():
        names = [torch.cuda.get_device_name(each) for each in range(torch.cuda.device_count())]
        yield Finding(f"device {wanted}: {', '.join(names)}")
    else:
        yield Finding(
            f"node.device is {wanted}, and torch {torch.__version__} sees no GPU",
            State.HURTS,
            "install a driver (nvidia-smi shows it) and a CUDA build of torch, or set node.device "
            "= cpu",
        )


def _ports(config: Config) -> Iterator[Finding]:
    address = (config.node.bind or "127.0.0.1", config.node.port)
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(address)
        except OSError as error:
            yield Finding(
                f"cannot listen on {address[0]}:{address[1]}: {error.strerror}",
                State.HURTS,
                "set another node.port (0 takes any free one), or a node.bind of this machine",
            )
            return
    port = str(address[1]) if address[1] else "any port"
    yield Finding(f"can listen on {address[0]}, {port}")


def _tcp(config: Config) -> Iterator[Finding]:
    name = config.transport.congestion_control
    with socket.socket() as sock:
        try:
            set_congestion_control(sock, name)
        except ConfigError as error:
            yield Finding("congestion control", State.HURTS, str(error))
            name = "host"  # what is left
    hosts = _sysctl("tcp_congestion_control") or "the system's"
    used = hosts if name in ("auto", "host") else name
    chooses = name == "auto" and losses_are_outrun(config)
    if chooses and hosts == "bbr":
        used = "reno, in the place of the host's bbr"
    yield Finding(f"congestion control {used}")
    allowed = (_sysctl("tcp_allowed_congestion_control") or "bbr").split()
    if chooses and "bbr" not in allowed:
        yield Finding(
            "no bbr: where packets are lost a step takes longer than predicted",
            State.NOTE,
            "modprobe tcp_bbr, then sysctl net.ipv4.tcp_allowed_congestion_control="
            f"'{' '.join(allowed)} bbr'",
        )
    for key in ("tcp_rmem", "tcp_wmem"):
        limits = (_sysctl(key) or "").split()
        if not limits:
            yield Finding(f"net.ipv4.{key} cannot be read here", State.NOTE)
        elif int(limits[-1]) < _LEAST_BUFFER_BYTES:
            yield Finding(
                f"net.ipv4.{key} ends at {limits[-1]} bytes: a far link stays below its rate",
                State.NOTE,
                f"sysctl net.ipv4.{key}='{' '.join(limits[:-1])} {4 * _LEAST_BUFFER_BYTES}', or "
                "more transport.connections",
            )
    if _sysctl("tcp_mtu_probing") == "0":
        yield Finding(
            "net.ipv4.tcp_mtu_probing is 0: a path that loses large packets is found by dialling "
            "again",
            State.NOTE,
            "sysctl net.ipv4.tcp_mtu_probing=1",
        )


def _clock(config: Config) -> Iterator[Finding]:
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)
    if adjtimex is None:
        yield Finding("whether the clock is set cannot be read here", State.NOTE)
    elif adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES)) == _UNSYNCHRONISED:
        yield Finding(
            "nothing sets the clock: logs and TLS certificates are dated by it; traces are not",
            State.NOTE,
            "start chrony or systemd-timesyncd",
        )
    else:
        yield Finding("the clock is synchronised")


def _files(config: Config) -> Iterator[Finding]:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < _LEAST_FILES:
        yield Finding(
            f"a process may have {most} open files", State.HURTS, f"ulimit -n {_LEAST_FILES}"
        )
    else:
        yield Finding(f"a process may have {most} open files")


def _disk(config: Config) -> Iterator[Finding]:
    folder = Path(config.run.folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        yield Finding(f"run.folder {folder} cannot be written", State.HURTS, "set another")
    free = shutil.disk_usage(there).free
    state = State.WELL if free >= _LEAST_DISK_BYTES else State.NOTE
    mend = "" if state is State.WELL else "make room, lower run.keep, or set run.checkpoint_url"
    yield Finding(f"{free / 1e9:,.1f} GB are free for run.folder {folder}", state, mend)


def _sysctl(name: str) -> str | None:
    try:
        return (_SYSCTL / name).read_text().strip()
    except OSError:
        return None


CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    _versions,
    _device,
    _ports,
    _tcp,
    _clock,
    _files,
    _disk,
)
