"""The processes of a bench, forked from one that has imported torch.

    bench ──> server, imports the bench's file ──fork──> process 0
                                               └─fork──> process 1, 2 ..

To import torch is most of what a process of a short bench would do by itself.
"""

from collections.abc import Callable
from multiprocessing import get_context
from typing import Any

from torch.multiprocessing.spawn import start_processes

from dpipe.processes.environment import set_up_grpc

# The server itself starts no thread and does not use a GPU, so that what it forks may do both.
CONTEXT = get_context("forkserver")


def run_processes(function: Callable[..., None], args: tuple[Any, ...], count: int) -> None:
    """`function(rank, *args)` in `count` processes of this machine, until all have ended.

    Raises torch's `ProcessRaisedException` or `ProcessExitedException` if one fails; the others
    are killed. Queues for results are `CONTEXT`'s.
    """
    set_up_grpc()  # who calls a bench without dpipe's commands measures the same
    CONTEXT.set_forkserver_preload([function.__module__])
    start_processes(function, args=args, nprocs=count, start_method="forkserver")
