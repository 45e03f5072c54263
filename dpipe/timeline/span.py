"""`Span` and `Timeline`: when things happened, predicted or measured, in one type."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from dpipe.schedule.action import Action


class Lane(StrEnum):
    """Where on a rank a span lies. A SEND or RECV span is bytes moving; WAIT is a rank that has
    nothing to run; TENSOR is what a tensor-parallel group exchanges, most of it inside COMPUTE;
    BETWEEN is what a rank does between two steps: it writes its log, and reads data.
    """

    COMPUTE = "compute"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    UPDATE = "update"
    WAIT = "wait"
    TENSOR = "tensor"
    BETWEEN = "between"


class Span(NamedTuple):
    """`action` on `lane` of `rank` from `start_us` to `end_us`, microseconds since the step began.

    `cpu_us` is the processor time that a measured span took of its rank's own thread: less than its
    duration where ranks share cores. Of a TENSOR span it is that of the process's other threads,
    which exchange. A REDUCE span is one message of the exchange that its action stands
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
        return self._replace(
            start_us=self.start_us + by_us,
            end_us=self.end_us + by_us,
        )


@dataclass(frozen=True)
class Timeline:
    """The spans of one step on all ranks, of every replica of the pipeline, in no particular order.

    `period_us` is the steady time between such steps where it is known; it may be less than
    `duration_us` where steps overlap. A server that is not in a rank has spans behind the last
    rank, and is not counted.
    """

    num_ranks: int
    spans: tuple[Span, ...]
    num_replicas: int = 1
    tensor_size: int = 1  # ranks of a tensor-parallel group, numbered consecutively
    period_us: float | None = None

    @property
    def step_us(self) -> float:
        """The step time; of a step alone, how long it takes."""
        return self.duration_us if self.period_us is None else self.period_us

    @property
    def began_us(self) -> float:
        return min(
            (span.start_us for span in self.spans),
            default=0.0,
        )

    @property
    def duration_us(self) -> float:
        """From the first work of any rank to the last. A rank that has nothing to do before the
        step reaches it has not begun.
        """
        worked = [span for span in self.spans if span.lane is not Lane.WAIT]
        first_us = min((span.start_us for span in worked), default=0.0)
        last_us = max((span.end_us for span in self.spans), default=0.0)
        return last_us - first_us

    def on(self, rank: int, lane: Lane) -> tuple[Span, ...]:
        """The spans of one lane of one rank, by start."""
        spans = [span for span in self.spans if span.rank == rank and span.lane == lane]
        return tuple(sorted(spans, key=lambda span: span.start_us))
