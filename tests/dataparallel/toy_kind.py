"""A kind of data parallelism as somebody outside dpipe would add one: all of it is in this file.

It averages each gradient in `wait`, with nothing in the background; the numbers are those of
"all-reduce".
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from dpipe.dataparallel.base import DataParallel, Moments, Report, Traffic
from dpipe.dataparallel.kinds import KINDS, HeldVectors, Kind
from dpipe.dataparallel.optimizer import trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.dataparallel.single import Single

TOY = Kind(
    "toy",
    builder=f"{__name__}:build",
    pattern="all-reduce",
    held=HeldVectors(1),
    late_by=None,
)


@contextmanager
def declared() -> Iterator[None]:
    KINDS.add(TOY)
    try:
        yield
    finally:
        KINDS.remove(TOY.name)


class Blocking(DataParallel):
    independent = False

    def __init__(self, setup: ReplicaSetup) -> None:
        self._setup = setup
        self._exchange = setup.exchange(setup.options.wire)
        self._single = Single(setup.stages, setup.optimizer, setup.uncounted)
        self._started: list[int] = []
        self._sent: list[Traffic] = []
        self._loss_scale = 1.0

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        self._single.begin(step, learning_rate, 1.0)

    def start(self, stage: int) -> None:
        self._started.append(stage)

    def wait(self) -> None:
        for stage in self._started:
            self._average(stage)
        self._started = []

    def report(self, *, measure: bool) -> Report:
        return self._single.report(measure=measure and self._setup.replica == 0)

    def step(self, stage: int, factor: float | None) -> bool:
        return self._single.step(stage, factor)

    def finish(self, stage: int) -> None:
        pass

    def traffic(self) -> list[Traffic]:
        sent = self._sent
        self._sent = []
        return sent

    def state(self) -> dict[str, torch.Tensor]:
        return self._single.state() if self._setup.replica == 0 else {}

    def restore(self, num_updates: int, moments: Moments) -> None:
        self._single.restore(num_updates, moments)

    @property
    def optimizer_bytes(self) -> int:
        return self._single.optimizer_bytes

    def close(self) -> None:
        pass

    def _average(self, stage: int) -> None:
        parameters = [parameter for _, parameter in trained(self._setup.stages[stage])]
        gradients = [parameter.grad for parameter in parameters]
        vector = torch.cat([g.flatten() for g in gradients if g is not None]) / self._loss_scale
        self._sent += self._exchange.average(vector, stage, lambda piece: None)
        means = vector.split([parameter.numel() for parameter in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad = mean.view_as(parameter)


def build(setup: ReplicaSetup) -> DataParallel:
    return Blocking(setup)
