"""A replica whose gradient is not finite is left out of a step's mean, and takes that step too."""

import math

import pytest
import torch
from support.layered import ADAM, RATE, Layered, Make, gradients, one_step, with_replicas

from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.base import DataParallel
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.sharded import Sharded
from dpipe.dataparallel.single import Single
from dpipe.wire.feedback import wire
from dpipe.wire.transfer import Links

BAD_STEP = 1


def of_kind(name: str, replicas: int, wire_name: str = "none") -> Make:
    def make(stage: Layered, links: Links, replica: int) -> DataParallel:
        def exchange(wire_name: str) -> DirectExchange:
            return DirectExchange(links, replica, range(replicas), wire(wire_name), part_bytes=40)

        if name == "all-reduce":
            return AllReduce({0: stage}, ADAM, exchange(wire_name), rejects=True)
        return Sharded({0: stage}, ADAM, exchange(wire_name), exchange("none"))

    return make


def step_without(kind: DataParallel, stage: Layered, step: int, bad: set[int]) -> float:
    """One step as `engine/update.py` takes it; returns this rank's part of the squared norm."""
    kind.begin(step, RATE, 1.0)
    kind.start(0)
    kind.wait()
    report = kind.report(measure=True)
    if bad:
        kind.leave_out(bad)
        report = kind.report(measure=True)
    assert report.bad is None
    kind.step(0, 1.0)
    stage.zero_grad()
    kind.finish(0)
    return sum(report.squares.values())


def mean_of_rest(stage: Layered, step: int, replicas: int, bad: set[int]) -> list[torch.Tensor]:
    rest = [gradients(stage, step, r) for r in range(replicas) if r not in bad]
    return [sum(same[1:], start=same[0]) / len(rest) for same in zip(*rest, strict=True)]


@pytest.mark.parametrize("poison", [math.nan, math.inf, 3e38])
@pytest.mark.parametrize(("replicas", "bad"), [(2, {1}), (2, {0}), (3, {1}), (4, {0, 2}), (4, {3})])
@pytest.mark.parametrize("name", ["all-reduce", "sharded"])
def test_step_is_the_mean_of_the_other_replicas_to_the_last_bit(
    name: str, replicas: int, bad: set[int], poison: float
) -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> tuple[Layered, float]:
        norm = 0.0
        for step in range(3):
            stage.set_gradients(step, replica)
            leaves_out = bad if step == BAD_STEP else set()
            if replica in leaves_out:
                for parameter in stage.parameters:
                    assert parameter.grad is not None
                    parameter.grad.fill_(poison)
            part = step_without(kind, stage, step, leaves_out)
            norm = part if step == BAD_STEP else norm
        return stage, norm

    results = with_replicas(of_kind(name, replicas), replicas, run)
    expected = Layered()
    single = Single({0: expected}, ADAM)
    for step in range(3):
        mean = mean_of_rest(expected, step, replicas, bad if step == BAD_STEP else set())
        for parameter, gradient in zip(expected.parameters, mean, strict=True):
            parameter.grad = gradient
        one_step(single, expected, step)
    for stage, _ in results:  # type: ignore[misc]
        for ours, theirs in zip(stage.parameters, expected.parameters, strict=True):
            assert torch.equal(ours, theirs)
    mean = mean_of_rest(expected, BAD_STEP, replicas, bad)
    squares = sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in mean)
    assert sum(norm for _, norm in results) == pytest.approx(squares, rel=1e-6)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["all-reduce", "sharded"])
def test_replicas_stay_equal_on_a_lossy_wire(name: str) -> None:
    def run(kind: DataParallel, stage: Layered, replica: int) -> Layered:
        for step in range(3):
            stage.set_gradients(step, replica, scale=math.nan if replica == step else 1.0)
            step_without(kind, stage, step, {step})
        return stage

    first, *others = with_replicas(of_kind(name, 4, "bf16"), 4, run)
    for other in others:
        for one, another in zip(first.parameters, other.parameters, strict=True):  # type: ignore[attr-defined]
            assert torch.equal(one, another)
            assert one.isfinite().all()
