"""`PackedCodec`: a codec that writes the values of a tensor down together, as bytes.

tensor --> flat [N] --pack--> bytes ===> bytes --unpack--> flat [N] --> tensor
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from dpipe.wire.spec import TensorSpec

_CHUNK = 1 << 18  # values that are worked on at once by each thread: what a core's cache holds


class PackedCodec(ABC):
    """Tensors that are not floating-point are sent unchanged."""

    @abstractmethod
    def num_bytes(self, num_values: int) -> int:
        """On the wire, of so many values."""

    @abstractmethod
    def pack(self, flat: Tensor) -> Tensor:
        """Values [N] as uint8 [`num_bytes`]."""

    @abstractmethod
    def unpack(self, wire: Tensor, num_values: int) -> Tensor:
        """Values [N], of which the first `num_values` are those that were packed."""

    def encode(self, tensor: Tensor) -> Tensor:
        if not tensor.dtype.is_floating_point:
            return tensor.contiguous()
        return self.pack(tensor.detach().reshape(-1))

    def decode(self, wire: Tensor, like: TensorSpec) -> Tensor:
        if not like.dtype.is_floating_point:
            return wire
        flat = self.unpack(wire, like.num_values).view(-1)
        values = flat[: like.num_values]
        return values.view(like.shape).to(like.dtype)

    def wire_spec(self, like: TensorSpec) -> TensorSpec:
        if not like.dtype.is_floating_point:
            return like
        size = self.num_bytes(like.num_values)
        return TensorSpec((size,), torch.uint8)


def blocks_of(flat: Tensor, size: int) -> Tensor:
    """[blocks, `size`]; the last block is filled up with zeros."""
    missing = -flat.numel() % size
    return pad(flat, (0, missing)).view(-1, size)


def in_cache(blocks: Tensor) -> Iterator[slice]:
    """Parts of all blocks, so that a second operator finds in the cache what the first one made;
    on a GPU, where that brings nothing and each operator costs a launch, all at once.
    """
    size = len(blocks)
    if blocks.device.type == "cpu":
        values_at_once = torch.get_num_threads() * _CHUNK
        size = values_at_once // blocks.shape[1]
    size = max(1, size)
    for start in range(0, len(blocks), size):
        yield slice(start, start + size)
