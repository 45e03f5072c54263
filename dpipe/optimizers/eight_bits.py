"""AdamW whose moments have 8 bits (Dettmers et al. 2022): codes of a map that is finer near zero,
and a scale for each 256 values. The map and the rounding are torchao's.

    codes, scale ──> moments in fp32 ──AdamW──> moments in fp32 ──> codes, scale
                         one parameter at a time
"""

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from dpipe.optimizers.adamw import AdamW
from dpipe.optimizers.kinds import OptimizerSettings, missing_library
from dpipe.optimizers.rule import ParameterUpdate, State, UpdateRule

_BLOCK = 256
# Vectors are small, and their moments stay in fp32, as torchao has it.
_SMALLEST = 4096
_MOMENTS = ("exp_avg", "exp_avg_sq")


class AdamW8bit(UpdateRule):
    def __init__(self, betas: tuple[float, float], quantisation: Any) -> None:
        self._adamw = AdamW(betas)
        self._quantisation = quantisation
        self._maps: dict[tuple[str, torch.device], torch.Tensor] = {}

    def first_state(self, values: torch.Tensor, *, is_end: bool = False) -> State:
        if values.numel() < _SMALLEST or values.numel() % _BLOCK:
            return self._adamw.first_state(values)
        state: State = {}
        for moment in _MOMENTS:
            zeros = torch.zeros_like(values)
            state |= self._rounded(moment, zeros)
        return state

    def step(
        self, updates: Sequence[ParameterUpdate], *, learning_rate: float, weight_decay: float
    ) -> None:
        # One parameter after the other: together their moments would be in fp32 at the same time.
        for update in updates:
            exact = {moment: self._exact(moment, update.state) for moment in _MOMENTS}
            unrounded = replace(update, state=exact)
            self._adamw.step([unrounded], learning_rate=learning_rate, weight_decay=weight_decay)
            for moment in _MOMENTS:
                if moment not in update.state:
                    update.state.update(self._rounded(moment, exact[moment]))

    def _exact(self, moment: str, state: State) -> torch.Tensor:
        if moment in state:
            return state[moment]
        codes = state[f"{moment}_codes"]
        values: torch.Tensor = self._quantisation.dequant_with_qmap(
            codes, self._map(moment, codes.device), state[f"{moment}_scale"]
        )
        return values

    def _rounded(self, moment: str, values: torch.Tensor) -> State:
        scaled, scale = self._quantisation.scale_tensor(values, _BLOCK)
        codes = self._quantisation.quantize_8bit_with_qmap(scaled, self._map(moment, values.device))
        return {f"{moment}_codes": codes, f"{moment}_scale": scale}

    def _map(self, moment: str, device: torch.device) -> torch.Tensor:
        """The 256 values of a moment's codes; a square has no sign."""
        key = (moment, device)
        if key not in self._maps:
            signed = moment == "exp_avg"
            values = self._quantisation.create_dynamic_map(signed=signed)
            self._maps[key] = torch.tensor(values, device=device)
        return self._maps[key]


def build(settings: OptimizerSettings) -> AdamW8bit:
    """Raises `ConfigError` without torchao."""
    try:
        quantisation = import_module("torchao.optim.quant_utils")
    except ModuleNotFoundError:
        raise missing_library(settings.kind) from None
    return AdamW8bit(settings.betas, quantisation)
