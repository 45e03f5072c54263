"""AdamW (Loshchilov and Hutter 2019) on whole parameters, or on the slices of them that one replica owns."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dpipe.dataparallel.base import Layers, Moments, Named

_MOMENTS = ("exp_avg", "exp_avg_sq")


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


class Optimizer:
    """AdamW of one stage, or of the part of it that is here. Steps by `values.grad` of each slice."""

    def __init__(self, slices: Sequence[Slice], settings: AdamSettings, *, whole: bool) -> None:
        self._slices, self._whole = slices, whole
        groups = [
            {"params": [s.values for s in slices if s.decays], "weight_decay": settings.weight_decay},
            {"params": [s.values for s in slices if not s.decays], "weight_decay": 0.0},
        ]
        # One kernel for all parameters; on a CPU it would change the bits, and there is nothing to gain.
        self._fused = bool(slices) and slices[0].values.is_cuda
        self._adamw = (
            torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, fused=self._fused or None)
            if slices
            else None
        )

    def step(self, learning_rate: float) -> None:
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = learning_rate
            self._adamw.step()

    def state(self) -> dict[str, torch.Tensor]:
        """The moments by name; none before the first update."""
        return {
            f"{s.name}.{key}{'' if self._whole else s.range}": self._state_of(s)[key]
            for s in self._slices
            for key in _MOMENTS
            if key in self._state_of(s)
        }

    def restore(self, num_updates: int, moments: Moments) -> None:
        for s in self._slices if num_updates else ():
            self._state_of(s).update(
                {"step": torch.tensor(float(num_updates), device=s.values.device if self._fused else "cpu")}
                | {key: _cut(moments[f"{s.name}.{key}"], s).to(s.values.device, copy=True) for key in _MOMENTS}
            )

    @property
    def num_bytes(self) -> int:
        return sum(self._state_of(s)[key].nbytes for s in self._slices for key in _MOMENTS if self._state_of(s))

    def _state_of(self, s: Slice) -> dict[str, torch.Tensor]:
        assert self._adamw is not None
        state: dict[str, torch.Tensor] = self._adamw.state[s.values]
        return state


def whole(named: Iterable[Named]) -> list[Slice]:
    """Each parameter as one slice."""
    return [Slice(name, 0, p.numel(), p, p.ndim >= 2) for name, p in named]


def trained(stage: Layers) -> list[Named]:
    """The parameters of a stage that learn, in order."""
    return [pair for pairs in stage.layer_parameters().values() for pair in pairs if pair[1].requires_grad]


def _cut(moment: torch.Tensor, s: Slice) -> torch.Tensor:
    return moment.reshape(-1)[s.start : s.stop].view_as(s.values)
