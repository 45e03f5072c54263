"""The type of a step's data, cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """By micro-batch."""

    inputs: Sequence[tuple[torch.Tensor, ...]] = ()  # needed on the first stage's rank
    targets: Sequence[torch.Tensor] = ()  # needed on the last stage's rank
    samples: Sequence[Sequence[int]] = ()  # of each row, where links go by them


def micro_batches(
    whole: torch.Tensor, replica: int, num_replicas: int, count: int
) -> tuple[torch.Tensor, ...]:
    """A replica's share of the one batch, in `count` parts of one size."""
    own = whole.chunk(num_replicas)[replica]
    return own.chunk(count)
