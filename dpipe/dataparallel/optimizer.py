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
        self._adamw: torch.optim.AdamW | None = None
        if slices and settings is not None:
            self._adamw = _adamw(slices, settings, self._fused)

    @property
    def learns(self) -> bool:
        return self._adamw is not None

    def step(self, learning_rate: float) -> None:
        if self._adamw is not None:
            # Set, not scheduled: the rate is a function of the step, and a resumed run needs none
            # of its past.
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()

    @torch.no_grad()
    def look_ahead(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        """Move `values` as a step by these gradients would, and leave the moments as they are."""
        settings = self._settings
        assert settings is not None, "nothing learns here"
        for s, gradient in zip(self.slices, gradients, strict=True):
            state = self._state_of(s)
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
            state = self._state_of(s)
            if state:
                for key in _MOMENTS:
                    moments[f"{s.name}.{key}{self.range_of(s)}"] = state[key]
        return moments

    def restore(self, num_updates: int, moments: Moments) -> None:
        """After `num_updates` updates; `moments` holds those of whole parameters."""
        if not num_updates:
            return
        for s in self.slices:
            device = s.values.device
            state = self._state_of(s)
            # torch keeps it on the CPU, unless one kernel steps all parameters.
            state["step"] = torch.tensor(
                float(num_updates), device=device if self._fused else "cpu"
            )
            for key in _MOMENTS:
                state[key] = s.cut(moments[f"{s.name}.{key}"]).to(device, copy=True)

    @property
    def num_bytes(self) -> int:
        return sum(moment.nbytes for moment in self.state().values())

    def _state_of(self, s: Slice) -> dict[str, torch.Tensor]:
        """torch's, which a change changes; a new one where nothing is learned."""
        if self._adamw is None:
            return {}
        state: dict[str, torch.Tensor] = self._adamw.state[s.values]
        return state


def _adamw(slices: Sequence[Slice], settings: AdamSettings, fused: bool) -> torch.optim.AdamW:
    decaying = [s.values for s in slices if s.decays]
    others = [s.values for s in slices if not s.decays]
    groups = [
        {"params": decaying, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, fused=fused or None
    )


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
    adamw(
        [values],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],  # no AMSGrad
        [torch.tensor(num_updates)],
        foreach=False,  # as the class has it on a CPU
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=_EPSILON,
        maximize=False,
    )
