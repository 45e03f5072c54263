"""The type of a step's data, cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """By micro-batch."""

    inputs: Sequence[tuple[torch.Tensor, ...]] = ()  # needed on the first stage's rank
    targets: Sequence[torch.Tensor] = ()  # needed on the last stage's rank
