"""How every `torch.distributed` group is opened, beside the process's default group, if any; and
how its collectives are waited for.
"""

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dpipe.errors import PeerLost

_POLL = timedelta(seconds=0.2)  # between looks at whether the run has failed elsewhere
_READING = "gloo_tcp_loop"  # the kernel's name of the thread that reads gloo's connections


def wait_for(work: Any, device: torch.device, failure: Callable[[], Exception | None]) -> None:
    """Wait for a collective; raises what `failure` returns meanwhile, and `RuntimeError` where it
    has failed.

    NCCL's `wait` only puts the current stream behind the collective, and an abort ends it. A wait
    of gloo cannot be interrupted, so it is polled.
    """
    if device.type == "cuda" and work.wait():
        return
    done = False
    while not done:
        error = failure()
        if error is not None:
            raise error
        try:
            done = work.wait(_POLL)
        except RuntimeError:  # the poll timed out, or the collective is over
            done = work.is_completed() and work.wait()  # raises if the collective failed


def open_group(
    store: Any, rank: int, size: int, *, host: str, device: torch.device, timeout_s: float
) -> Any:
    """This rank's end of a group: gloo, bound to `host`, or NCCL for a GPU. The ends find each
    other by `store`. Raises `PeerLost` where one does not come, or is gone.
    """
    try:
        return _open(store, rank, size, host, device, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(
            f"number {rank} of the {size} ranks of a torch.distributed group: {error}"
        ) from error


def _open(
    store: Any, rank: int, size: int, host: str, device: torch.device, timeout: timedelta
) -> Any:
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    # Without it gloo binds to what the hostname resolves to, which may be another interface.
    options._devices = [gloo.create_device(hostname=host)]
    group = gloo(store, rank, size, options)
    if sys.platform == "linux":
        _let_senders_finish()
    return group


def _let_senders_finish() -> None:
    """Put the threads that read gloo's connections into the batch class, where a thread that wakes
    waits for a core instead of taking it from another.

    Such a thread polls while another one of the process holds its connection's lock, to send. On a
    core that it took from the sender it would poll until its time slice is over, milliseconds in
    which the group stands still. Where a core is free it wakes as before.
    """
    for thread in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended, or a sandbox forbids the call
            is_shared = os.sched_getscheduler(int(thread.name)) == os.SCHED_OTHER
            if is_shared and (thread / "comm").read_text().strip() == _READING:
                os.sched_setscheduler(int(thread.name), os.SCHED_BATCH, os.sched_param(0))


def open_store(host: str, port: int, timeout_s: float, *, master: bool) -> Any:
    """The store by which a group's ends find each other. The `master` opens it at `host`, on a free
    port for 0; the others connect to it. Raises `PeerLost` where nobody answers there.
    """
    timeout = timedelta(seconds=timeout_s)
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    try:
        # Nobody is waited for here: whoever looks for a key waits until it is set.
        return store(host, port, is_master=master, wait_for_workers=False, timeout=timeout)
    except RuntimeError as error:
        raise PeerLost(
            f"no store of a torch.distributed group at {host}:{port}: {error}"
        ) from error
