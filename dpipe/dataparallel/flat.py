"""A stage's parameters as one row of fp32 numbers, and where each of them lies in it.

    row        [ layers.2.norm.weight | layers.2.qkv.weight ............ | layers.2.qkv.bias | layers.3 ... ]
    shards     [ replica 0's ........... | replica 1's ........... | replica 2's ........................... ]

Each replica owns one shard: it adds it up (`schedule/exchange.py` says in which parts), and may
hold its optimizer.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dpipe.dataparallel.base import NamedParameter


@dataclass(frozen=True)
class Segment:
    """Elements `start` to `stop` of parameter `index`, flattened, at `at` in the row."""

    index: int
    start: int
    stop: int
    at: int

    @property
    def here(self) -> slice:
        return slice(self.at, self.at + self.stop - self.start)


class FlatParameters:
    """The order of a stage's parameters in its row."""

    def __init__(self, named: Sequence[NamedParameter]) -> None:
        self.names = [name for name, _ in named]
        self.parameters = [parameter for _, parameter in named]
        sizes = [parameter.numel() for parameter in self.parameters]
        self._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        self.length = sum(sizes)

    def spans(self, piece: slice) -> Iterator[Segment]:
        """What of which parameter lies in `piece`, in order."""
        for index, (start, parameter) in enumerate(zip(self._starts, self.parameters, strict=True)):
            first = max(start, piece.start)
            last = min(start + parameter.numel(), piece.stop)
            if first < last:
                yield Segment(index, first - start, last - start, first)

    def view(self, row: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index` as it lies in `row`, in its shape."""
        start = self._starts[index]
        parameter = self.parameters[index]
        return row[start : start + parameter.numel()].view(parameter.shape)

    def gradients(self) -> list[torch.Tensor | None]:
        """The gradients as they are now; they stay reachable here when the stage forgets them."""
        return [parameter.grad for parameter in self.parameters]

    def fill(
        self, row: torch.Tensor, piece: slice, source: Sequence[torch.Tensor | None], factor: float
    ) -> None:
        """Put `piece` of the row together from `source` times `factor`; what is None is zero."""
        for span in self.spans(piece):
            tensor = source[span.index]
            out = row[span.here]
            if tensor is None:
                out.zero_()
            else:
                out.copy_(tensor.detach().reshape(-1)[span.start : span.stop])
        if factor != 1.0:
            row[piece].mul_(factor)


def parameter_slice(parameter: nn.Parameter, start: int, stop: int) -> nn.Parameter:
    """Elements of a parameter as a parameter of its own, in the same memory."""
    return nn.Parameter(parameter.detach().view(-1)[start:stop], requires_grad=True)
