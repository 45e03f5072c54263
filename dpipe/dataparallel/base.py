"""The contract of keeping the replicas of a stage in agreement."""

from collections.abc import Sequence
from typing import Protocol

import torch


class DataParallel(Protocol):
    """Both calls are actions of the schedule, so the traffic is on the same grid and in the same trace."""

    def start(self, stage: int, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The gradients of `stage` are final (REDUCE_GRAD): begin to average them over the replicas."""

    def finish(self, stage: int) -> None:
        """Block until every parameter's `.grad` is the average (STEP)."""
