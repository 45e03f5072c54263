"""One replica: its gradient is already the average."""

from collections.abc import Collection, Mapping

import torch

from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.optimizer import AdamSettings, Optimizer, trained, whole
from dpipe.dataparallel.setup import ReplicaSetup


class Single(DataParallel):
    """AdamW on the stages of one rank. The norm leaves out the parameters `uncounted`, which
    another rank counts.

    A parameter that no backward pass has reached steps as by zeros, which are what the other kinds
    exchange of it: its moments fade and its weights decay, and it has taken as many updates as any
    other.
    """

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers] | None = None,
        settings: AdamSettings | None = None,
        uncounted: Collection[str] = (),
    ) -> None:
        self._stages = stages or {}
        self._uncounted = uncounted
        self.optimizers = {
            index: Optimizer(whole(trained(stage)), settings, whole=True)
            for index, stage in self._stages.items()
        }
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
        pairs = [
            pair for stage in self._stages.values() for pair in stage.layer_parameters().items()
        ]
        squares = {
            layer: [(n, squared_norm(p)) for n, p in named if n not in self._uncounted]
            for layer, named in pairs
        }
        sums = {
            layer: sum(value for _, value in values) / self._loss_scale**2
            for layer, values in squares.items()
        }
        names = (
            name for values in squares.values() for name, value in values if not _is_finite(value)
        )
        return Report(sums, next(names, None))

    def step(self, stage: int, factor: float | None) -> bool:
        if factor is None:
            return False
        factor /= self._loss_scale
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
        return {
            name: moment for o in self.optimizers.values() for name, moment in o.state().items()
        }

    def restore(self, num_updates: int, moments: Moments) -> None:
        for optimizer in self.optimizers.values():
            optimizer.restore(num_updates, moments)

    @property
    def optimizer_bytes(self) -> int:
        return sum(optimizer.num_bytes for optimizer in self.optimizers.values())

    def close(self) -> None:
        pass


def build(setup: ReplicaSetup) -> DataParallel:
    return Single(setup.stages, setup.optimizer, setup.uncounted)


def squared_norm(parameter: torch.nn.Parameter) -> float:
    if parameter.grad is None:
        return 0.0
    return float(torch.linalg.vector_norm(parameter.grad, dtype=torch.float64)) ** 2


def _is_finite(value: float) -> bool:
    return value - value == 0.0
