"""What the machine is that this process runs on, as far as it can be read without running
anything.
"""

import os
import re
import socket
from dataclasses import asdict
from pathlib import Path

import torch

from dpipe.config.load import Config
from dpipe.measure.layers import time_layers
from dpipe.measure.reports import LayerReport, MachineReport
from dpipe.plan.run_plan import local_device

_MEMORY = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_LONGEST_NAME = 90
_NOT_IN_A_NAME = re.compile(r"[^\w.:-]+")


def describe_this_machine(
    config: Config,
    micro_batch_sizes: tuple[int, ...],
    name: str | None,
    price_per_hour: float | None,
) -> MachineReport:
    """What is read and what is measured of it: some seconds of computing."""
    device = local_device(config.node.device, 0)
    times = time_layers(config, micro_batch_sizes)
    on_gpu = device.startswith("cuda")
    return MachineReport(
        name=name or name_of_this_machine(),
        device=f"cuda {torch.cuda.get_device_name(device)}" if on_gpu else "cpu",
        cores=len(os.sched_getaffinity(0)),
        devices=torch.cuda.device_count() if config.node.device == "cuda" else 1,
        memory_gb=free_bytes(device) / 1e9,
        price_per_hour=price_per_hour,
        layers=[LayerReport(**asdict(layer)) for layer in times],
    )


def name_of_this_machine() -> str:
    """Its host name, as a file of machines can have it."""
    return _name_of(socket.gethostname())


def _name_of(host: str) -> str:
    return _NOT_IN_A_NAME.sub("-", host)[:_LONGEST_NAME] or "machine"


def free_bytes(device: str) -> int:
    """Of the device; of main memory what the machine and this process's control group leave."""
    if device.startswith("cuda"):
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = re.search(r"MemAvailable:\s+(\d+) kB", _MEMORY.read_text())
    assert available is not None, "Linux says it since 3.14"
    free = int(available[1]) * 1024
    return min(free, _left_by_control_group(free))


def _left_by_control_group(otherwise: int) -> int:
    """A container's limit, less what is used of it."""
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return otherwise
    return otherwise if limit == "max" else max(0, int(limit) - used)
