"""An optimizer as somebody outside dpipe would add one: all of it is in this file. It moves each
value by its gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from dpipe.optimizers.kinds import OPTIMIZERS, OptimizerKind, OptimizerSettings
from dpipe.optimizers.rule import ParameterUpdate, State, UpdateRule

TOY = OptimizerKind("toy", builder=f"{__name__}:build", state_bytes=0, step_copies=1)


@contextmanager
def declared(**properties: object) -> Iterator[None]:
    OPTIMIZERS.add(replace(TOY, **properties))
    try:
        yield
    finally:
        OPTIMIZERS.remove(TOY.name)


class Toy(UpdateRule):
    def first_state(self, values: torch.Tensor, *, is_end: bool = False) -> State:
        return {}

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        for update in updates:
            update.values.sub_(update.gradient, alpha=learning_rate)


def build(settings: OptimizerSettings) -> Toy:
    return Toy()
