"""AdamW (Loshchilov and Hutter 2019) on whole parameters, or on parts of them."""

from collections.abc import Sequence

import torch
from torch.optim.adamw import adamw

from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.optimizers.rule import ParameterUpdate, State, UpdateRule

_EPSILON = 1e-8  # torch's default


class AdamW(UpdateRule):
    """It calls the function below `torch.optim.AdamW`, with the same state to the last bit: the
    class imports torch._dynamo when it is made, which is a third of the time in which a rank
    starts.
    """

    def __init__(self, betas: tuple[float, float]) -> None:
        self._betas = betas

    def first_state(self, values: torch.Tensor, *, is_end: bool = False) -> State:
        return {"exp_avg": torch.zeros_like(values), "exp_avg_sq": torch.zeros_like(values)}

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        adamw(
            [update.values for update in updates],
            [update.gradient for update in updates],
            [update.state["exp_avg"] for update in updates],
            [update.state["exp_avg_sq"] for update in updates],
            [],  # no AMSGrad
            [update.count for update in updates],
            foreach=False,  # as the class has it on a CPU
            # One kernel for all parameters; on a CPU it would change the bits and gain nothing.
            fused=any(update.values.is_cuda for update in updates),
            amsgrad=False,
            beta1=self._betas[0],
            beta2=self._betas[1],
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=_EPSILON,
            maximize=False,
        )


def build(settings: OptimizerSettings) -> AdamW:
    return AdamW(settings.betas)


def adamw_step(
    values: torch.Tensor,
    gradient: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    num_updates: float,
    betas: tuple[float, float],
    learning_rate: float,
    weight_decay: float,
) -> None:
    """Step `values` and their moments in place, to the last bit as torch.optim.AdamW steps a whole
    parameter.
    """
    # Unfused steps count on the CPU, and those of one kernel where the values are.
    count = torch.tensor(num_updates, device=values.device if values.is_cuda else "cpu")
    moments = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    update = ParameterUpdate(values, gradient, moments, count)
    AdamW(betas).step([update], learning_rate=learning_rate, weight_decay=weight_decay)
