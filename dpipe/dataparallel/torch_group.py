"""A `torch.distributed` group between the replicas of a stage: gloo on CPU, NCCL between GPUs.

For networks on which those are at home (NVLink, InfiniBand, a rack). Replicas stay equal to the
last bit and a run repeats itself, but the order of the sum is the library's: not the bits of
`exchange.DirectExchange`. From three replicas on it differs along a row, and so do the last bits of
what the two copies of a tied weight step by. In fp32 that is left so: both step by one sum, which
does not feed on how far they are apart, and weight decay draws them together. They were 4e-8 apart,
relative, after 12 steps and 8e-8 after 400. In bf16 it was 1e4 times as much: the configuration
refuses it.

    GPU   compute stream   --[3B7]--.--[2B7]------------[1B7]--        goes on: nothing on it waits for the exchange
    GPU   its own stream            `--wait--[row][all-reduce][mean]--*   for which this thread waits, and nobody else
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch

from dpipe.dataparallel.background import Ready
from dpipe.dataparallel.base import Traffic
from dpipe.errors import PeerLost
from dpipe.streams import Streams, streams_of
from dpipe.wire.codec import codec
from dpipe.wire.collective import open_group
from dpipe.wire.transfer import Moved

_AHEAD = 8  # parts under way at once


class TorchGroup:
    """One replica's end. `store` is where the ends meet, `host` the address that this one talks
    from (gloo).
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
        self._group: Any = open_group(
            store, replica, num_replicas, host=host, device=self.device, timeout_s=timeout_s
        )

    def average(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        """Replace `row` [N] by its mean over replicas; raises `PeerLost` where another replica is
        gone.

        Behind what is queued on the current stream, on one of its own; it is over on the device
        when this returns.
        """
        made = self._streams.mark()
        try:
            with self._streams.receiving():
                self._streams.wait(made)
                traffic = self._average(row, stage, ready)
                self._streams.block(self._streams.mark(), self._timeout_s)
        except (
            RuntimeError,
            TimeoutError,
        ) as error:  # the only kinds that torch and streams raise here
            raise PeerLost(
                f"replica {self.replica} lost the torch.distributed group of the "
                f"{self._num_replicas} replicas of "
                f"stage {stage}: {error}"
            ) from error
        return traffic

    def _average(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]:
        parts = [
            slice(start, start + self._part_values)
            for start in range(0, row.numel(), self._part_values)
        ]
        under_way: deque[_Part] = deque()
        traffic: list[Traffic] = []
        for piece in parts:
            ready(slice(piece.start, min(piece.stop, row.numel())))
            under_way.append(self._begin(row[piece]))
            if len(under_way) > _AHEAD:
                traffic.append(self._end(under_way.popleft(), stage))
        return traffic + [self._end(part, stage) for part in under_way]

    def fail(self, error: Exception) -> None:
        """End what is under way here; the other replicas lose this one."""
        self._group.abort()

    def _begin(self, values: torch.Tensor) -> "_Part":
        wire = self._codec.encode(values)  # `values` itself where the format changes nothing
        return _Part(values, wire, self._group.allreduce([wire]), time.perf_counter_ns())

    def _end(self, part: "_Part", stage: int) -> Traffic:
        part.work.wait()
        torch.div(part.wire.to(part.values.dtype), self._num_replicas, out=part.values)
        share = 2 * (self._num_replicas - 1) / self._num_replicas
        moved = Moved(part.start_ns, time.perf_counter_ns(), round(share * part.wire.nbytes))
        return Traffic(stage, (self.replica + 1) % self._num_replicas, moved)


@dataclass(frozen=True, slots=True)
class _Part:
    values: torch.Tensor
    wire: torch.Tensor
    work: Any
    start_ns: int
