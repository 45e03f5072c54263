"""One replica: its gradient is already the mean."""

import math
from collections.abc import Collection, Mapping

import torch

from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.optimizer import Optimizer, trained, whole
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.optimizers.kinds import OptimizerSettings


def build(setup: ReplicaSetup) -> DataParallel:
    return Single(setup.stages, setup.optimizer, setup.uncounted)


class Single(DataParallel):
    """Steps the stages of one rank. The norm leaves out the parameters `uncounted`, which
    another rank counts.

    A parameter that no backward pass has reached steps as by zeros, which are what the other kinds
    exchange of it: its moments fade and its weights decay, and it has taken as many updates as any
    other.
    """

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers] | None = None,
        settings: OptimizerSettings | None = None,
        uncounted: Collection[str] = (),
    ) -> None:
        self._stages = stages or {}
        self._uncounted = uncounted
        self.optimizers: dict[int, Optimizer] = {}
        for index, stage in self._stages.items():
            slices = whole(trained(stage))
            self.optimizers[index] = Optimizer(slices, settings, whole=True)
        self._rate = 0.0
        self._loss_scale = 1.0

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._rate = learning_rate
        self._loss_scale = loss_scale

    def start(self, stage: int) -> None:
        pass

    def wait(self) -> None:
        pass

    def report(self, *, measure: bool) -> Report:
        if not measure:
            return Report()
        sums: dict[int, float] = {}
        bad = None
        for stage in self._stages.values():
            for layer, named in stage.layer_parameters().items():
                total = 0.0
                for name, parameter in named:
                    if name in self._uncounted:
                        continue
                    square = squared_norm(parameter)
                    total += square
                    if bad is None and not math.isfinite(square):
                        bad = name
                sums[layer] = total / self._loss_scale**2
        return Report(sums, bad)

    def step(self, stage: int, factor: float | None) -> bool:
        if factor is None:
            return False
        factor /= self._loss_scale  # one multiplication takes off the scale and clips
        for _, parameter in trained(self._stages[stage]):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif factor != 1.0:
                parameter.grad.mul_(factor)
        self.optimizers[stage].step(self._rate)
        return True

    def finish(self, stage: int) -> None:
        pass

    def traffic(self) -> list[Traffic]:
        return []

    def state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for optimizer in self.optimizers.values():
            state |= optimizer.state()
        return state

    def names(self) -> list[str]:
        """Of the state that `restore` takes."""
        names = []
        for optimizer in self.optimizers.values():
            names += optimizer.names()
        return names

    def restore(self, num_updates: int, moments: Moments) -> None:
        for optimizer in self.optimizers.values():
            optimizer.restore(num_updates, moments)

    @property
    def optimizer_bytes(self) -> int:
        return sum(optimizer.num_bytes for optimizer in self.optimizers.values())

    def close(self) -> None:
        pass


def squared_norm(parameter: torch.nn.Parameter) -> float:
    if parameter.grad is None:
        return 0.0
    # In fp64: the square of a large gradient overflows fp32 where the gradient does not.
    norm = torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)
    return float(norm) ** 2
