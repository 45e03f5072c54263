"""AdamW (Loshchilov and Hutter 2019) on whole parameters, or on the slices of them that one replica
owns.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim.adamw import adamw

from dpipe.dataparallel.base import Layers, Moments, NamedParameter

_MOMENTS = ("exp_avg", "exp_avg_sq")
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

    Without `settings` nothing is learned: a replayed stage has bytes to exchange, and no
    arithmetic.
    """

    def __init__(
        self, slices: Sequence[Slice], settings: AdamSettings | None, *, whole: bool
    ) -> None:
        self.slices = slices
        self._whole = whole
        self._settings = settings
        # One kernel for all parameters; on a CPU it would change the bits, and there is nothing to
        # gain.
        self._fused = bool(slices) and slices[0].values.is_cuda
        self._adamw = (
            _adamw(slices, settings, self._fused) if slices and settings is not None else None
        )

    @property
    def learns(self) -> bool:
        return self._adamw is not None

    def step(self, learning_rate: float) -> None:
        if self._adamw is not None:
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
            decay = settings.weight_decay if s.decays else 0.0
            avg, avg_sq = (
                state[key].clone() if state else torch.zeros_like(s.values) for key in _MOMENTS
            )
            updates = float(state["step"]) if state else 0.0
            gradient = gradient.to(s.values)
            adamw_step(
                s.values, gradient, avg, avg_sq, updates, settings.betas, learning_rate, decay
            )

    def range_of(self, s: Slice) -> str:
        """What a name in a checkpoint ends in for `s`."""
        return "" if self._whole else s.range

    def state(self) -> dict[str, torch.Tensor]:
        """The moments by name; none before the first update."""
        return {
            f"{s.name}.{key}{self.range_of(s)}": self._state_of(s)[key]
            for s in self.slices
            for key in _MOMENTS
            if key in self._state_of(s)
        }

    def restore(self, num_updates: int, moments: Moments) -> None:
        for s in self.slices if num_updates else ():
            self._state_of(s).update(
                {
                    "step": torch.tensor(
                        float(num_updates), device=s.values.device if self._fused else "cpu"
                    )
                }
                | {
                    key: s.cut(moments[f"{s.name}.{key}"]).to(s.values.device, copy=True)
                    for key in _MOMENTS
                }
            )

    @property
    def num_bytes(self) -> int:
        return sum(
            self._state_of(s)[key].nbytes
            for s in self.slices
            for key in _MOMENTS
            if self._state_of(s)
        )

    def _state_of(self, s: Slice) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {} if self._adamw is None else self._adamw.state[s.values]
        return state


def _adamw(slices: Sequence[Slice], settings: AdamSettings, fused: bool) -> torch.optim.AdamW:
    groups = [
        {"params": [s.values for s in slices if s.decays], "weight_decay": settings.weight_decay},
        {"params": [s.values for s in slices if not s.decays], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups, lr=settings.learning_rate, betas=settings.betas, fused=fused or None
    )


def whole(named: Iterable[NamedParameter]) -> list[Slice]:
    """Each parameter as one slice."""
    return [Slice(name, 0, p.numel(), p, p.ndim >= 2) for name, p in named]


def trained(stage: Layers) -> list[NamedParameter]:
    """The parameters of a stage that learn, in order."""
    return [
        pair
        for pairs in stage.layer_parameters().values()
        for pair in pairs
        if pair[1].requires_grad
    ]


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
    """Step `values` and their moments in place, as torch.optim.AdamW steps a whole parameter, to
    the last bit.
    """
    adamw(
        [values],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(num_updates)],
        foreach=False,
        amsgrad=False,
        beta1=betas[0],
        beta2=betas[1],
        lr=learning_rate,
        weight_decay=weight_decay,
        eps=_EPSILON,
        maximize=False,
    )
