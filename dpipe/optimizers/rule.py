"""What a rule of an optimizer is: the state that it keeps of a parameter, and a step."""

from collections.abc import Sequence
from typing import Protocol

import torch

State = dict[str, torch.Tensor]  # by torch's names, which are also those in checkpoints
Tensors = Sequence[torch.Tensor]


class UpdateRule(Protocol):
    """Steps parameters, each by its own gradient and state alone: any cut of the model gives the
    same bits.
    """

    def first_state(self, values: torch.Tensor, *, is_end: bool) -> State:
        """Before the first step of a parameter; `is_end` where its layer is the first or the last.

        What is in a checkpoint: the number of steps is not, which is the run's.
        """

    def step(
        self,
        values: Tensors,
        gradients: Tensors,
        states: Sequence[State],
        counts: Tensors,
        *,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        """Change `values` and `states` in place. `counts` are the steps before, and end one
        higher.
        """
