"""What a rule of an optimizer is: the state that it keeps of a parameter, and a step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

State = dict[str, torch.Tensor]  # by torch's names, which are also those in checkpoints


@dataclass(frozen=True)
class ParameterUpdate:
    """What a step needs of one parameter, or of a part of it."""

    values: torch.Tensor
    gradient: torch.Tensor  # of the shape of `values`
    state: State
    count: torch.Tensor  # a scalar: the steps before, one higher after the step


def count_step(updates: Sequence[ParameterUpdate]) -> None:
    """For a rule whose function of torch does not count."""
    for update in updates:
        update.count.add_(1)


class UpdateRule(Protocol):
    """Steps parameters, each by its own gradient and state alone: any cut of the model gives the
    same bits.
    """

    def first_state(self, values: torch.Tensor, *, is_end: bool) -> State:
        """Before the first step of a parameter; `is_end` where its layer is the first or the last.

        What is in a checkpoint: the number of steps is not, which is the run's.
        """

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        """Change the values, states and counts of `updates` in place."""
