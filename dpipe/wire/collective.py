"""How every `torch.distributed` group is opened: one of its own, beside whatever default group the
process has.
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


def open_group(
    store: Any, rank: int, size: int, *, host: str, device: torch.device, timeout_s: float
) -> Any:
    """This rank's end: gloo, talking from `host`, or NCCL for GPUs. `store` is where the ends
    meet.
    """
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)


def open_store(host: str, port: int, timeout_s: float, *, master: bool) -> Any:
    """Where a group meets: its `master` opens it at `host`, on a free port where `port` is 0; the
    others find it.
    """
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=master, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]
