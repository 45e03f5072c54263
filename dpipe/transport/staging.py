"""The way of a tensor between a device and the host memory that a network reads and writes.

    GPU      send stream     --[encode]--[copy to pinned memory]--*                       * a mark
    writer                                                        `--wait--[bytes out]
    reader      [bytes into pinned memory]--.
    GPU      receive stream                 `--[copy to the device]--*
    GPU      compute stream                                          `--wait--[1F5]

Pinned memory is torch's: what is freed serves the next tensor of that size, once the copies that use it are over.
On a CPU nothing is copied: a network reads and writes the tensors themselves.
"""

from threading import Lock

import torch

from dpipe.streams import Mark, Streams
from dpipe.wire.spec import TensorSpec

_SPARE_BYTES = 64 << 20


class Staging:
    """Safe from any thread."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._pinned = streams.device.type == "cuda"
        self._lock = Lock()
        self._spare: dict[TensorSpec, list[torch.Tensor]] = {}
        self._spare_bytes = 0

    def fetch(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Mark]:
        """Contiguous host memory that holds `tensor`, usable on the current stream, from the mark on."""
        tensor = tensor.detach()
        if tensor.device.type == "cpu":
            return tensor.contiguous(), None
        host = self.empty(TensorSpec.of(tensor))
        host.copy_(tensor, non_blocking=True)
        return host, self._streams.mark()

    def block(self, mark: Mark, timeout_s: float) -> None:
        """Wait for what `fetch` gave; raises `TimeoutError`."""
        if mark is not None:
            self._streams.block(mark, timeout_s)

    def empty(self, spec: TensorSpec) -> torch.Tensor:
        """Host memory for what arrives."""
        with self._lock:
            if spare := self._spare.get(spec):
                self._spare_bytes -= spec.num_bytes
                return spare.pop()
        return torch.empty(spec.shape, dtype=spec.dtype, pin_memory=self._pinned)

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
        """Copy what came in memory of `empty`, and has landed where there is a mark, to where it belongs."""
        into.copy_(arrived if mark is None else self.use(arrived, mark))
        if arrived.device.type == "cpu":
            self._keep(arrived)

    def _keep(self, host: torch.Tensor) -> None:
        """For the next `empty`: fresh pages cost as much as the bytes that fill them."""
        spec = TensorSpec.of(host)
        with self._lock:
            if self._spare_bytes + spec.num_bytes <= _SPARE_BYTES:
                self._spare.setdefault(spec, []).append(host)
                self._spare_bytes += spec.num_bytes
