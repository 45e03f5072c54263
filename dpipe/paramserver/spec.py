"""What a worker and a parameter server must agree on before either counts a byte: a stage's row,
and how it steps.

    row      [ layers.2.norm.weight | layers.2.qkv.weight ........................ | layers.2.qkv.bias | layers.3 ... ]
    chunks   [ 0                      | 1                      | 2                      | 3            ]

A stage's parameters lie one behind the other in a row of fp32 numbers. A chunk is what one message
carries, and what is summed, stepped and sent back by itself.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from dpipe.wire.format import FORMATS


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter in the row. `counts` is false for the copy of a shared weight, which no norm
    counts twice.
    """

    name: str
    layer: int
    num_values: int
    decays: bool
    counts: bool = True


@dataclass(frozen=True)
class StepRule:
    """How a stage steps: AdamW's constants, who takes part, what gradients and parameters look like
    on the wire.

    `ranks` are those of the replicas, in order. `staleness` is how many steps a worker may be ahead
    of the slowest; 0 keeps replicas equal after each step.
    """

    ranks: tuple[int, ...]
    weight_decay: float
    betas: tuple[float, float]
    wire: str = "none"
    staleness: int = 0

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """From what `dataclasses.asdict` made, perhaps by way of JSON."""
        return cls(**{**told, "ranks": tuple(told["ranks"]), "betas": tuple(told["betas"])})

    @property
    def num_replicas(self) -> int:
        return len(self.ranks)

    @property
    def lossy_parameters(self) -> bool:
        """Parameters go out as rounded differences. A worker that skips versions needs them whole
        instead.
        """
        return FORMATS.named(self.wire).lossy and self.staleness == 0


@dataclass(frozen=True)
class FlatSpec:
    parameters: tuple[ParameterSpec, ...]
    chunk_values: int

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Self:
        """From what `dataclasses.asdict` made, perhaps by way of JSON."""
        return cls(
            tuple(ParameterSpec(**parameter) for parameter in told["parameters"]),
            told["chunk_values"],
        )

    @cached_property
    def starts(self) -> tuple[int, ...]:
        sizes = [parameter.num_values for parameter in self.parameters]
        return tuple(sum(sizes[:index]) for index in range(len(sizes)))

    @cached_property
    def length(self) -> int:
        return sum(parameter.num_values for parameter in self.parameters)

    @property
    def num_chunks(self) -> int:
        """One at least: also a row without values is spoken of, so that the other end knows that it
        has come.
        """
        return max(1, -(-self.length // self.chunk_values))

    def chunk(self, index: int) -> slice:
        return slice(index * self.chunk_values, min(self.length, (index + 1) * self.chunk_values))

    def pieces(self, part: slice) -> Iterator[tuple[int, slice]]:
        """Which parameter lies where in `part` of the row, in order: its index and elements of the
        row.
        """
        for index, (start, parameter) in enumerate(zip(self.starts, self.parameters, strict=True)):
            first = max(start, part.start)
            last = min(start + parameter.num_values, part.stop)
            if first < last:
                yield index, slice(first, last)

    def name_at(self, position: int) -> str:
        """The parameter that element `position` of the row belongs to."""
        (index, _) = next(self.pieces(slice(position, position + 1)))
        return self.parameters[index].name

    def difference(self, other: "FlatSpec") -> str | None:
        """The first thing in which another row differs; None for an equal one."""
        if len(self.parameters) != len(other.parameters):
            return f"{len(other.parameters)} parameters where {len(self.parameters)} are known"
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if mine != theirs:
                return f"{theirs.name} of {theirs.num_values} values where {mine.name} of {mine.num_values} is known"
        if self.chunk_values != other.chunk_values:
            return f"chunks of {other.chunk_values} values where {self.chunk_values} are known"
        return None
