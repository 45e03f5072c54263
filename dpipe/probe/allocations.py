"""How many bytes tensors take, followed from allocation to release."""

import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class AllocatedBytes(TorchDispatchMode):
    """Inside, `now` is what the storages that operations have made take together, and `peak` the
    most it has been.

    A storage counts from the operation that returns it until its last tensor is gone, whatever
    keeps it: a variable, autograd's graph, a gradient. What a kernel uses and frees within one
    operation is not seen. Of this thread alone.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._storages: dict[int, weakref.ref[Any]] = {}  # by address

    def follow(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count tensors that were made outside, too."""
        for tensor in tensors:
            # By storage: the views of a tensor take its memory once.
            storage = tensor.untyped_storage()
            address = storage._cdata
            if address not in self._storages:
                size = storage.nbytes()
                self._storages[address] = self._watch(storage, address, size)
                self.now += size
        self.peak = max(self.peak, self.now)

    def take_peak(self) -> int:
        """The peak so far; from here on a new one is looked for."""
        peak = self.peak
        self.peak = self.now
        return peak

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        returned = func(*args, **(kwargs or {}))
        self.follow(leaf for leaf in tree_leaves(returned) if isinstance(leaf, torch.Tensor))
        return returned

    def _watch(
        self,
        storage: torch.UntypedStorage,
        address: int,
        size: int,
    ) -> weakref.ref[Any]:
        def release(_: object) -> None:
            del self._storages[address]
            self.now -= size

        return weakref.ref(storage, release)
