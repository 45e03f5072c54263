"""The pieces of a model's state that copies are kept of: its layers or, where several ranks have a
layer together, the part of each.

parts of a layer          where
1                         a rank has all of it, and its replicas have the same
tensor_parallel.size      the ranks of a group have a part each, and go on from that
replicas times as many    replicas differ: each keeps its part of a checkpoint, and goes on from
                          those of all of them

    tensor_parallel.size = 2       layer    0     1     2
                                   piece    0  1  2  3  4  5
                                   tp_rank  0  1  0  1  0  1

A piece keeps its number whatever stages the layers are cut into, because a layer has as many parts
as long as the run lasts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpipe.ranks import ParallelRanks


@dataclass(frozen=True)
class Pieces:
    """Each layer has `num_parts`, in the order of the ranks that have them."""

    num_parts: int = 1

    def number(self, layer: int, part: int) -> int:
        return layer * self.num_parts + part

    def of(self, layers: Iterable[int], part: int) -> list[int]:
        return [self.number(layer, part) for layer in layers]

    def part_of(self, here: ParallelRanks) -> int:
        """Which part of its layers that rank keeps."""
        num_keeping = self.num_parts // here.tp_size
        return here.dp_rank % num_keeping * here.tp_size + here.tp_rank

    def kept_by(self, here: ParallelRanks, layers: Iterable[int]) -> list[int]:
        """Those that a rank with these layers takes copies of."""
        return self.of(layers, self.part_of(here))

    def needed_by(self, here: ParallelRanks, layers: Sequence[int]) -> list[int]:
        """Those that it goes on from."""
        needed = []
        for part in range(here.tp_rank, self.num_parts, here.tp_size):
            needed += self.of(layers, part)
        return needed

    def layer_of(self, piece: int) -> int:
        return piece // self.num_parts

    def name(self, piece: int) -> str:
        layer = f"layer {self.layer_of(piece)}"
        if self.num_parts == 1:
            return layer
        return f"part {piece % self.num_parts} of {layer}"


WHOLE_LAYERS = Pieces()
