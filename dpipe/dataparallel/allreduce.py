"""Every replica averages the whole gradient of its stages, and takes the whole step."""

from collections.abc import Collection, Mapping
from typing import Protocol

import torch

from dpipe.dataparallel.ahead import LookAhead
from dpipe.dataparallel.background import BackgroundExchange, Ready
from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.flat import FlatParameters
from dpipe.dataparallel.optimizer import AdamSettings, trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.dataparallel.single import Single


class Averaging(Protocol):
    """What averages a row over replicas: `exchange.DirectExchange` or `group.TorchGroup`."""

    replica: int

    @property
    def device(self) -> torch.device:
        """Where a row must be."""

    def average(self, row: torch.Tensor, stage: int, ready: Ready) -> list[Traffic]: ...
    def fail(self, error: Exception) -> None: ...


class AllReduce(DataParallel):
    """`lag` 1 delays the gradient by a step, which is then computed ahead of what is agreed
    (`ahead.py`).

    Replica 0 speaks for all: between steps they hold the same, to the last bit.
    """

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers],
        settings: AdamSettings | None,
        averaging: Averaging,
        *,
        lag: int = 0,
        uncounted: Collection[str] = (),
    ) -> None:
        self._averaging = averaging
        self._speaks = averaging.replica == 0
        self._single = Single(stages, settings, uncounted)
        self._rows = {index: FlatParameters(trained(stage)) for index, stage in stages.items()}
        name = f"dpipe-reduce-{averaging.replica}"
        device = averaging.device
        self._flights = BackgroundExchange(
            self._rows, averaging.fail, lag=lag, name=name, device=device
        )
        ahead = self._single.optimizers.items() if lag else ()
        self._ahead = {
            stage: LookAhead(optimizer, f"@{averaging.replica}") for stage, optimizer in ahead
        }
        self._loss_scale = 1.0

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._loss_scale = loss_scale
        self._single.begin(step, learning_rate, 1.0)
        for ahead in self._ahead.values():
            ahead.come_back()  # from a step that was aborted
            ahead.go(learning_rate)

    def start(self, stage: int) -> None:
        if stage in self._ahead:
            self._ahead[stage].remember(self._rows[stage].gradients(), self._loss_scale)
        self._flights.begin(stage, self._loss_scale, self._averaging.average)

    def wait(self) -> None:
        for stage in self._rows:
            self._flights.due(stage)

    def report(self, *, measure: bool) -> Report:
        due = [self._show_average(stage) for stage in self._rows]
        squares = self._single.report(measure=measure and self._speaks and any(due)).squares
        return Report(squares, self._flights.bad())

    def step(self, stage: int, factor: float | None) -> bool:
        flight = self._flights.take(stage)
        if stage in self._ahead:
            self._ahead[stage].come_back()
            self._ahead[stage].factor = self._ahead[stage].factor if factor is None else factor
        return flight is not None and self._single.step(stage, factor)

    def finish(self, stage: int) -> None:
        pass

    def traffic(self) -> list[Traffic]:
        return self._flights.traffic()

    def state(self) -> dict[str, torch.Tensor]:
        state = {
            name: gradient
            for ahead in self._ahead.values()
            for name, gradient in ahead.state().items()
        }
        state |= self._single.state() if self._speaks else {}
        for stage, row in self._rows.items() if self._speaks else ():
            state |= self._flights.delayed_state(stage, slice(0, row.length), whole=True)
        return state

    def restore(self, num_updates: int, moments: Moments) -> None:
        self._single.restore(num_updates, moments)
        if self._ahead:
            self._flights.restore(moments)
        for ahead in self._ahead.values():
            ahead.restore(moments)

    @property
    def optimizer_bytes(self) -> int:
        return self._single.optimizer_bytes

    def close(self) -> None:
        self._flights.close()

    def _show_average(self, stage: int) -> bool:
        """Let the optimizer see the average in place of this replica's own gradient; false where
        none has come yet.
        """
        flight = self._flights.due(stage)
        row = self._rows[stage]
        for index, parameter in enumerate(row.parameters if flight is not None else ()):
            parameter.grad = row.view(flight.row, index).to(parameter)  # type: ignore[union-attr]  # not None here
        return flight is not None


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
    )
