"""Every replica averages the whole gradient of its stages, and takes the whole step."""

from collections.abc import Collection, Mapping
from functools import partial
from typing import Protocol

import torch

from dpipe.dataparallel.ahead import LookAhead
from dpipe.dataparallel.background import BackgroundExchange, Gradients, Ready
from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.flat import FlatParameters
from dpipe.dataparallel.optimizer import trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.dataparallel.single import Single
from dpipe.optimizers.kinds import OptimizerSettings


class Averaging(Protocol):
    """What averages a vector over replicas: a `DirectExchange` or a `TorchGroup`."""

    replica: int

    @property
    def device(self) -> torch.device:
        """Where a vector must be."""

    def average(
        self, vector: torch.Tensor, stage: int, ready: Ready, without: Collection[int] = ()
    ) -> list[Traffic]: ...
    def fail(self, error: Exception) -> None: ...


def build(setup: ReplicaSetup) -> DataParallel:
    averaging: Averaging
    if setup.options.group == "torch":
        averaging = setup.open_torch_group()
    else:
        averaging = setup.exchange(setup.options.wire)
    return AllReduce(
        setup.stages,
        setup.optimizer,
        averaging,
        lag=int(setup.options.delay),
        uncounted=setup.uncounted,
        rejects=setup.options.reject is not None,
    )


class AllReduce(DataParallel):
    """`lag` 1 delays the gradient by a step; that step is then computed ahead of the agreed
    parameters (`ahead.py`). With `rejects` this replica's own gradient is kept until the step, for
    `leave_out`.

    Replica 0 reports and saves for all: between steps they hold the same, to the last bit.
    """

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers],
        settings: OptimizerSettings | None,
        averaging: Averaging,
        *,
        lag: int = 0,
        uncounted: Collection[str] = (),
        rejects: bool = False,
    ) -> None:
        self._averaging = averaging
        self._rejects = rejects
        # by stage, as long as it may be exchanged again
        self._own: dict[int, Gradients] = {}
        self._is_first = averaging.replica == 0
        self._single = Single(stages, settings, uncounted)
        self._flat: dict[int, FlatParameters] = {}
        for index, stage in stages.items():
            self._flat[index] = FlatParameters(trained(stage))
        self._background = BackgroundExchange(
            self._flat,
            averaging.fail,
            lag=lag,
            name=f"dpipe-reduce-{averaging.replica}",
            device=averaging.device,
        )
        self._ahead: dict[int, LookAhead] = {}  # by stage; none without a delay
        if lag:
            for index, optimizer in self._single.optimizers.items():
                self._ahead[index] = LookAhead(optimizer, f"@{averaging.replica}")
        self._loss_scale = 1.0

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        # 1: the exchange takes the scale off, and the optimizer sees the mean alone.
        self._single.begin(step, learning_rate, 1.0)
        for ahead in self._ahead.values():
            # It may still be away, from a step that was aborted.
            ahead.come_back()
            ahead.go(learning_rate)

    def start(self, stage: int) -> None:
        if stage in self._ahead:
            own = self._flat[stage].gradients()
            self._ahead[stage].remember(own, self._loss_scale)
        if self._rejects:
            self._own[stage] = self._flat[stage].gradients()
        self._background.begin(stage, self._loss_scale, self._averaging.average)

    def wait(self) -> None:
        for stage in self._flat:
            self._background.due(stage)

    def report(self, *, measure: bool) -> Report:
        # A list, because `any` stops at the first stage that has one.
        has_average = [self._set_average(stage) for stage in self._flat]
        # Replica 0 measures for all: the parts that ranks report are added up.
        measure = measure and self._is_first and any(has_average)
        squares = self._single.report(measure=measure).squares
        return Report(squares, self._background.bad())

    def leave_out(self, replicas: Collection[int]) -> None:
        average = partial(self._averaging.average, without=replicas)
        for stage, own in self._own.items():
            # The mean with what is not finite, which nobody steps by.
            self._background.take(stage)
            gradients = [None for _ in own] if self._averaging.replica in replicas else own
            self._background.begin(stage, self._loss_scale, average, gradients)
        self.wait()

    def step(self, stage: int, factor: float | None) -> bool:
        gradient = self._background.take(stage)
        self._own.pop(stage, None)
        if stage in self._ahead:
            ahead = self._ahead[stage]
            # Before the step: it belongs on the agreed parameters.
            ahead.come_back()
            if factor is not None:
                ahead.factor = factor
        if gradient is None:
            return False
        return self._single.step(stage, factor)

    def finish(self, stage: int) -> None:
        pass

    def traffic(self) -> list[Traffic]:
        return self._background.traffic()

    def state(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for ahead in self._ahead.values():
            state |= ahead.state()
        if self._is_first:
            state |= self._single.state()
            for stage, flat in self._flat.items():
                whole = slice(0, flat.length)
                state |= self._background.delayed_state(stage, whole, whole=True)
        return state

    def whole_state(self) -> dict[str, torch.Tensor]:
        return self._single.state()

    def restore(self, num_updates: int, moments: Moments) -> None:
        self._single.restore(num_updates, moments)
        if self._ahead:
            self._background.restore(moments)
        for ahead in self._ahead.values():
            ahead.restore(moments)

    @property
    def optimizer_bytes(self) -> int:
        return self._single.optimizer_bytes

    def close(self) -> None:
        self._background.close()

    def _set_average(self, stage: int) -> bool:
        """Let the optimizer see the mean in place of this replica's own gradient; false where none
        has come yet.
        """
        gradient = self._background.due(stage)
        if gradient is None:
            return False
        flat = self._flat[stage]
        for index, parameter in enumerate(flat.parameters):
            parameter.grad = flat.view(gradient.vector, index).to(parameter)
        return True
