"""SGD, Lion, Adafactor and Muon. Those of torch by the functions below its classes (see
`adamw.py`).
"""

from collections.abc import Sequence

import torch
from torch.optim._adafactor import adafactor
from torch.optim._muon import muon
from torch.optim.sgd import sgd

from dpipe.optimizers.adamw import AdamW
from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.optimizers.rule import ParameterUpdate, State, UpdateRule, count_step

_BUFFER = "momentum_buffer"
_SMALLEST = torch.finfo(torch.float32).eps  # as Adafactor's class has it for parameters in fp32


class Sgd(UpdateRule):
    """Stochastic gradient descent with momentum, as torch.optim.SGD has it without dampening; from
    a buffer of zeros, which is the same.
    """

    def __init__(self, momentum: float) -> None:
        self._momentum = momentum

    def first_state(self, values: torch.Tensor, *, is_end: bool = False) -> State:
        return {_BUFFER: torch.zeros_like(values)} if self._momentum else {}

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        sgd(
            [update.values for update in updates],
            [update.gradient for update in updates],
            [update.state.get(_BUFFER) for update in updates],
            # One tensor after another: all at once would hold a copy of each meanwhile.
            foreach=False,
            fused=False,
            weight_decay=weight_decay,
            momentum=self._momentum,
            lr=learning_rate,
            dampening=0.0,
            nesterov=False,
            maximize=False,
        )
        count_step(updates)


class Lion(UpdateRule):
    """The sign of a momentum (Chen et al. 2023): each value moves by the learning rate. A tenth of
    AdamW's, with ten times the decay, is where to begin.
    """

    def __init__(self, betas: tuple[float, float]) -> None:
        self._betas = betas

    def first_state(self, values: torch.Tensor, *, is_end: bool = False) -> State:
        return {"exp_avg": torch.zeros_like(values)}

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        first, second = self._betas
        for update in updates:
            average = update.state["exp_avg"]
            # Two rates: the direction follows the gradient closer than what is remembered does.
            direction = average.lerp(update.gradient, 1 - first).sign_()
            update.values.mul_(1 - learning_rate * weight_decay)
            update.values.add_(direction, alpha=-learning_rate)
            average.lerp_(update.gradient, 1 - second)
        count_step(updates)


class Adafactor(UpdateRule):
    """Second moments by row and column (Shazeer and Stern 2018), with torch's defaults: no first
    moment, so that betas have no effect.
    """

    def first_state(self, values: torch.Tensor, *, is_end: bool = False) -> State:
        if values.ndim < 2:
            return {"variance": torch.zeros_like(values)}
        *rest, rows, columns = values.shape
        return {
            "row_var": values.new_zeros(*rest, rows, 1),
            "col_var": values.new_zeros(*rest, 1, columns),
        }

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        adafactor(
            [update.values for update in updates],
            [update.gradient for update in updates],
            [update.state.get("row_var") for update in updates],
            [update.state.get("col_var") for update in updates],
            [update.state.get("variance") for update in updates],
            [update.count for update in updates],
            foreach=False,
            d=1.0,
            lr=learning_rate,
            beta2_decay=-0.8,
            weight_decay=weight_decay,
            eps1=_SMALLEST,
            eps2=1e-3,
            maximize=False,
        )


class Muon(UpdateRule):
    """Momentum made orthogonal (Jordan et al. 2024), for matrices between embedding and head; what
    else there is steps by AdamW. Scaled as Liu et al. (2025) do, for AdamW's learning rates.
    """

    def __init__(self, betas: tuple[float, float]) -> None:
        self._momentum = betas[0]
        self._adamw = AdamW(betas)

    def first_state(self, values: torch.Tensor, *, is_end: bool = False) -> State:
        # A row of an embedding or a head is a token's own: made orthogonal, rare ones would be
        # moved as far as common ones.
        if is_end or values.ndim != 2:
            return self._adamw.first_state(values)
        return {_BUFFER: torch.zeros_like(values)}

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        # By what they remember, so that a resumed run divides them in the same way.
        others = [update for update in updates if _BUFFER not in update.state]
        self._adamw.step(others, learning_rate=learning_rate, weight_decay=weight_decay)
        matrices = [update for update in updates if _BUFFER in update.state]
        muon(
            [update.values for update in matrices],
            [update.gradient for update in matrices],
            [update.state[_BUFFER] for update in matrices],
            foreach=False,
            lr=learning_rate,
            weight_decay=weight_decay,
            momentum=self._momentum,
            nesterov=True,
            ns_coefficients=(3.4445, -4.7750, 2.0315),
            ns_steps=5,
            eps=1e-7,
            adjust_lr_fn="match_rms_adamw",
            has_complex=False,
        )
        count_step(matrices)


def sgd_rule(settings: OptimizerSettings) -> Sgd:
    return Sgd(settings.betas[0])


def lion_rule(settings: OptimizerSettings) -> Lion:
    return Lion(settings.betas)


def adafactor_rule(settings: OptimizerSettings) -> Adafactor:
    return Adafactor()


def muon_rule(settings: OptimizerSettings) -> Muon:
    return Muon(settings.betas)
