"""Replicas that are cut differently: each segment of the layers agrees by itself, among the ranks
that hold it (`schedule/segments.py`).

    replica 0   rank 0: layers 0 1 2 3    rank 1: 4 5        segment 0  ranks 0 and 2
    replica 1   rank 2: layers 0 1        rank 3: 2 3 4 5    segment 1  ranks 0 and 3
                                                             segment 2  ranks 1 and 3

A kind sees segments where it would see stages. Each value is added in replica order as ever, so
that the mean has the bits that it has where all are cut alike.
"""

from collections.abc import Collection, Mapping, Sequence

import torch

from dpipe.dataparallel.base import DataParallel, Layers, Moments, NamedParameter, Report, Traffic


class SomeLayers:
    """Of a stage, those of one segment."""

    def __init__(self, stage: Layers, layers: Collection[int]) -> None:
        self._stage = stage
        self._layers = layers

    def layer_parameters(self) -> Mapping[int, Sequence[NamedParameter]]:
        here = {}
        for layer, named in self._stage.layer_parameters().items():
            if layer in self._layers:
                here[layer] = named
        return here


class BySegment(DataParallel):
    """`inner` agrees on segments; `segments` are those of each stage here, in the order in which
    all replicas exchange them.
    """

    def __init__(self, inner: DataParallel, segments: Mapping[int, Sequence[int]]) -> None:
        self._inner = inner
        self._segments = segments
        self._stage_of: dict[int, int] = {}
        for stage, numbers in segments.items():
            for number in numbers:
                self._stage_of[number] = stage

    @property
    def independent(self) -> bool:
        return self._inner.independent

    def begin(self, step: int, learning_rate: float, loss_scale: float) -> None:
        self._inner.begin(step, learning_rate, loss_scale)

    def start(self, stage: int) -> None:
        for number in self._segments[stage]:
            self._inner.start(number)

    def wait(self) -> None:
        self._inner.wait()

    def report(self, *, measure: bool) -> Report:
        return self._inner.report(measure=measure)

    def leave_out(self, replicas: Collection[int]) -> None:
        self._inner.leave_out(replicas)

    def step(self, stage: int, factor: float | None) -> bool:
        stepped = False
        for number in self._segments[stage]:
            stepped |= self._inner.step(number, factor)
        return stepped

    def finish(self, stage: int) -> None:
        for number in self._segments[stage]:
            self._inner.finish(number)

    def traffic(self) -> list[Traffic]:
        moved = []
        for each in self._inner.traffic():
            stage = self._stage_of[each.stage]
            traffic = Traffic(stage, each.peer, each.moved, each.received)
            moved.append(traffic)
        return moved

    def state(self) -> dict[str, torch.Tensor]:
        return self._inner.state()

    def whole_state(self) -> dict[str, torch.Tensor]:
        return self._inner.whole_state()

    def restore(self, num_updates: int, moments: Moments) -> None:
        self._inner.restore(num_updates, moments)

    @property
    def optimizer_bytes(self) -> int:
        return self._inner.optimizer_bytes

    def leave(self) -> None:
        self._inner.leave()

    def fail(self, error: Exception) -> None:
        self._inner.fail(error)

    def close(self) -> None:
        self._inner.close()
