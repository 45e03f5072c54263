"""A stage's parameters as one row of fp32 numbers, and where each of them lies in it.

    row        [ layers.2.norm.weight | layers.2.qkv.weight ............... | layers.2.qkv.bias | layers.3 ... ]
    shards     [ replica 0's .............. | replica 1's ............... | replica 2's .................. ]
    parts      [ 0 | 1 | 2 | 3              | 0 | 1 | 2 | 3               | 0 | 1 | 2 | 3                  ]

Each replica owns one shard. Part k of the exchange is the k-th piece of every shard: small enough that the parts of one
exchange follow each other through their phases, large enough that a message's fixed cost does not matter.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dpipe.dataparallel.base import Named


@dataclass(frozen=True)
class Span:
    """Elements `start` to `stop` of parameter `index`, flattened, at `at` in the row."""

    index: int
    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)


class Row:
    """The order of a stage's parameters in its row."""

    def __init__(self, named: Sequence[Named]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.length = sum(sizes)

    def spans(self, piece: slice) -> Iterator[Span]:
        """What of which parameter lies in `piece`, in order."""
        for index, (start, parameter) in enumerate(zip(self._starts, self.parameters, strict=True)):
            first, last = max(start, piece.start), min(start + parameter.numel(), piece.stop)
            if first < last:
                yield Span(index, first - start, last - start, first)

    def view(self, row: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index` as it lies in `row`, in its shape."""
        start, parameter = self._starts[index], self.parameters[index]
        return row[start : start + parameter.numel()].view(parameter.shape)

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients as they are now; they stay reachable here when the stage forgets them."""
        return [parameter.grad for parameter in self.parameters]

    def fill(self, row: torch.Tensor, piece: slice, source: Sequence[torch.Tensor | None], factor: float) -> None:
        """Put `piece` of the row together from `source` times `factor`; what is None is zero."""
        for span in self.spans(piece):
            tensor, out = source[span.index], row[span.here]
            if tensor is None:
                out.zero_()
            else:
                out.copy_(tensor.detach().reshape(-1)[span.start : span.stop])
        if factor != 1.0:
            row[piece].mul_(factor)


@dataclass(frozen=True)
class Pieces:
    """A row of `length` values cut for `num_replicas`, in parts of about `part_values` over all shards."""

    length: int
    num_replicas: int
    part_values: int

    @property
    def num_parts(self) -> int:
        return max(1, -(-self.length // self.part_values))

    def shard(self, owner: int) -> slice:
        return _share(0, self.length, owner, self.num_replicas)

    def piece(self, part: int, owner: int) -> slice:
        shard = self.shard(owner)
        return _share(shard.start, shard.stop, part, self.num_parts)


def _share(start: int, stop: int, index: int, count: int) -> slice:
    """The `index`-th of `count` nearly equal shares."""
    length = stop - start
    return slice(start + length * index // count, start + length * (index + 1) // count)


def parameter_slice(parameter: nn.Parameter, start: int, stop: int) -> nn.Parameter:
    """Elements of a parameter as a parameter of its own, in the same memory."""
    return nn.Parameter(parameter.detach().view(-1)[start:stop], requires_grad=True)
