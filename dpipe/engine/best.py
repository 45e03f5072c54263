"""The lowest held-out loss of a run, and when to give up waiting for a lower one.

Every rank hears the same losses, so that all decide alike; a checkpoint has what is known here.
"""

import math
from collections.abc import Mapping
from typing import Any

from dpipe.errors import CheckpointError


class Best:
    """`patience` evaluations in a row without a lower loss are too many; None: none are."""

    def __init__(self, patience: int | None = None) -> None:
        self._patience = patience
        self.step: int | None = None
        self.loss = math.inf
        self.waited = 0  # evaluations since

    def hear(self, step: int, loss: float) -> bool:
        """Whether the loss before `step` is lower than all before it."""
        if loss < self.loss:
            self.step = step
            self.loss = loss
            self.waited = 0
            return True
        self.waited += 1
        return False

    @property
    def gives_up(self) -> bool:
        return self._patience is not None and self.waited >= self._patience

    def state(self) -> dict[str, Any]:
        """For a checkpoint; empty before the first evaluation, because JSON has no infinity."""
        if self.step is None:
            return {}
        return {"best_step": self.step, "best_loss": self.loss, "best_waited": self.waited}

    def restore(self, numbers: Mapping[str, Any]) -> None:
        """Raises `CheckpointError` for what no run writes. An older checkpoint knows of no best."""
        if "best_step" not in numbers:
            return
        counts = [numbers["best_step"], numbers.get("best_waited")]
        loss = numbers.get("best_loss")
        # `type`, not isinstance: True is an int too.
        are_counts = all(type(each) is int and 0 <= each < 1 << 53 for each in counts)
        if not (are_counts and type(loss) is float and math.isfinite(loss)):
            raise CheckpointError(f"the checkpoint's best loss is {loss!a:.60} at {counts!a:.60}")
        self.step, self.waited = counts
        self.loss = loss
