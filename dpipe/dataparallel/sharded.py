"""Each replica holds the optimizer's state of one shard of its stages (ZeRO, Rajbhandari et al.
2020).

    start(s)     reduce-scatter of the gradient         in the background
    report()     squared norm of the own shard
    step(s)      step the own shard; then all-gather of the parameters, in the background
    finish(s)    the other shards' parameters are here

The bytes are those of an all-reduce, the optimizer's state takes 1 / R of the memory. Gradients may
be rounded on the wire; parameters never are, so no rounding error accumulates in them.

With a step's delay parameters are gathered when the next step begins, each shard a step ahead of
the agreed parameters by its owner's own gradient (`ahead.py`): the same bytes, and all replicas
compute at the same point. Between steps, for held-out losses and checkpoints, the agreed parameters
are in place.
"""

from collections.abc import Collection, Mapping
from concurrent.futures import Future
from functools import partial

import torch

from dpipe.dataparallel.ahead import LookAhead
from dpipe.dataparallel.background import BackgroundExchange, Gradients
from dpipe.dataparallel.base import DataParallel, Layers, Moments, Report, Traffic
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.flat import FlatParameters, parameter_slice
from dpipe.dataparallel.optimizer import Optimizer, Slice, trained
from dpipe.dataparallel.setup import ReplicaSetup
from dpipe.optimizers.kinds import OptimizerSettings


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


class Sharded(DataParallel):
    """`gradients` and `parameters` exchange them. `lag` 1 delays the gradient by a step."""

    independent = False

    def __init__(
        self,
        stages: Mapping[int, Layers],
        settings: OptimizerSettings | None,
        gradients: DirectExchange,
        parameters: DirectExchange,
        *,
        lag: int = 0,
        uncounted: Collection[str] = (),
    ) -> None:
        self._gradients = gradients
        self._parameters = parameters
        self._uncounted = uncounted
        self._flat: dict[int, FlatParameters] = {}  # by stage, all of these
        self._shards: dict[int, OwnedShard] = {}
        self._ahead: dict[int, LookAhead] = {}
        for index, stage in stages.items():
            flat = FlatParameters(trained(stage))
            shard = OwnedShard(flat, gradients.shard(flat.length), settings)
            self._flat[index] = flat
            self._shards[index] = shard
            if lag:
                self._ahead[index] = LookAhead(shard.optimizer)
        # the delay is `_held`: it keeps the gradients back, so that parameters go first
        name = f"dpipe-shard-{gradients.replica}"
        self._background = BackgroundExchange(self._flat, gradients.fail, lag=0, name=name)
        self._gathering: dict[int, Future[None]] = {}
        self._held: dict[int, Gradients] = {}
        self._rate = 1.0
        self._loss_scale = 1.0

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        for stage, ahead in self._ahead.items():
            # It may still be away, from a step that was aborted.
            ahead.come_back()
            ahead.go(learning_rate)
            self._begin_gather(stage)
        # Behind the parameters, which the next forward waits for; nobody waits for gradients yet.
        self._begin_held()
        self._rate = learning_rate
        # Only now: what was held back carries the scale of its own step.
        self._loss_scale = loss_scale

    def start(self, stage: int) -> None:
        if stage in self._ahead:
            self._held[stage] = self._flat[stage].gradients()
            own = self._shards[stage].gradients()
            self._ahead[stage].remember(own, self._loss_scale)
        else:
            self._background.begin(stage, self._loss_scale, self._gradients.reduce_scatter)

    def wait(self) -> None:
        for stage in self._flat:
            self._background.due(stage)

    def report(self, *, measure: bool) -> Report:
        squares: dict[int, float] = {}
        for stage, shard in self._shards.items():
            gradient = self._background.due(stage)
            if measure and gradient is not None:
                squares |= shard.squares(gradient.vector, self._uncounted)
        return Report(squares, self._background.bad())

    def leave_out(self, replicas: Collection[int]) -> None:
        reduce_scatter = partial(self._gradients.reduce_scatter, without=replicas)
        for stage, flat in self._flat.items():
            self._background.take(stage)
            gradients = flat.gradients()
            # Zeros are sent; the owners of the shards drop them, whatever they are.
            if self._gradients.replica in replicas:
                gradients = [None for _ in gradients]
            self._background.begin(stage, self._loss_scale, reduce_scatter, gradients)
        self.wait()

    def step(self, stage: int, factor: float | None) -> bool:
        gradient = self._background.take(stage)
        is_late = stage in self._ahead
        if is_late:
            ahead = self._ahead[stage]
            ahead.come_back()
            # What was gathered are parameters that lie ahead: the agreed ones are still to come.
            self._gathering.pop(stage, None)
            if factor is not None:
                ahead.factor = factor
        if gradient is None or factor is None:
            return False
        self._shards[stage].step(gradient.vector, factor, self._rate)
        if not is_late:
            self._begin_gather(stage)
        return True

    def finish(self, stage: int) -> None:
        # Between two steps of a delayed run nothing is being gathered yet.
        if stage in self._held and stage not in self._gathering:
            self._begin_gather(stage)
        if stage in self._gathering:
            # Its messages have deadlines.
            self._gathering[stage].result()

    def traffic(self) -> list[Traffic]:
        return self._background.traffic()

    def state(self) -> dict[str, torch.Tensor]:
        # Their mean belongs to the next step, which may be that of another run.
        self._begin_held()
        state: dict[str, torch.Tensor] = {}
        for stage, shard in self._shards.items():
            state |= shard.optimizer.state()
            # Without a delay what is exchanged belongs to the step that is under way.
            if stage in self._ahead:
                state |= self._ahead[stage].state()
                state |= self._background.delayed_state(stage, shard.piece, whole=False)
        return state

    def restore(self, num_updates: int, moments: Moments) -> None:
        for shard in self._shards.values():
            shard.optimizer.restore(num_updates, moments)
        if self._ahead:
            self._background.restore(moments)
        for ahead in self._ahead.values():
            ahead.restore(moments)

    @property
    def optimizer_bytes(self) -> int:
        return sum(shard.optimizer.num_bytes for shard in self._shards.values())

    def close(self) -> None:
        self._background.close()

    def _begin_held(self) -> None:
        """Exchange the gradients of the step before, behind the parameters that this step waits
        for.
        """
        reduce_scatter = self._gradients.reduce_scatter
        for stage, gradients in self._held.items():
            self._background.begin(stage, self._loss_scale, reduce_scatter, gradients)
        self._held = {}

    def _begin_gather(self, stage: int) -> None:
        gather = partial(self._gather, stage)
        self._gathering[stage] = self._background.submit(gather)

    @torch.no_grad()
    def _gather(self, stage: int) -> list[Traffic]:
        """Bring all parameters of `stage` here, in memory that gradients do not need now."""
        piece = self._shards[stage].piece
        flat = self._flat[stage]
        vector = self._background.borrow(stage)
        flat.fill(vector, piece, flat.parameters, 1.0)
        traffic = self._parameters.all_gather(vector, stage)
        before = slice(0, piece.start)
        behind = slice(piece.stop, flat.length)
        for other in (before, behind):
            for segment in flat.segments(other):
                parameter = flat.parameters[segment.index]
                elements = parameter.view(-1)
                elements[segment.start : segment.stop] = vector[segment.here]
        self._background.give_back(stage, vector)
        return traffic


