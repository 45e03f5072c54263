"""What a worker and a parameter server must agree on before either sends a byte: the layout of a
stage's parameters, and how they step.

    parameters  [ layers.2.norm.weight | layers.2.qkv.weight ......... | layers.2.qkv.bias | ... ]
    chunks      [ 0                 | 1                 | 2                 | 3               ]

The parameters of a stage lie one behind the other in a flat fp32 vector. A chunk of it is what one
message carries, and what is averaged, stepped and sent back by itself. Chunks do not respect the
borders of parameters.

The field names of these classes are in journals on disk and in messages.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Annotated

from pydantic import AfterValidator, Field

from dpipe.wire.format import FORMATS
from dpipe.wire.schema import Count, Finite, Schema, Text


def _known_format(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"no wire format is called {name!r:.100}")
    return name


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter. `counts` is false for a copy of a shared weight, which a norm counts
    elsewhere; `decays` says whether weight decay applies.
    """

    name: Text
    layer: Count
    num_values: Count
    decays: bool
    counts: bool = True


@dataclass(frozen=True)
class StepRule:
    """How a stage steps: AdamW's constants, who takes part, and the wire format."""

    ranks: tuple[Count, ...]  # by replica
    weight_decay: Finite
    betas: tuple[Finite, Finite]
    # of gradients, and of parameters unless they are stale
    wire: Annotated[str, AfterValidator(_known_format)] = "none"
    # steps that a worker may be ahead of the slowest; 0 keeps replicas equal after each step
    staleness: Count = 0

    @property
    def num_replicas(self) -> int:
        return len(self.ranks)

    @property
    def lossy_parameters(self) -> bool:
        """Rounded differences are sent. With staleness versions are skipped: whole values are."""
        return FORMATS.named(self.wire).lossy and self.staleness == 0


@dataclass(frozen=True)
class FlatSpec:
    """The layout of a stage's parameters in a flat vector of `length` values."""

    parameters: tuple[ParameterSpec, ...]
    chunk_values: Annotated[int, Field(ge=1, le=1 << 40)]

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Where each parameter begins."""
        sizes = [parameter.num_values for parameter in self.parameters]
        if not sizes:
            return ()
        return tuple(accumulate([0, *sizes[:-1]]))

    @cached_property
    def length(self) -> int:
        return sum(parameter.num_values for parameter in self.parameters)

    @property
    def num_chunks(self) -> int:
        """At least 1: an empty stage sends an empty chunk, by which the other end knows of it."""
        chunks = -(-self.length // self.chunk_values)
        return max(1, chunks)

    def chunk(self, index: int) -> slice:
        """The elements of a chunk; the last one may be short."""
        start = index * self.chunk_values
        stop = start + self.chunk_values
        return slice(start, min(self.length, stop))

    def pieces(self, part: slice) -> Iterator[tuple[int, slice]]:
        """The parameters that overlap `part`, in order: index, and elements of the flat vector."""
        pairs = zip(self.starts, self.parameters, strict=True)
        for index, (start, parameter) in enumerate(pairs):
            first = max(start, part.start)
            last = min(start + parameter.num_values, part.stop)
            if first < last:
                yield index, slice(first, last)

    def name_at(self, position: int) -> str:
        """The parameter that element `position` belongs to."""
        element = slice(position, position + 1)
        index, _ = next(self.pieces(element))
        return self.parameters[index].name

    def difference(self, other: "FlatSpec") -> str | None:
        """What `other` has first that differs, in words; None where they are equal."""
        num_parameters = len(self.parameters)
        if num_parameters != len(other.parameters):
            return f"{len(other.parameters)} parameters where {num_parameters} are known"
        for mine, theirs in zip(self.parameters, other.parameters, strict=True):
            if mine != theirs:
                return (
                    f"{theirs.name} of {theirs.num_values} values where {mine.name} of "
                    f"{mine.num_values} is known"
                )
        if self.chunk_values != other.chunk_values:
            return f"chunks of {other.chunk_values} values where {self.chunk_values} are known"
        return None


SPEC = Schema[FlatSpec](FlatSpec)
RULE = Schema[StepRule](StepRule)
