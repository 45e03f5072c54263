"""What a rank says at the end of a step: its ballot, checked before it is counted."""

import math
from typing import Annotated

from pydantic import AfterValidator, Field

from dpipe.wire.schema import Finite, Schema, Shape, Text

# The norm of fp32 gradients of 10^15 parameters is at most 1e46. Sums of more than its square would
# overflow, and the gradient be taken for one that is not finite.
_LARGEST_SQUARE = 1e100


def _possible(square: float) -> float:
    """Inf and NaN pass: a gradient may overflow, and the count names it."""
    if square < 0:
        raise ValueError("the square of a norm is negative")
    if _LARGEST_SQUARE < square < math.inf:
        raise ValueError("no gradient has so large a norm")
    return square


Square = Annotated[float, AfterValidator(_possible)]
Layer = Annotated[int, Field(ge=0)]
Batches = Annotated[list[float], Field(max_length=100_000)]


class RankReport(Shape):
    """What a rank says of itself, for the metrics. A rank that says nothing reports zeros."""

    step_s: Finite = 0.0  # of its step, until it votes
    bubble: Finite = 0.0
    mb_per_s: dict[Text, Finite] = Field(default_factory=dict)  # by link, such as "0->1"
    memory_mb: Finite = 0.0
    optimizer_mb: Finite = 0.0
    gpu_memory_mb: Finite | None = None
    gpu_use_percent: Finite | None = None
    guarded: Annotated[int, Field(ge=0)] | None = None  # a step, as `Job.guarded` says


class Ballot(Shape):
    loss: float | None  # of the ranks that compute one
    norms: dict[Layer, Square]  # squared, by layer
    bad: Text | None  # the first parameter whose gradient is not finite
    stop: bool  # a wish to end the run
    report: RankReport


class Scores(Shape):
    """Of each held-out batch; empty from a rank that has nothing to report."""

    losses: Batches
    accuracies: Batches  # empty too where the model measures none


BALLOT = Schema[Ballot](Ballot)
SCORES = Schema[Scores](Scores)
