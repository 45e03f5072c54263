"""The ranks that hold a stage together, on one machine, and what they exchange while they compute.

All of them run the same program, so each makes the same calls in the same order. What a call
returns is the same on all of them to the last bit, wherever it is the same in meaning: gloo and
NCCL both add each number up in one place.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dpipe.errors import PeerLost
from dpipe.stage.seeding import paused
from dpipe.wire.collective import open_group

_LOOK = timedelta(seconds=0.2)

Watch = Callable[
    [int], AbstractContextManager[None]
]  # around an exchange, with the bytes that this rank sends


class TensorGroup:
    """One rank's end. `ranks` are the run's ranks in it; with `sequence` they split the sequence
    between matrices.

    Used by one thread. Raises `PeerLost` naming the group where one of them is gone, or silent for
    `timeout_s`.
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
        """The sum, or what `op` makes, of everybody's `tensor`, as a new one."""
        options = dist.AllreduceOptions()
        options.reduceOp = op
        out = tensor.detach().clone(memory_format=torch.contiguous_format)
        self._do(
            lambda: self._group.allreduce([out], options),
            2 * out.nbytes * (self.size - 1) // self.size,
        )
        return out

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Everybody's `tensor`, one behind the other along `dim`."""
        mine = tensor.detach().contiguous()
        out = mine.new_empty((self.size, *mine.shape))
        self._do(
            lambda: self._group._allgather_base(out.view(-1), mine.view(-1)),
            mine.nbytes * (self.size - 1),
        )
        return out.flatten(0, 1) if dim == 0 else torch.cat(out.unbind(), dim)

    def reduce_scatter(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part, along `dim`, of the sum of everybody's `tensor`."""
        parts = torch.stack(tensor.detach().chunk(self.size, dim))
        out = torch.empty_like(parts[0])
        self._do(
            lambda: self._group._reduce_scatter_base(out.view(-1), parts.view(-1)),
            out.nbytes * (self.size - 1),
        )
        return out

    def part(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's part of a `tensor` that all have whole."""
        return tensor.chunk(self.size, dim)[self.rank]

    def fail(self, error: Exception) -> None:
        """From any thread: what is under way here, and what follows, raises `error`."""
        self._error = error
        self._group.abort()

    def _do(self, begin: Callable[[], Any], num_bytes: int) -> None:
        try:
            with self.watch(num_bytes), paused():
                self._wait(begin())
        except RuntimeError as error:  # the only kind that torch raises here
            raise PeerLost(
                f"rank {self.ranks[self.rank]} lost the tensor-parallel group of ranks "
                f"{self.ranks[0]} to "
                f"{self.ranks[-1]}: {error}"
            ) from error

    def _wait(self, work: Any) -> None:
        """Look up now and then whether the run has failed elsewhere: what gloo waits for cannot be
        interrupted.

        NCCL's is aborted, and its `wait` only puts the current stream behind the exchange.
        """
        done = self._device.type == "cuda" and work.wait()
        while not done:
            if self._error is not None:
                raise self._error
            try:
                done = work.wait(_LOOK)
            except (
                RuntimeError
            ):  # the look timed out, as the group will by itself, or the exchange is over
                done = work.is_completed() and work.wait()  # which raises where it has failed
