"""The way of a tensor between a device and the host memory that sockets read and write.

    GPU      send stream     --[encode]--[copy to pinned memory]--*                       * a mark
    writer                                                        `--wait--[bytes out]
    reader      [bytes into pinned memory]--.
    GPU      receive stream                 `--[copy to the device]--*
    GPU      compute stream                                          `--wait--[1F5]

Pinned memory comes from torch's allocator, which reuses it once the copies that use it are over. On
a CPU nothing is copied: sockets read and write the tensors themselves, and large memory is reused
here.
"""

import weakref
from collections import deque

import torch

from dpipe.streams import Mark, Streams
from dpipe.wire.spec import TensorSpec

_SPARE_BYTES = 64 << 20  # kept for reuse, of each size; at least one tensor
# From here on malloc takes memory from the system and returns it, each time.
_LARGE_BYTES = 128 << 10


class Staging:
    """All methods may be called from any thread."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pinned = streams.device.type == "cuda"
        self._spare: dict[int, deque[torch.Tensor]] = {}  # by size

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Contiguous host memory that holds `tensor` from the mark on, or at once if None."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.contiguous(), None
        host = self.empty(TensorSpec.of(tensor))
        host.copy_(tensor, non_blocking=True)
        return host, self._streams.mark()

    def done(self, mark: Mark) -> bool:
        """Whether the device has reached the mark of a `fetch`."""
        return mark is None or self._streams.done(mark)

    def block(self, mark: Mark, timeout_s: float) -> None:
        """Wait for the mark of a `fetch`; raises `TimeoutError`."""
        if mark is not None:
            self._streams.block(mark, timeout_s)

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Host memory for a tensor that arrives."""
        if self._pinned or spec.num_bytes < _LARGE_BYTES:
            return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._pinned)
        lent = self._lend(spec.num_bytes)
        return lent.view(spec.dtype).view(spec.shape)

    def land(self, host: torch.Tensor) -> torch.Tensor:
        """A tensor that has arrived, on the device, for the current stream."""
        with self._streams.receiving():
            there = host.to(self._streams.device, non_blocking=True)
            landed = self._streams.mark()
        self._streams.wait(landed)
        self._streams.keep(there)
        return there

    def _lend(self, num_bytes: int) -> torch.Tensor:
        """Memory that comes back here when the last tensor that shares it is freed: to fault in
        fresh pages costs as much as to copy them.
        """
        most = max(1, _SPARE_BYTES // num_bytes)
        # A deque needs no lock: a tensor is freed in any thread, at any time.
        spare = self._spare.setdefault(num_bytes, deque(maxlen=most))
        try:
            memory = spare.pop()
        except IndexError:
            memory = torch.empty(num_bytes, dtype=torch.uint8)
        # numpy's object, which the returned tensor and all that share its memory hold: a tensor's
        # own Python object may go before them.
        lent = memory.numpy().view()
        weakref.finalize(lent, spare.append, memory).atexit = False
        return torch.from_numpy(lent)
