"""Parameters to compute with while the gradient that should have changed them is still on its way.

    agreed       w(t) --------- gradient t, the mean, a step late ---------> w(t + 1)
    step t + 1    `-- gradient t, of this replica alone --> computes here

With a step's delay gradient t + 1 would be computed at w(t), and momentum accumulates the error:
AdamW at (0.9, 0.95) is then as stable as it was at a thirtieth of the learning rate. A replica's
own gradient is here at once, and differs from the mean by noise alone, which ends with the step:
none of it enters the agreed parameters. (ACCO, Nabli et al. 2024, computes at an estimate of the
next parameters too; SpecTrain, Chen et al. 2018, predicts from momentum alone.)
"""

from collections.abc import Sequence

import torch

from dpipe.dataparallel.base import Moments
from dpipe.dataparallel.optimizer import Optimizer

_OWN = "own_grad"  # in a checkpoint; a replica that finds no gradient of its own takes the mean
_MEAN = "delayed_grad"


class LookAhead:
    """Takes what `optimizer` steps a step ahead of the agreed parameters, and back.

    `mark` tells the replicas' gradients apart in a checkpoint, where each has one of the same
    parameters.
    """

    def __init__(self, optimizer: Optimizer, mark: str = "") -> None:
        # of the last step's gradient; this replica's own is multiplied by it as well
        self.factor = 1.0
        self._optimizer = optimizer
        self._mark = mark
        self._own: list[torch.Tensor] = []
        self._loss_scale = 1.0
        # the parameters to come back to; empty while they are in place
        self._agreed: list[torch.Tensor] = []

    def remember(self, own: Sequence[torch.Tensor | None], loss_scale: float) -> None:
        """This replica's gradients times `loss_scale`, one for each of the optimizer's slices."""
        self._own = []
        for s, gradient in zip(self._optimizer.slices, own, strict=True):
            kept = torch.zeros_like(s.values) if gradient is None else gradient
            self._own.append(kept)
        self._loss_scale = loss_scale

    @torch.no_grad()
    def go(self, learning_rate: float) -> None:
        """Step by the gradients remembered, until `come_back`; not if one is not finite."""
        own = self._own
        self._own = []
        if not own or not self._optimizer.learns:
            return
        # One wait for the device instead of one a parameter. If a finite gradient's sum overflows,
        # the step is computed at the agreed parameters.
        sums = torch.stack([gradient.sum() for gradient in own])
        if not bool(sums.isfinite().all()):
            return
        # Copied, not subtracted again later: that would not give back the same bits.
        self._agreed = [s.values.clone() for s in self._optimizer.slices]
        gradients = [gradient * self._scale for gradient in own]
        self._optimizer.look_ahead(gradients, learning_rate)

    @torch.no_grad()
    def come_back(self) -> None:
        """Restore the agreed parameters, if `go` has left them."""
        if self._agreed:
            slices = self._optimizer.slices
            for s, agreed in zip(slices, self._agreed, strict=True):
                s.values.copy_(agreed)
        self._agreed = []

    def state(self) -> dict[str, torch.Tensor]:
        """The gradients that are remembered, for a checkpoint."""
        state: dict[str, torch.Tensor] = {}
        if self._own:
            slices = self._optimizer.slices
            for s, gradient in zip(slices, self._own, strict=True):
                piece = self._optimizer.range_of(s)
                name = f"{s.name}.{_OWN}{piece}{self._mark}"
                state[name] = gradient * self._scale
        return state

    def restore(self, moments: Moments) -> None:
        """Take up this replica's gradients, or without them the mean that is still to come."""
        slices = self._optimizer.slices
        # The first that is there: this replica's own, if the run had as many replicas before.
        for key in (f"{_OWN}{self._mark}", _MEAN):
            names = [f"{s.name}.{key}" for s in slices]
            if not self._own and all(name in moments for name in names):
                pairs = zip(slices, names, strict=True)
                found = [s.cut(moments[name]) for s, name in pairs]
                self.remember(found, 1.0)

    @property
    def _scale(self) -> float:
        return self.factor / self._loss_scale
