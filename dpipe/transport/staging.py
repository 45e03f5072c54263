"""The way of a tensor between a device and the host memory that a network reads and writes.

    GPU      send stream     --[encode]--[copy to pinned memory]--*                       * a mark
    writer                                                        `--wait--[bytes out]
    reader      [bytes into pinned memory]--.
    GPU      receive stream                 `--[copy to the device]--*
    GPU      compute stream                                          `--wait--[1F5]

Pinned memory is torch's: what is freed serves the next tensor of that size, once the copies that
use it are over. On a CPU nothing is copied: a network reads and writes the tensors themselves. What
is freed serves the next one too.
"""

import weakref
from collections import deque

import torch

from dpipe.streams import Mark, Streams
from dpipe.wire.spec import TensorSpec

_SPARE_BYTES = 64 << 20  # of one size that are kept, or one tensor where that is larger
_LARGE_BYTES = 128 << 10  # what malloc takes from the system, and gives back, each time


class Staging:
    """Safe from any thread."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pinned = streams.device.type == "cuda"
        self._spare: dict[int, deque[torch.Tensor]] = {}  # by size

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Contiguous host memory that holds `tensor`, usable on the current stream, from the mark
        on.
        """
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.contiguous(), None
        host = self.empty(TensorSpec.of(tensor))
        host.copy_(tensor, non_blocking=True)
        return host, self._streams.mark()

    def done(self, mark: Mark) -> bool:
        """Whether what `fetch` gave is there."""
        return mark is None or self._streams.done(mark)

    def block(self, mark: Mark, timeout_s: float) -> None:
        """Wait for what `fetch` gave; raises `TimeoutError`."""
        if mark is not None:
            self._streams.block(mark, timeout_s)

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Host memory for what arrives."""
        if self._pinned or spec.num_bytes < _LARGE_BYTES:
            return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._pinned)
        return self._lend(spec.num_bytes).view(spec.dtype).view(spec.shape)

    def land(self, host: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """What has arrived, on the device from the mark on."""
        with self._streams.receiving():
            return host.to(self._streams.device, non_blocking=True), self._streams.mark()

    def use(self, landed: torch.Tensor, mark: Mark) -> torch.Tensor:
        """What `land` gave, for the current stream."""
        self._streams.wait(mark)
        self._streams.keep(landed)
        return landed

    def move(self, arrived: torch.Tensor, mark: Mark, into: torch.Tensor) -> None:
        """Copy what came in memory of `empty`, and has landed where there is a mark, to where it
        belongs.
        """
        into.copy_(arrived if mark is None else self.use(arrived, mark))

    def _lend(self, num_bytes: int) -> torch.Tensor:
        """Memory that comes back when the last tensor that sees it is gone: fresh pages cost as
        much as their bytes.
        """
        most = max(1, _SPARE_BYTES // num_bytes)
        spare = self._spare.setdefault(
            num_bytes, deque(maxlen=most)
        )  # without a lock: any thread frees, at any time
        try:
            memory = spare.pop()
        except IndexError:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        lent = memory.numpy().view()
        weakref.finalize(lent, spare.append, memory).atexit = False
        return torch.from_numpy(lent)
