"""A step's data, cut into micro-batches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Batch:
    """A step's data by micro-batch: inputs on the first stage's rank, targets on the last's,
    nothing elsewhere.
    """

    inputs: Sequence[tuple[torch.Tensor, ...]] = ()
    targets: Sequence[torch.Tensor] = ()
