"""AdamW (Loshchilov and Hutter 2019) on whole parameters, or on one replica's slices of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.adamw import adamw

from dpipe.dataparallel.base import Layers, Moments, NamedParameter

_MOMENTS = ("exp_avg", "exp_avg_sq")  # torch's names, also in checkpoints
_EPSILON = 1e-8  # torch's default


@dataclass(frozen=True)
class AdamSettings:
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]


@dataclass(frozen=True)
class Slice:
    """Elements `start` to `stop` of the flattened parameter `name`; `values` shares its memory.

    `decays` says whether weight decay applies: to matrices, not to norms, biases and other vectors.
    """

    name: str
    start: int
    stop: int
    values: nn.Parameter
    decays: bool

    @property
    def range(self) -> str:
        return f"[{self.start}:{self.stop}]"

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of `whole`, which is as large as the parameter."""
        return whole.reshape(-1)[self.start : self.stop].view_as(self.values)


class Optimizer:
    """AdamW of one stage, or of the part of it that is here. Steps by `values.grad` of each slice.

    Without `settings` no step changes anything: a replayed stage has bytes to exchange, and
    nothing to learn.

    It calls the function below `torch.optim.AdamW`, with the same state to the last bit: the class
    imports torch._dynamo when it is made, which is a third of the time in which a rank starts.
    """

    def __init__(
        self,
        slices: Sequence[Slice],
        settings: AdamSettings | None,
        *,
        whole: bool,
    ) -> None:
        self.slices = slices
        self._whole = whole
        self._settings = settings
        # One kernel for all parameters; on a CPU it would change the bits and gain nothing.
        self._fused = bool(slices) and slices[0].values.is_cuda
        # By `values`: "step" and the moments, from the first update on.
        self._states: dict[nn.Parameter, dict[str, torch.Tensor]] = {}

    @property
    def learns(self) -> bool:
        return bool(self.slices) and self._settings is not None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        # The rate is given, not scheduled: it is a function of the step, and a resumed run needs
        # none of its past.
        if self._settings is None:
            return
        # torch's class would have two groups of parameters, because the decay is one a call.
        for decays in (True, False):
            with_gradient = [
                s.values for s in self.slices if s.decays == decays and s.values.grad is not None
            ]
            states = [self._state_for_step(values) for values in with_gradient]
            _adamw(
                with_gradient,
                [values.grad for values in with_gradient if values.grad is not None],
                states,
                self._settings.betas,
                learning_rate,
                self._settings.weight_decay if decays else 0.0,
                fused=self._fused,
            )

    @torch.no_grad()
    def look_ahead(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        """Move `values` as a step by these gradients would, and leave the moments as they are."""
        settings = self._settings
        assert settings is not None, "nothing learns here"
        for s, gradient in zip(self.slices, gradients, strict=True):
            state = self._states.get(s.values)
            if state:
                num_updates = float(state["step"])
                exp_avg = state["exp_avg"].clone()
                exp_avg_sq = state["exp_avg_sq"].clone()
            else:
                num_updates = 0.0
                exp_avg = torch.zeros_like(s.values)
                exp_avg_sq = torch.zeros_like(s.values)
            adamw_step(
                s.values,
                gradient.to(s.values),
                exp_avg,
                exp_avg_sq,
                num_updates,
                settings.betas,
                learning_rate,
                settings.weight_decay if s.decays else 0.0,
            )

    def range_of(self, s: Slice) -> str:
        """How a name in a checkpoint ends for `s`."""
        return "" if self._whole else s.range

    def state(self) -> dict[str, torch.Tensor]:
        """The moments by name; none before the first update."""
        moments = {}
        for s in self.slices:
            state = self._states.get(s.values)
            if state:
                for key in _MOMENTS:
                    moments[f"{s.name}.{key}{self.range_of(s)}"] = state[key]
        return moments

    def restore(self, num_updates: int, moments: Moments) -> None:
        """After `num_updates` updates; `moments` holds those of whole parameters."""
        if not (num_updates and self.learns):
            return
        for s in self.slices:
            # Copies: the caller's moments are a whole checkpoint's, which is freed.
            state = {"step": self._step_count(num_updates, s.values)}
            for key in _MOMENTS:
                moment = s.cut(moments[f"{s.name}.{key}"])
                state[key] = moment.to(s.values.device, copy=True)
            self._states[s.values] = state

    @property
    def num_bytes(self) -> int:
        return sum(moment.nbytes for moment in self.state().values())

    def _state_for_step(self, values: nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of `values`, which a step changes; zeros before the first."""
        if values not in self._states:
            # Not before the first step: a checkpoint of none has no moments, and a resumed run
            # restores them.
            self._states[values] = {
                "step": self._step_count(0, values),
                "exp_avg": torch.zeros_like(values),
                "exp_avg_sq": torch.zeros_like(values),
            }
        return self._states[values]

    def _step_count(self, num_updates: int, values: nn.Parameter) -> torch.Tensor:
        """On the CPU, unless one kernel steps all parameters."""
        return torch.tensor(float(num_updates), device=values.device if self._fused else "cpu")


def whole(named: Iterable[NamedParameter]) -> list[Slice]:
    """Each parameter as one slice."""
    return [Slice(name, 0, p.numel(), p, p.ndim >= 2) for name, p in named]


def trained(stage: Layers) -> list[NamedParameter]:
    """The parameters of a stage that require gradients, in order."""
    pairs = []
    for named in stage.layer_parameters().values():
        pairs += [pair for pair in named if pair[1].requires_grad]
    return pairs


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
    # torch's function, not its class, which keeps the moments itself: here they are the caller's.
    state = {
        "step": torch.tensor(num_updates),
        "exp_avg": exp_avg,
        "exp_avg_sq": exp_avg_sq,
    }
    _adamw([values], [gradient], [state], betas, learning_rate, weight_decay, fused=False)


def _adamw(
    values: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    states: Sequence[dict[str, torch.Tensor]],
    betas: tuple[float, float],
    learning_rate: float,
    weight_decay: float,
    *,
    fused: bool,
) -> None:
    adamw(
        list(values),
        list(gradients),
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],  # no AMSGrad
        [state["step"] for state in states],
        foreach=False,  # as the class has it on a CPU
        fused=fused,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=_EPSILON,
        maximize=False,
    )
