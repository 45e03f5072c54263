"""`data_parallel.delay`: the parameters that replicas compute with, and the mean that they step
by.
"""

from functools import partial

import pytest
import torch
from support.layered import ADAM, RATE, Layered, Make, gradients, one_step, with_replicas

from dpipe.dataparallel.ahead import LookAhead
from dpipe.dataparallel.allreduce import AllReduce
from dpipe.dataparallel.base import DataParallel
from dpipe.dataparallel.direct_exchange import DirectExchange
from dpipe.dataparallel.optimizer import Optimizer, trained, whole
from dpipe.dataparallel.sharded import Sharded
from dpipe.dataparallel.single import Single
from dpipe.wire.feedback import wire
from dpipe.wire.transfer import Links

KINDS = pytest.mark.parametrize("kind", ["all-reduce", "sharded"])


def delayed(kind: str, replicas: int) -> Make:
    def make(stage: Layered, links: Links, replica: int) -> DataParallel:
        both = [
            DirectExchange(links, replica, range(replicas), wire("none"), part_bytes=40)
            for _ in range(2)
        ]
        return (
            AllReduce({0: stage}, ADAM, both[0], lag=1)
            if kind == "all-reduce"
            else Sharded({0: stage}, ADAM, *both, lag=1)
        )

    return make


def values(stage: Layered) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in stage.parameters]


def equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


def descend(
    kind: DataParallel, stage: Layered, replica: int, steps: int
) -> list[list[torch.Tensor]]:
    """Descend a quadratic bowl; returns the parameters at which each gradient was taken."""
    places = []
    for step in range(steps):
        kind.begin(step, RATE, 1.0)
        kind.finish(0)
        places.append(values(stage))
        for parameter in stage.parameters:
            parameter.grad = 3.0 * parameter.detach()
        kind.start(0)
        kind.wait()
        kind.report(measure=True)
        kind.step(0, 1.0)
        stage.zero_grad()
    return places


@KINDS
def test_delay_changes_nothing_if_replicas_have_the_same_data(kind: str) -> None:
    """Their own gradients are then the mean: each is taken where it would be without a delay, to
    the last bit.
    """
    stage = Layered()
    prompt = descend(Single({0: stage}, ADAM), stage, 0, steps=6)
    for places in with_replicas(delayed(kind, 2), 2, partial(descend, steps=6)):
        assert all(equal(late, now) for late, now in zip(places, prompt, strict=True))


def places_of_the_second_step(
    kind: str, replicas: int
) -> list[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """The parameters that each replica computes with, and those after the step."""

    def run(
        kind: DataParallel, stage: Layered, replica: int
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        stage.set_gradients(0, replica)
        one_step(kind, stage, 0)
        kind.begin(1, RATE, 1.0)
        kind.finish(0)
        place = values(stage)
        stage.set_gradients(1, replica)
        kind.start(0)
        kind.wait()
        kind.report(measure=True)
        kind.step(0, None)
        kind.finish(0)
        return place, values(stage)

    return with_replicas(delayed(kind, replicas), replicas, run)  # type: ignore[return-value]


def stepped_alone(replica: int) -> list[torch.Tensor]:
    stage = Layered()
    stage.set_gradients(0, replica)
    one_step(Single({0: stage}, ADAM), stage, 0)
    return values(stage)


def test_each_replica_computes_with_its_own_gradient_applied() -> None:
    for replica, (place, _) in enumerate(places_of_the_second_step("all-reduce", 3)):
        assert equal(place, stepped_alone(replica))


def test_sharded_replicas_compute_with_the_owners_gradients_applied() -> None:
    """60 values in three shards of 20: all of the owner's gradient counts in its own shard
    alone.
    """
    owners = [torch.cat([v.flatten() for v in stepped_alone(replica)]) for replica in range(3)]
    expected = torch.cat([row[20 * r : 20 * (r + 1)] for r, row in enumerate(owners)])
    for place, _ in places_of_the_second_step("sharded", 3):
        assert torch.equal(torch.cat([v.flatten() for v in place]), expected)


@KINDS
def test_skipped_step_keeps_the_averaged_parameters(kind: str) -> None:
    assert all(equal(after, values(Layered())) for _, after in places_of_the_second_step(kind, 3))


@KINDS
def test_resumed_replicas_continue_with_the_same_parameters(kind: str) -> None:
    def run(
        kind: DataParallel, stage: Layered, replica: int, saves: bool
    ) -> tuple[list[torch.Tensor], ...]:
        for step in range(3):
            stage.set_gradients(step, replica)
            one_step(kind, stage, step)
        agreed, saved = (
            values(stage),
            {n: t.clone() for n, t in kind.state().items()} if saves else {},
        )
        kind.begin(3, RATE, 1.0)
        kind.finish(0)
        return agreed, values(stage), saved

    began = with_replicas(delayed(kind, 2), 2, partial(run, saves=True))
    saved = _whole([saved for _, _, saved in began])

    def resume(kind: DataParallel, stage: Layered, replica: int) -> list[torch.Tensor]:
        for parameter, value in zip(stage.parameters, began[0][0], strict=True):
            parameter.data.copy_(value)
        kind.restore(2, saved)
        kind.begin(3, RATE, 1.0)
        kind.finish(0)
        return values(stage)

    never_saved = with_replicas(delayed(kind, 2), 2, partial(run, saves=False))
    for place, (_, expected, _), (_, unsaved, _) in zip(
        with_replicas(delayed(kind, 2), 2, resume), began, never_saved, strict=True
    ):
        assert equal(place, expected)
        assert equal(place, unsaved)


def _whole(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The parts joined as in a checkpoint."""
    parts: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in ((n, t) for state in states for n, t in state.items()):
        base, _, span = name.partition("[")
        parts.setdefault(base, []).append(
            (int(span.split(":")[0] or 0) if span else 0, tensor.reshape(-1))
        )
    return {
        name: torch.cat([t for _, t in sorted(parts_of_one, key=lambda f: f[0])])
        for name, parts_of_one in parts.items()
    }


def ahead(stage: Layered) -> LookAhead:
    return LookAhead(Optimizer(whole(trained(stage)), ADAM, whole=True))


def test_nonfinite_gradient_is_not_applied_ahead() -> None:
    stage = Layered()
    one = ahead(stage)
    one.remember([*gradients(stage, 0, 0)[:2], torch.full((11, 2), torch.inf)], 1.0)
    one.go(RATE)
    assert equal(values(stage), values(Layered()))


def test_gradients_are_unscaled() -> None:
    stage = Layered()
    one = ahead(stage)
    one.remember([gradient * 1024.0 for gradient in gradients(stage, 0, 1)], 1024.0)
    one.go(RATE)
    assert equal(values(stage), stepped_alone(1))


def test_undoing_the_step_ahead_restores_every_bit() -> None:
    stage = Layered()
    one = ahead(stage)
    one.remember(gradients(stage, 0, 0), 1.0)
    one.go(RATE)
    assert not equal(values(stage), values(Layered()))
    one.come_back()
    assert equal(values(stage), values(Layered()))


def test_replica_without_its_own_gradient_applies_the_mean() -> None:
    stage = Layered()
    one = ahead(stage)
    names = [name for name, _ in trained(stage)]
    one.restore(
        {f"{n}.delayed_grad": g for n, g in zip(names, gradients(stage, 0, 2), strict=True)}
    )
    one.go(RATE)
    assert equal(values(stage), stepped_alone(2))
