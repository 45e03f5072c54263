"""Each replica holds the optimizer's state of one shard of its stages (ZeRO, Rajbhandari et al.
2020).

    start(s)     reduce-scatter of the gradient         in the background
    report()     squared norm of the own shard
    step(s)      AdamW on the own shard; then all-gather of the parameters, in the background
    finish(s)    the other shards' parameters are here

The bytes are those of an all-reduce, the optimizer's state takes 1 / R of the memory. Gradients may
be rounded on the wire; parameters never are, so that nothing is lost that the next step would have
to make good.

With a step's delay parameters are gathered when the next step begins, each shard a step ahead of
what is agreed by its owner's own gradient (`ahead.py`): the same bytes, and all replicas compute at
the same place. What comes between two steps, held-out losses and checkpoints, has what is agreed.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import Future

import torch

from dpipe.dataparallel.ahead import LookAhead
from dpipe.dataparallel.background import BackgroundExchange, Gradients
from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.flat import FlatParameters, parameter_slice
from dpipe.dataparallel.optimizer import AdamSettings, Optimizer, Slice, trained
from dpipe.dataparallel.setup import ReplicaSetup


class Sharded(DataParallel):
    """`gradients` and `parameters` exchange them. `lag` 1 delays the gradient by a step."""

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers],
        settings: AdamSettings | None,
        gradients: DirectExchange,
        parameters: DirectExchange,
        *,
        lag: int = 0,
        uncounted: Collection[str] = (),
    ) -> None:
        self._gradients = gradients
        self._parameters = parameters
        self._uncounted = uncounted
        self._rows = {index: FlatParameters(trained(stage)) for index, stage in stages.items()}
        self._shards = {
            index: OwnedShard(row, gradients.shard(row.length), settings)
            for index, row in self._rows.items()
        }
        self._flights = BackgroundExchange(
            self._rows, gradients.fail, lag=0, name=f"dpipe-shard-{gradients.replica}"
        )
        self._gathering: dict[int, Future[None]] = {}
        self._ahead = {
            index: LookAhead(shard.optimizer) for index, shard in self._shards.items() if lag
        }
        self._held: dict[
            int, Gradients
        ] = {}  # with a delay, until the next step has gathered its parameters
        self._rate = self._loss_scale = 1.0

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        for stage, ahead in self._ahead.items():
            ahead.come_back()  # from a step that was aborted
            ahead.go(learning_rate)
            self._begin_gather(stage)
        self._begin_held()
        self._rate = learning_rate
        self._loss_scale = loss_scale

    def start(self, stage: int) -> None:
        if stage in self._ahead:
            self._held[stage] = self._rows[stage].gradients()
            self._ahead[stage].remember(self._shards[stage].gradients(), self._loss_scale)
        else:
            self._flights.begin(stage, self._loss_scale, self._gradients.reduce_scatter)

    def wait(self) -> None:
        for stage in self._rows:
            self._flights.due(stage)

    def report(self, *, measure: bool) -> Report:
        squares: dict[int, float] = {}
        for stage, shard in self._shards.items():
            flight = self._flights.due(stage)
            if measure and flight is not None:
                squares |= shard.squares(flight.row, self._uncounted)
        return Report(squares, self._flights.bad())

    def step(self, stage: int, factor: float | None) -> bool:
        flight = self._flights.take(stage)
        late = stage in self._ahead
        if late:
            self._ahead[stage].come_back()
            self._gathering.pop(stage, None)
            self._ahead[stage].factor = self._ahead[stage].factor if factor is None else factor
        if flight is None or factor is None:
            return False
        self._shards[stage].step(flight.row, factor, self._rate)
        if not late:
            self._begin_gather(stage)
        return True

    def finish(self, stage: int) -> None:
        if stage in self._held and stage not in self._gathering:  # between two steps
            self._begin_gather(stage)
        if stage in self._gathering:
            self._gathering[stage].result()  # its messages have deadlines

    def traffic(self) -> list[Traffic]:
        return self._flights.traffic()

    def state(self) -> dict[str, torch.Tensor]:
        self._begin_held()
        state: dict[str, torch.Tensor] = {}
        for stage, shard in self._shards.items():
            state |= self._ahead[stage].state() if stage in self._ahead else {}
            state |= shard.optimizer.state() | self._flights.delayed_state(
                stage, shard.piece, whole=False
            )
        return state

    def restore(self, num_updates: int, moments: Moments) -> None:
        for shard in self._shards.values():
            shard.optimizer.restore(num_updates, moments)
        if self._ahead:
            self._flights.restore(moments)
        for ahead in self._ahead.values():
            ahead.restore(moments)

    @property
    def optimizer_bytes(self) -> int:
        return sum(shard.optimizer.num_bytes for shard in self._shards.values())

    def close(self) -> None:
        self._flights.close()

    def _begin_held(self) -> None:
        """Exchange the gradients of the step before, behind the parameters that this step waits
        for.
        """
        for stage, gradients in self._held.items():
            self._flights.begin(stage, self._loss_scale, self._gradients.reduce_scatter, gradients)
        self._held = {}

    def _begin_gather(self, stage: int) -> None:
        self._gathering[stage] = self._flights.submit(lambda: self._gather(stage))

    @torch.no_grad()
    def _gather(self, stage: int) -> list[Traffic]:
        """Bring all parameters of `stage` here, in memory that gradients do not need now."""
        shard = self._shards[stage]
        of_stage = self._rows[stage]
        row = self._flights.borrow(stage)
        of_stage.fill(row, shard.piece, of_stage.parameters, 1.0)
        traffic = self._parameters.all_gather(row, stage)
        for piece in (slice(0, shard.piece.start), slice(shard.piece.stop, of_stage.length)):
            for span in of_stage.spans(piece):
                of_stage.parameters[span.index].view(-1)[span.start : span.stop] = row[span.here]
        self._flights.give_back(stage, row)
        return traffic


class OwnedShard:
    """What one replica owns of a stage: `piece` of its row, and the optimizer for it."""

    def __init__(self, row: FlatParameters, piece: slice, settings: AdamSettings | None) -> None:
        self.piece = piece
        self._row = row
        self._spans = list(row.spans(piece))
        self._slices = [
            Slice(
                row.names[s.index],
                s.start,
                s.stop,
                parameter_slice(row.parameters[s.index], s.start, s.stop),
                row.parameters[s.index].ndim >= 2,
            )
            for s in self._spans
        ]
        self.optimizer = Optimizer(self._slices, settings, whole=False)

    def squares(self, gradient: torch.Tensor, uncounted: Collection[str]) -> dict[int, float]:
        """By layer, of what is here."""
        sums: dict[int, float] = {}
        for span in self._spans:
            name = self._row.names[span.index]
            if name not in uncounted:
                norm = float(torch.linalg.vector_norm(gradient[span.here], dtype=torch.float64))
                layer = int(name.split(".")[1])
                sums[layer] = sums.get(layer, 0.0) + norm**2
        return sums

    def gradients(self) -> list[torch.Tensor | None]:
        """This replica's own, before any exchange, in memory of their own."""
        whole = (self._row.parameters[s.index].grad for s in self._spans)
        pairs = zip(whole, self._slices, strict=True)
        return [None if gradient is None else s.cut(gradient).clone() for gradient, s in pairs]

    def step(self, gradient: torch.Tensor, factor: float, learning_rate: float) -> None:
        for span, s in zip(self._spans, self._slices, strict=True):
            s.values.grad = (gradient[span.here] * factor).to(s.values)
        self.optimizer.step(learning_rate)
        for s in self._slices:
            s.values.grad = None


def build(setup: ReplicaSetup) -> DataParallel:
    """Gradients may be rounded, parameters never."""
    return Sharded(
        setup.stages,
        setup.optimizer,
        setup.exchange(setup.options.wire),
        setup.exchange("none"),
        lag=int(setup.options.delay),
        uncounted=setup.uncounted,
    )
