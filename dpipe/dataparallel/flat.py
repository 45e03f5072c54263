"""A stage's parameters as one flat fp32 vector, and where each of them lies in it.

    vector     [ layers.2.norm.weight | layers.2.qkv.weight ....... | layers.2.qkv.bias | ... ]
    shards     [ replica 0's ....... | replica 1's ........ | replica 2's ................... ]

Each replica owns one shard: it averages that (`schedule/exchange.py` says in which parts), and may
hold the optimizer's state of it. Shards do not respect the borders of parameters.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dpipe.dataparallel.base import NamedParameter


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of parameter `index`, flattened, at `at` in the vector."""

    index: int
    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        """The segment in the vector."""
        return slice(self.at, self.at + self.stop - self.start)


class FlatParameters:
    """The layout of `named`, one behind the other, in a vector of `length` values."""

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        self.length = 0
        self._starts: list[int] = []  # where each parameter begins
        for parameter in self.parameters:
            self._starts.append(self.length)
            self.length += parameter.numel()

    def segments(self, piece: slice) -> Iterator[Segment]:
        """What of which parameter lies in `piece` of the vector, in order."""
        pairs = zip(self._starts, self.parameters, strict=True)
        for index, (start, parameter) in enumerate(pairs):
            first = max(start, piece.start)
            last = min(start + parameter.numel(), piece.stop)
            if first < last:
                yield Segment(index, first - start, last - start, first)

    def view(self, vector: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index` as it lies in `vector` [N], in its shape."""
        parameter = self.parameters[index]
        start = self._starts[index]
        stop = start + parameter.numel()
        return vector[start:stop].view(parameter.shape)

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients as they are now; they stay reachable when the stage drops them."""
        return [parameter.grad for parameter in self.parameters]

    def fill(
        self,
        vector: torch.Tensor,
        piece: slice,
        source: Sequence[torch.Tensor | None],
        factor: float,
    ) -> None:
        """Set `piece` of `vector` [N] to `source`, by parameter, times `factor`; None is zeros."""
        for segment in self.segments(piece):
            tensor = source[segment.index]
            out = vector[segment.here]
            if tensor is None:
                out.zero_()
            else:
                elements = tensor.detach().reshape(-1)
                out.copy_(elements[segment.start : segment.stop])
        if factor != 1.0:
            vector[piece].mul_(factor)


def parameter_slice(parameter: nn.Parameter, start: int, stop: int) -> nn.Parameter:
    """Elements of a parameter as a parameter of its own, in the same memory."""
    elements = parameter.detach().view(-1)[start:stop]
    return nn.Parameter(elements, requires_grad=True)
