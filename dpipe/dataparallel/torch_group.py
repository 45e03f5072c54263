"""A `torch.distributed` group between the replicas of a stage: gloo on CPU, NCCL between GPUs.

For networks that these libraries are made for (NVLink, InfiniBand, a rack). Replicas stay equal to
the last bit and a run repeats itself, but the library decides the order of the sum: not the bits of
`DirectExchange`. From three replicas on the order differs along a vector, and so do the last bits
of what the two copies of a tied weight step by. In fp32 that is accepted: both step by one sum,
which does not depend on how far they are apart, and weight decay draws them together. They were
4e-8 apart, relative, after 12 steps and 8e-8 after 400. In bf16 it was 1e4 times as much: the
configuration refuses it.

    GPU   compute stream   --[3B7]--.--[2B7]------------[1B7]--       goes on: it never waits here
    GPU   its own stream            `--wait--[fill][all-reduce][mean]--*     this thread waits
"""

import time
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from dpipe.dataparallel.background import Ready
from dpipe.dataparallel.base import Traffic
from dpipe.errors import PeerLost
from dpipe.streams import Streams, streams_of
from dpipe.wire.codec import codec
from dpipe.wire.collective import open_group, wait_for
from dpipe.wire.transfer import Moved

_AHEAD = 8  # parts in progress at once


class TorchGroup:
    """One replica's end. The ends find each other through `store`; `host` is the address that this
    one sends from (gloo).
    """

    def __init__(
        self,
        store: Any,
        replica: int,
        num_replicas: int,
        *,
        host: str,
        device: torch.device | str = "cpu",
        wire: str = "none",
        part_bytes: int = 4 << 20,
        timeout_s: float = 300.0,
        streams: Streams | None = None,
    ) -> None:
        """`streams` are by default some of its own, on `device`."""
        self._streams = streams or streams_of(device)
        self._timeout_s = timeout_s
        self.replica = replica
        self.device = torch.device(device)
        self._num_replicas = num_replicas
        self._codec = codec(wire)
        self._part_values = part_bytes // 4
        self._error: Exception | None = None
        self._group: Any = open_group(
            store, replica, num_replicas, host=host, device=self.device, timeout_s=timeout_s
        )

    def average(
        self, vector: torch.Tensor, stage: int, ready: Ready, without: Collection[int] = ()
    ) -> list[Traffic]:
        """Replace `vector` [N] by its mean over replicas; raises `PeerLost` where another replica
        is gone. The replicas `without` must give zeros, and are not counted.

        It runs behind what is queued on the current stream, on a stream of its own, and is over on
        the device when this returns.
        """
        queued = self._streams.mark()
        try:
            with self._streams.receiving():
                self._streams.wait(queued)
                traffic = self._average(vector, stage, ready, self._num_replicas - len(without))
                self._streams.block(self._streams.mark(), self._timeout_s)
        # torch and the streams raise no others here.
        except (RuntimeError, TimeoutError) as error:
            raise PeerLost(
                f"replica {self.replica} lost the torch.distributed group of the "
                f"{self._num_replicas} replicas of stage {stage}: {error}"
            ) from error
        return traffic

    def _average(self, vector: torch.Tensor, stage: int, ready: Ready, count: int) -> list[Traffic]:
        length = vector.numel()
        in_progress: deque[_Part] = deque()
        traffic: list[Traffic] = []
        for start in range(0, length, self._part_values):
            piece = slice(start, min(start + self._part_values, length))
            ready(piece)
            in_progress.append(self._begin(vector[piece]))
            # A bound, because each part holds its encoded copy until it is through.
            if len(in_progress) > _AHEAD:
                traffic.append(self._end(in_progress.popleft(), stage, count))
        for part in in_progress:
            traffic.append(self._end(part, stage, count))
        return traffic

    def fail(self, error: Exception) -> None:
        """End what is in progress here with `error`; the other replicas lose this one."""
        self._error = error  # first: the thread that waits reads it once the abort wakes it
        if self.device.type == "cuda":  # gloo's ends nothing
            self._group.abort()

    def _begin(self, values: torch.Tensor) -> "_Part":
        wire = self._codec.encode(values)  # `values` itself where the format changes nothing
        work = self._group.allreduce([wire])
        return _Part(values, wire, work, time.perf_counter_ns())

    def _end(self, part: "_Part", stage: int, count: int) -> Traffic:
        wait_for(part.work, self.device, lambda: self._error)
        total = part.wire.to(part.values.dtype)
        torch.div(total, count, out=part.values)
        # what a ring sends; the library does not say what it did
        share = 2 * (self._num_replicas - 1) / self._num_replicas
        num_bytes = round(share * part.wire.nbytes)
        moved = Moved(part.start_ns, time.perf_counter_ns(), num_bytes)
        return Traffic(stage, (self.replica + 1) % self._num_replicas, moved)


@dataclass(frozen=True, slots=True)
class _Part:
    values: torch.Tensor
    wire: torch.Tensor
    work: Any
    start_ns: int
