"""The pieces of a model's state that copies are kept of: its layers or, where several ranks have a
layer together, the part of each.

    tensor_parallel.size = 2       layer    0     1     2
                                   piece    0  1  2  3  4  5
                                   tp_rank  0  1  0  1  0  1

A piece keeps its number whatever stages the layers are cut into, because a layer has as many parts
as long as the run lasts.
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pieces:
    """Each layer has `num_parts`, in the order of the ranks that have them."""

    num_parts: int = 1

    def number(self, layer: int, part: int) -> int:
        return layer * self.num_parts + part

    def of(self, layers: Iterable[int], part: int) -> list[int]:
        return [self.number(layer, part) for layer in layers]

    def layer_of(self, piece: int) -> int:
        return piece // self.num_parts

    def name(self, piece: int) -> str:
        layer = f"layer {self.layer_of(piece)}"
        if self.num_parts == 1:
            return layer
        return f"part {piece % self.num_parts} of {layer}"


WHOLE_LAYERS = Pieces()