class OwnedShard:
    """What one replica owns of a stage: `piece` of its vector, and the optimizer for it."""

    def __init__(
        self, flat: FlatParameters, piece: slice, settings: OptimizerSettings | None
    ) -> None:
        self.piece = piece
        self._flat = flat
        self._segments = list(flat.segments(piece))
        self._slices: list[Slice] = []
        for segment in self._segments:
            parameter = flat.parameters[segment.index]
            values = parameter_slice(parameter, segment.start, segment.stop)
            decays = parameter.ndim >= 2
            name = flat.names[segment.index]
            owned = Slice(name, segment.start, segment.stop, values, decays)
            self._slices.append(owned)
        self.optimizer = Optimizer(self._slices, settings, whole=False)

    def squares(self, gradient: torch.Tensor, uncounted: Collection[str]) -> dict[int, float]:
        """By layer, the squared norm of what is here of `gradient` [N]."""
        sums: dict[int, float] = {}
        for segment in self._segments:
            name = self._flat.names[segment.index]
            if name in uncounted:
                continue
            values = gradient[segment.here]
            # In fp64, as `squared_norm` of the whole.
            norm = float(torch.linalg.vector_norm(values, dtype=torch.float64))
            layer = int(name.split(".")[1])  # layers.3.qkv.weight
            sums[layer] = sums.get(layer, 0.0) + norm**2
        return sums

    def gradients(self) -> list[torch.Tensor | None]:
        """Copies of this replica's own, before any exchange."""
        gradients: list[torch.Tensor | None] = []
        for segment, s in zip(self._segments, self._slices, strict=True):
            whole = self._flat.parameters[segment.index].grad
            own = None if whole is None else s.cut(whole).clone()
            gradients.append(own)
        return gradients

    def step(self, gradient: torch.Tensor, factor: float, learning_rate: float) -> None:
        for segment, s in zip(self._segments, self._slices, strict=True):
            scaled = gradient[segment.here] * factor
            s.values.grad = scaled.to(s.values)
        self.optimizer.step(learning_rate)
        # A copy of the vector's piece, as large as the shard.
        for s in self._slices:
            s.values.grad = None
