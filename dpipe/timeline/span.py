"""`Span` and `Timeline`: when things happened, predicted or measured, in one type."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dpipe.schedule.action import Action


class Lane(StrEnum):
    """Where on a rank a span lies. A SEND or RECV span is bytes moving; WAIT is a rank that has
    nothing to run.

    TENSOR is what the ranks that hold a stage together exchange, most of it inside COMPUTE.
    """

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    UPDATE = "update"
    WAIT = "wait"
    TENSOR = "tensor"


class Span(NamedTuple):
    """`action` on `lane` of `rank` from `start_us` to `end_us`, microseconds since the step began.

    `cpu_us` is the processor time that a measured span of compute took: less than its duration
    where ranks share cores. A REDUCE span is one message of the exchange that its action stands
    for, to `peer`: a rank, or a server by its name.
    """

    rank: int
    lane: Lane
    action: Action
    start_us: float
    end_us: float
    num_bytes: int = 0
    cpu_us: float = 0.0
    peer: int | str | None = None

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    def later(self, by_us: float) -> "Span":
        """The same on a clock that is `by_us` ahead."""
        return self._replace(start_us=self.start_us + by_us, end_us=self.end_us + by_us)


@dataclass(frozen=True)
class Timeline:
    """The spans of one step on all ranks, of every replica of the pipeline, in no particular order.

    A server that is not in a rank has spans behind the last rank, and is not counted.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    num_replicas: int = 1
    tensor_size: int = 1  # ranks that hold a stage together, one behind the other

    @property
    def duration_us(self) -> float:
        return max((s.end_us for s in self.spans), default=0.0) - min(
            (s.start_us for s in self.spans), default=0.0
        )

    def on(self, rank: int, lane: Lane) -> tuple[Span, ...]:
        """The spans of one lane of one rank, by start."""
        return tuple(
            sorted(
                (s for s in self.spans if s.rank == rank and s.lane == lane),
                key=lambda s: s.start_us,
            )
        )
