"""Parameters to compute with while the gradient that should have changed them is still on its way.

    agreed       w(t) --------- gradient t, the mean, a step late ---------> w(t + 1)
    step t + 1    `-- gradient t, of this replica alone --> computes here

With a step's delay gradient t + 1 would be taken at w(t), and momentum carries what it is wrong by
on and on: AdamW at (0.9, 0.95) is then as stable as it was at a thirtieth of the learning rate. A
replica's own gradient is here at once, and differs from the mean by noise alone, which ends with
the step: nothing of it is agreed on. (ACCO, Nabli et al. 2024, computes at an estimate of the next
parameters too; SpecTrain, Chen et al. 2018, predicts from momentum alone.)
"""

from collections.abc import Sequence

import torch

from dpipe.dataparallel.base import Moments
from dpipe.dataparallel.optimizer import Optimizer

# in a checkpoint; who finds no gradient of its own takes the mean
_OWN = "own_grad"
_MEAN = "delayed_grad"


class LookAhead:
    """Takes what `optimizer` steps a step ahead of the agreement, and back. `mark` tells the
    replicas' gradients apart in a checkpoint, where each has one of the same parameters.
    """

    def __init__(self, optimizer: Optimizer, mark: str = "") -> None:
        self._optimizer = optimizer
        self._mark = mark
        self._own: list[torch.Tensor] = []
        self._agreed: list[torch.Tensor] = []
        self._scale = 1.0
        self.factor = 1.0  # of the last step's gradient, which this one's is multiplied by as well

    def remember(self, own: Sequence[torch.Tensor | None], loss_scale: float) -> None:
        """This replica's gradients, one a slice of the optimizer's, times `loss_scale`."""
        slices = zip(self._optimizer.slices, own, strict=True)
        self._own = [torch.zeros_like(s.values) if g is None else g for s, g in slices]
        self._scale = loss_scale

    @torch.no_grad()
    def go(self, learning_rate: float) -> None:
        """Step by the gradients remembered until `come_back`; not by one that is not finite."""
        own = self._own
        self._own = []
        if (
            own
            and self._optimizer.learns
            and bool(torch.stack([g.sum() for g in own]).isfinite().all())
        ):
            self._agreed = [s.values.clone() for s in self._optimizer.slices]
            self._optimizer.look_ahead([gradient * self._share for gradient in own], learning_rate)

    @torch.no_grad()
    def come_back(self) -> None:
        """To what was agreed, if away from it."""
        if self._agreed:
            for s, agreed in zip(self._optimizer.slices, self._agreed, strict=True):
                s.values.copy_(agreed)
        self._agreed = []

    def state(self) -> dict[str, torch.Tensor]:
        """The gradients that are remembered, for a checkpoint."""
        names = [
            f"{s.name}.{_OWN}{self._optimizer.range_of(s)}{self._mark}"
            for s in self._optimizer.slices
        ]
        return (
            {n: g * self._share for n, g in zip(names, self._own, strict=True)} if self._own else {}
        )

    @property
    def _share(self) -> float:
        return self.factor / self._scale

    def restore(self, moments: Moments) -> None:
        """Take up this replica's gradients, or for want of them the mean that is still to come."""
        slices = self._optimizer.slices
        for key in (f"{_OWN}{self._mark}", _MEAN):
            if not self._own and all(f"{s.name}.{key}" in moments for s in slices):
                self.remember([s.cut(moments[f"{s.name}.{key}"]) for s in slices], 1.0)
