"""Replicas as threads over local links: a whole step takes milliseconds."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from dpipe.dataparallel.base import DataParallel
from dpipe.optimizers.kinds import OptimizerSettings
from dpipe.transport.local import LocalHub
from dpipe.wire.transfer import Links

ADAM = OptimizerSettings(learning_rate=0.1, weight_decay=0.1, betas=(0.9, 0.95))
RATE = 0.1


@dataclass
class Layered:
    """A stage of two layers whose sizes no number of replicas divides, with a vector that does not
    decay.
    """

    weights: list[tuple[int, str, nn.Parameter]] = field(default_factory=list)

    def __post_init__(self) -> None:
        draw = torch.Generator().manual_seed(1)
        for layer, name, shape in (
            (3, "matrix", (5, 7)),
            (3, "vector", (3,)),
            (4, "matrix", (11, 2)),
        ):
            self.weights.append(
                (layer, f"layers.{layer}.{name}", nn.Parameter(torch.randn(shape, generator=draw)))
            )

    def layer_parameters(self) -> dict[int, list[tuple[str, nn.Parameter]]]:
        return {layer: [(n, p) for of, n, p in self.weights if of == layer] for layer in (3, 4)}

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [parameter for _, _, parameter in self.weights]

    def set_gradients(self, step: int, replica: int, scale: float = 1.0) -> None:
        """Different gradients for each replica, on the scale of 1."""
        for parameter, gradient in zip(
            self.parameters, gradients(self, step, replica), strict=True
        ):
            parameter.grad = gradient * scale

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None


Make = Callable[[Layered, Links, int], DataParallel]


def gradients(stage: Layered, step: int, replica: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * step + replica)
    return [torch.randn(parameter.shape, generator=draw) for parameter in stage.parameters]


def mean_gradients(stage: Layered, step: int, replicas: int) -> list[torch.Tensor]:
    """Added in replica order, then divided."""
    of_replicas = [gradients(stage, step, replica) for replica in range(replicas)]
    return [sum(same[1:], start=same[0]) / replicas for same in zip(*of_replicas, strict=True)]


def in_threads(count: int, run: Callable[[int], object]) -> list[object]:
    """Call `run` for each of `count` at the same time; returns what each returned or raised."""
    results: list[object] = [None] * count

    def call(index: int) -> None:
        try:
            results[index] = run(index)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=call, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


def with_replicas(
    make: Make, replicas: int, run: Callable[[DataParallel, Layered, int], object]
) -> list[object]:
    """`run(kind, stage, replica)` on every replica; what it returned, or the first error."""
    hub = LocalHub(replicas, transfer_timeout_s=10)

    def replica_main(replica: int) -> object:
        stage = Layered()
        kind = make(stage, hub.transport(replica), replica)
        try:
            return run(kind, stage, replica)
        finally:
            kind.close()

    results = in_threads(replicas, replica_main)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def train(make: Make, replicas: int, steps: int = 3) -> list[Layered]:
    """The stage of each replica after some steps."""

    def run(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        for step in range(steps):
            stage.set_gradients(step, replica)
            one_step(kind, stage, step)
        return stage

    return with_replicas(make, replicas, run)  # type: ignore[return-value]


def one_step(kind: DataParallel, stage: Layered, step: int, factor: float | None = 1.0) -> None:
    kind.begin(step, RATE, 1.0)
    kind.start(0)
    kind.wait()
    kind.report(measure=True)
    kind.step(0, factor)
    stage.zero_grad()
    kind.finish(0)
