"""The optimizer of a stage: a rule (`optimizers/`) on whole parameters, or on one replica's slices
of them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from dpipe.choices import function_at
from dpipe.dataparallel.base import Layers, Moments, NamedParameter
from dpipe.errors import CheckpointError
from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.optimizers.rule import ParameterUpdate, State, UpdateRule


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

    @property
    def layer(self) -> int:
        return int(self.name.split(".")[1])  # layers.3.qkv.weight

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of `whole`, which is as large as the parameter."""
        flat = whole.reshape(-1)
        return flat[self.start : self.stop].view_as(self.values)


class Optimizer:
    """Steps one stage, or the part of it that is here, by `values.grad` of each slice.

    Without `settings` no step changes anything: a replayed stage has bytes to exchange, and
    nothing to learn.
    """

    def __init__(
        self, slices: Sequence[Slice], settings: OptimizerSettings | None, *, whole: bool
    ) -> None:
        self.slices = slices
        self._whole = whole
        self._settings = settings
        self._rule: UpdateRule | None = None
        if settings is not None:
            self._rule = function_at(settings.kind.builder)(settings)
        # From the first update on: what the rule keeps, and how many steps there have been.
        self._states: dict[nn.Parameter, State] = {}
        self._counts: dict[nn.Parameter, torch.Tensor] = {}

    @property
    def learns(self) -> bool:
        return bool(self.slices) and self._rule is not None

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        # The rate is given, not scheduled: it is a function of the step, and a resumed run needs
        # none of its past.
        if self._rule is None:
            return
        # torch's classes would have two groups of parameters, because the decay is one a call.
        for decays in (True, False):
            decay = self._decay(decays=decays)
            updates = []
            for s in self.slices:
                gradient = s.values.grad
                if s.decays != decays or gradient is None:
                    continue
                state = self._state_for_step(s)
                count = self._counts[s.values]
                update = ParameterUpdate(s.values, gradient, state, count)
                updates.append(update)
            self._rule.step(updates, learning_rate=learning_rate, weight_decay=decay)

    @torch.no_grad()
    def look_ahead(self, gradients: Sequence[torch.Tensor], learning_rate: float) -> None:
        """Move `values` as a step by these gradients would, and leave the state as it is."""
        assert self._rule is not None, "nothing learns here"
        for s, gradient in zip(self.slices, gradients, strict=True):
            state = self._states.get(s.values) or self._first_state(s)
            first = self._step_count(0, s.values)
            count = self._counts.get(s.values, first)
            copied = {key: value.clone() for key, value in state.items()}
            decay = self._decay(decays=s.decays)
            like_values = gradient.to(s.values)
            update = ParameterUpdate(s.values, like_values, copied, count.clone())
            self._rule.step([update], learning_rate=learning_rate, weight_decay=decay)

    def range_of(self, s: Slice) -> str:
        """How a name in a checkpoint ends for `s`."""
        return "" if self._whole else s.range

    def state(self) -> dict[str, torch.Tensor]:
        """What the rule keeps, by name; nothing before the first update."""
        moments = {}
        for s in self.slices:
            kept = self._states.get(s.values, {})
            for key, value in kept.items():
                name = f"{s.name}.{key}{self.range_of(s)}"
                moments[name] = value
        return moments

    def names(self) -> list[str]:
        """Of what `restore` takes."""
        names = []
        for s in self.slices:
            names += [f"{s.name}.{key}" for key in self._first_state(s)]
        return names

    def restore(self, num_updates: int, moments: Moments) -> None:
        """After `num_updates` updates; `moments` holds those of whole parameters.

        Raises `CheckpointError` where another optimizer has written them.
        """
        if not (num_updates and self.learns):
            return
        for s in self.slices:
            state = self._first_state(s)
            for key, value in state.items():
                name = f"{s.name}.{key}"
                if name not in moments:
                    raise CheckpointError(self._another(name))
                # Copied: the caller's moments are a whole checkpoint's, which is freed.
                saved = moments[name]
                own = saved.view_as(value) if self._whole else s.cut(saved)
                value.copy_(own)
            self._states[s.values] = state
            self._counts[s.values] = self._step_count(num_updates, s.values)

    @property
    def num_bytes(self) -> int:
        return sum(moment.nbytes for moment in self.state().values())

    def _another(self, name: str) -> str:
        assert self._settings is not None
        return (
            f"the checkpoint holds no {name}, which train.optimizer {self._settings.name!r} goes "
            "on from: take the optimizer that wrote it"
        )

    def _decay(self, *, decays: bool) -> float:
        assert self._settings is not None
        return self._settings.weight_decay if decays else 0.0

    def _first_state(self, s: Slice) -> State:
        if self._rule is None or self._settings is None:
            return {}
        is_end = self._settings.is_end(s.layer)
        return self._rule.first_state(s.values, is_end=is_end)

    def _state_for_step(self, s: Slice) -> State:
        """The state of a slice, which a step changes."""
        if s.values not in self._states:
            # Not before the first step: a checkpoint of none has no moments, and a resumed run
            # restores them.
            self._states[s.values] = self._first_state(s)
            self._counts[s.values] = self._step_count(0, s.values)
        return self._states[s.values]

    def _step_count(self, num_updates: int, values: nn.Parameter) -> torch.Tensor:
        """On the CPU, unless one kernel steps all parameters."""
        device = values.device if values.is_cuda else torch.device("cpu")
        return torch.tensor(float(num_updates), device=device)


def whole(named: Iterable[NamedParameter]) -> list[Slice]:
    """Each parameter as one slice."""
    slices = []
    for name, parameter in named:
        decays = parameter.ndim >= 2
        whole_slice = Slice(name, 0, parameter.numel(), parameter, decays)
        slices.append(whole_slice)
    return slices


def trained(stage: Layers) -> list[NamedParameter]:
    """The parameters of a stage that require gradients, in order."""
    pairs = []
    for named in stage.layer_parameters().values():
        pairs += [pair for pair in named if pair[1].requires_grad]
    return pairs
