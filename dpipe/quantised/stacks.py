"""Stacks of matrices [experts, out, in] in 8 or 4 bits, in a module that computes with them in its
own way, such as the experts of a mixture.

    forward    the module finds each stack where it was, made anew; what its graph would keep of
               one, the whole or a part, is noted instead: which part of which stack
    backward   the stack is made again, and that part of it taken
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dpipe.quantised.matrix import QuantisedMatrix, computing_dtype


@dataclass(frozen=True)
class _Part:
    """Of a stack, where the graph would keep it."""

    stack: QuantisedMatrix
    dtype: torch.dtype
    shape: torch.Size
    strides: tuple[int, ...]
    offset: int

    def again(self) -> torch.Tensor:
        made = self.stack.matrix(self.dtype)
        return made.as_strided(self.shape, self.strides, self.offset)


class WithStacks(nn.Module):
    """Mixed into the class of a module whose stacks are quantised."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = computing_dtype(x)
        made = {}
        stacks = {}
        for name, part in self._modules.items():
            # An adapter of that stack has made it already.
            if isinstance(part, QuantisedMatrix) and name not in self._buffers:
                made[name] = part.matrix(dtype)
                storage = _storage(made[name])
                stacks[storage] = part
        with found(self, made), _unkept(stacks):
            return super().forward(x, *args, **kwargs)


@contextmanager
def found(module: nn.Module, made: dict[str, torch.Tensor]) -> Iterator[None]:
    """Inside, `module` finds the tensors of `made` under their names, where it has codes. Empties
    `made`, so that no more than the graph keeps is left.
    """
    names = list(made)
    module._buffers.update(made)
    made.clear()
    try:
        yield
    finally:
        for name in names:
            del module._buffers[name]


@contextmanager
def _unkept(stacks: Mapping[int, QuantisedMatrix]) -> Iterator[None]:
    """Inside, no graph keeps a tensor that lies in one of the storages of `stacks`."""
    # torch asks the innermost hooks alone; those around these count what is kept.
    outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
    outer_pack, outer_unpack = outer or (_same, _same)

    def pack(tensor: torch.Tensor) -> Any:
        storage = _storage(tensor)
        stack = stacks.get(storage)
        if stack is None:
            return outer_pack(tensor)
        return _Part(
            stack,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
        )

    def unpack(packed: Any) -> Any:
        if isinstance(packed, _Part):
            return packed.again()
        return outer_unpack(packed)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield


def _same(kept: Any) -> Any:
    return kept


def _storage(tensor: torch.Tensor) -> int:
    """Also of a tensor without values."""
    return int(tensor.untyped_storage()._cdata)
