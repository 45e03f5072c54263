"""A tensor-parallel group: the ranks of one machine that hold a stage together, and their
collectives.

All of them run the same program, so each makes the same calls in the same order. The result of an
all-reduce is the same on all of them to the last bit: gloo and NCCL both sum each number in one
place.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from dpipe.errors import PeerLost
from dpipe.passes.seeding import paused
from dpipe.wire.collective import open_group, wait_for

# Called around each collective with the bytes that this rank sends.
Watch = Callable[[int], AbstractContextManager[None]]


class TensorGroup:
    """One rank's end. `ranks` are the run's ranks in the group, `rank` is this one's index in it.

    With `sequence` they split the sequence between the matrices. Used by one thread. Its methods
    raise `PeerLost` naming the group if a rank is gone, or silent for `timeout_s`.
    """

    def __init__(
        self,
        store: Any,
        ranks: range,
        rank: int,
        *,
        host: str,
        sequence: bool = False,
        device: torch.device | str = "cpu",
        timeout_s: float = 300.0,
    ) -> None:
        self.ranks = ranks
        self.rank = rank
        self.size = len(ranks)
        self.sequence = sequence
        self.watch: Watch = lambda num_bytes: nullcontext()
        self._device = torch.device(device)
        self._error: Exception | None = None
        self._group: Any = open_group(
            store, rank, self.size, host=host, device=self._device, timeout_s=timeout_s
        )

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        """The sum of all ranks' `tensor`, or what `op` makes of them, as a new tensor."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        # As a ring does it: a reduce-scatter, then an all-gather.
        num_bytes = 2 * out.nbytes * (self.size - 1) // self.size
        self._do(lambda: self._group.allreduce([out], options), num_bytes)
        return out

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """All ranks' `tensor`, concatenated along `dim`."""
        mine = tensor.detach().contiguous()
        out = mine.new_empty((self.size, *mine.shape))
        num_bytes = mine.nbytes * (self.size - 1)
        begin = partial(self._group._allgather_base, out.view(-1), mine.view(-1))
        self._do(begin, num_bytes)
        if dim == 0:
            return out.flatten(0, 1)
        return torch.cat(out.unbind(), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, along `dim`, of the sum of all ranks' `tensor`."""
        parts = torch.stack(tensor.detach().chunk(self.size, dim))
        out = torch.empty_like(parts[0])
        num_bytes = out.nbytes * (self.size - 1)
        begin = partial(self._group._reduce_scatter_base, out.view(-1), parts.view(-1))
        self._do(begin, num_bytes)
        return out

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, along `dim`, of a `tensor` that all ranks have whole; a view."""
        return tensor.chunk(self.size, dim)[self.rank]

    def fail(self, error: Exception) -> None:
        """From any thread: let the collective under way, and all that follow, raise `error`."""
        self._error = error  # first: the thread that waits reads it as soon as the abort wakes it
        group = self._group
        # Gloo's abort ends nothing, and whoever drops such a group last waits for its peers: that
        # must be the thread that uses it.
        if self._device.type == "cuda" and group is not None:
            group.abort()

    def close(self) -> None:
        """Free its sockets: what went wrong may hold this object for longer, by a traceback."""
        self._group = None

    def _do(self, begin: Callable[[], Any], num_bytes: int) -> None:
        try:
            # Layers exchange inside `seeded`. Without the pause, ranks that are threads of one
            # process would wait for each other's lock and for each other's message.
            with self.watch(num_bytes), paused():
                wait_for(begin(), self._device, lambda: self._error)
        except RuntimeError as error:  # the only kind that torch raises here
            raise PeerLost(
                f"rank {self.ranks[self.rank]} lost the tensor-parallel group of ranks "
                f"{self.ranks[0]} to {self.ranks[-1]}: {error}"
            ) from error
